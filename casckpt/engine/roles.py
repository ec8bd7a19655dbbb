"""The templates as data: which roles a training by PPO, SAC, DQN or GRPO, or of a population, has, and how to see them.

Expressions are searched for in lower-case leaf paths (`policy/critic_target.qf0.weight`). They know the names that
hand-written loops and Stable-Baselines3 use; where they find too much, `besides` takes it back.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Role:
    """One part of a training's state.

    Attributes:
        name: as reports and `aliases` call it.
        why: what goes wrong without it.
        path: regular expression that is searched for in a lower-case leaf path.
        besides: paths that this expression finds too do not count.
        unless: if any leaf path matches this expression, the role is not needed.
        is_required: a state without it is incomplete.
    """

    name: str
    why: str
    path: str
    besides: str = ""
    unless: str = ""
    is_required: bool = True


@dataclass(frozen=True)
class Template:
    """What a kind of training needs. `member_roles` are needed by each member of a population."""

    name: str
    roles: tuple[Role, ...]
    member_roles: tuple[Role, ...] = ()


IN_BUFFERS = r"replay|rollout|buffer|trajector"
_SET_ASIDE = r"optim|sched|target|tgt|normali[sz]|(^|/)(env|callbacks|replay|rollout)"
_OPTIMIZER = r"(^|[/._])(optim|opt([/._]|$))"
_JOINT_OPTIMIZER = r"^(optimizers?|optim|opt)/(state|param_groups)"


def _named(words: str) -> str:
    """An expression for one of these words as a part of a path's names."""
    return rf"(^|[/._])({words})(_?\d+)?([/._]|$)"


def _optimizer(words: str) -> str:
    return rf"{_JOINT_OPTIMIZER}|(?=.*{_OPTIMIZER}).*(^|[/._])({words})([/._]|$)"


_SHARED = (
    Role(
        "counters",
        "schedules, logs and step numbers start over",
        _named("progress|counters?|num_timesteps|steps?|updates?|global_steps?|trainer|iterations?|epochs?"),
        besides=rf"{_OPTIMIZER}|{IN_BUFFERS}|(^|/)(env|callbacks|log|logger)",
    ),
    *(
        Role(f"random stream of {name}", "draws repeat or differ", rf"(^|/)(rng|random|seeds?)\w*/(.*/)?{name}")
        for name in ("python", "numpy", "torch")
    ),
)
_LOOP = (
    Role(
        "environment",
        "episodes under way are lost, and resets draw other starts",
        r"(^|/)(vec_?)?envs?(ironments?)?([/._-]|$)",
    ),
    Role(
        "last observation",
        "the first transition after a resume is wrong",
        r"(^|[/_.])(last_)?(obs|observations?)([/_.]|$)",
        besides=rf"{IN_BUFFERS}|obs_rms|normali[sz]|observation_space|obs_space",
    ),
    Role(
        "normaliser",
        "inputs and rewards jump by the statistics that start over",
        r"normali[sz]e|obs_rms|ret_rms|running_(mean|var)",
        is_required=False,
    ),
    Role("schedule", "the learning rate starts over", r"sched|progress_remaining", is_required=False),
    Role("evaluation records", "the best model so far is forgotten", r"eval|best_", is_required=False),
)
_REPLAY = (
    Role("replay rows", "experience has to be collected again", r"replay", besides=r"position"),
    Role(
        "replay position",
        "new rows overwrite the wrong ones",
        r"replay.*(pos(ition)?|head|tail|ptr|cursor|next|index|_n$|size|total|count)",
    ),
)

TEMPLATES: dict[str, Template] = {
    template.name: template
    for template in (
        Template(
            "ppo",
            (
                Role(
                    "policy",
                    "there is nothing to go on with",
                    _named("policy|actor|model|agent|net|network|pi"),
                    besides=_SET_ASIDE,
                ),
                Role("optimizer", "moments start over, and the first updates are too large", _OPTIMIZER),
                *_SHARED,
                *_LOOP,
                Role("rollout", "a commit within a rollout loses it", r"rollout|trajector", is_required=False),
            ),
        ),
        Template(
            "sac",
            (
                Role(
                    "actor",
                    "there is nothing to go on with",
                    _named("policy|actor|pi"),
                    besides=rf"{_SET_ASIDE}|critic|qf",
                ),
                Role(
                    "critics", "values start over", _named(r"critics?|q|qf|q_?nets?|q_?functions?"), besides=_SET_ASIDE
                ),
                Role(
                    "target critics",
                    "targets jump to the live critics",
                    r"target|tgt",
                    besides=rf"{_OPTIMIZER}|target_entropy|{IN_BUFFERS}",
                ),
                Role("actor optimizer", "moments start over", _optimizer("actor|policy|pi")),
                Role("critic optimizer", "moments start over", _optimizer(r"critics?|q|qf|q_?nets?")),
                Role(
                    "temperature",
                    "exploration starts over",
                    r"(^|[/._])(log_)?(alpha|ent(ropy)?_?coef\w*|temperature)([/._]|$)",
                    besides=_OPTIMIZER,
                ),
                Role(
                    "temperature optimizer",
                    "the temperature's moments start over",
                    r"(?=.*optim).*(alpha|ent(ropy)?_?coef|temperature)",
                    unless=r"ent_coef_tensor|fixed_(alpha|temperature)",
                ),
                *_REPLAY,
                *_SHARED,
                *_LOOP,
                Role("action noise", "correlated noise starts over", r"noise|exploration", is_required=False),
            ),
        ),
        Template(
            "dqn",
            (
                Role(
                    "q network",
                    "there is nothing to go on with",
                    _named(r"policy|q|q_?nets?|q_?networks?|online|model|quantile_net"),
                    besides=_SET_ASIDE,
                ),
                Role(
                    "target network",
                    "targets jump to the live network",
                    r"target|tgt",
                    besides=rf"{_OPTIMIZER}|{IN_BUFFERS}",
                ),
                Role("optimizer", "moments start over", _OPTIMIZER),
                Role("exploration rate", "exploration starts over", r"epsilon|exploration_rate|(^|[/._])eps([/._]|$)"),
                *_REPLAY,
                *_SHARED,
                *_LOOP,
            ),
        ),
        Template(
            "grpo",
            (
                Role(
                    "policy",
                    "there is nothing to go on with",
                    _named("policy|actor|model|lora|adapter"),
                    besides=rf"{_SET_ASIDE}|(^|[/._])ref",
                ),
                Role("reference", "the penalty is measured against other weights", r"(^|[/._-])ref(erence)?([/._-]|$)"),
                Role("optimizer", "moments start over", _OPTIMIZER),
                Role("schedule", "the learning rate starts over", r"sched"),
                Role(
                    "prompt cursor", "prompts are repeated or left out", r"cursor|prompt|data_?loader|sampler|dataset"
                ),
                *_SHARED,
                Role(
                    "in-flight rollouts",
                    "generations under way are lost",
                    r"in_?flight|pending|queue|rollout",
                    is_required=False,
                ),
                Role("gradient scaler", "the loss scale starts over", r"scaler", is_required=False),
            ),
        ),
        Template(
            "pbt",
            (
                Role(
                    "scores",
                    "the next exploitation chooses by nothing",
                    _named("scores?|fitness|ranking|returns|performance"),
                ),
                Role(
                    "generation",
                    "exploitation comes too early or too late",
                    _named("generations?|rounds?|population|counters?|progress"),
                    besides=r"(^|/)(members?|agents?|workers?)[-_./ ]?\d",
                ),
                *_SHARED[1:],
            ),
            member_roles=(
                Role(
                    "policy",
                    "there is nothing to go on with",
                    _named("policy|actor|model|agent|net|network"),
                    besides=_SET_ASIDE,
                ),
                Role("optimizer", "moments start over", _OPTIMIZER),
                Role("hyper-parameters", "a member trains on with another's", r"hyper|hparams?|param_groups|config"),
                Role(
                    "counters",
                    "schedules start over",
                    _named("progress|counters?|steps?|updates?|iterations?"),
                    besides=_OPTIMIZER,
                ),
            ),
        ),
    )
}
