"""Does a captured environment go on, in another process, as it would have gone on in this one? Try it.

The environment is played for a while, committed to a store in a temporary folder, and played on; a process that is
started for it makes the environment anew, restores it from that store, and plays the same actions. Observations,
rewards and ends are compared to the last bit, and the state after the last step too. What depends on anything that the
capture lacks (a pointer, a file, another library's generator) differs, or fails.
"""

from __future__ import annotations

import copy
import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gymnasium.vector.utils import CloudpickleWrapper

from casckpt.integrations.gymnasium.parts import Parts, parts_of, tree_of
from casckpt.integrations.gymnasium.put import first_difference, same
from casckpt.integrations.gymnasium.state import EnvState
from casckpt.store.opening import open_store

TIMEOUT_S = 300.0  # for the other process: it imports the libraries anew


@dataclass(frozen=True)
class SelfTestReport:
    """What the other process did.

    Attributes:
        is_exact: every step was equal, and so was the state at the end.
        steps: how many steps were compared.
        first_step: the first step that differed, None when none did.
        problem: what differed or failed, empty when nothing did.
        missing: what the capture lacks, as `EnvReport` says it.
    """

    is_exact: bool
    steps: int
    first_step: int | None
    problem: str
    missing: list[str]

    def __str__(self) -> str:
        if self.is_exact:
            return f"exact: {self.steps} steps in a fresh process equal those in this one"
        return f"not exact: {self.problem}" + "".join(f"\nnot captured  {each}" for each in self.missing)


def self_test(make: Callable[[], Any], *, warm_up: int = 50, steps: int = 200, seed: int = 0) -> SelfTestReport:
    """Capture here, restore in a fresh process, compare.

    Args:
        make: a callable without arguments that makes one (not vectorised) environment.
        warm_up: steps before the capture.
        steps: steps that are compared.
        seed: of the first reset and of the random actions.

    Cost: starting a process and importing the libraries in it (1-3 s), and twice the steps.
    """
    env = make()
    try:
        env.reset(seed=seed)
        space = copy.deepcopy(env.action_space)
        space.seed(seed)
        actions = [space.sample() for _ in range(warm_up + steps)]
        _play(env, actions[:warm_up])
        state = EnvState(env, strict=False)
        missing = [str(finding) for finding in state.report().missing]
        with tempfile.TemporaryDirectory() as folder:
            with open_store(folder, create=True) as store:
                store.commit(0, {"env": state})
            expected, last = _play(env, actions[warm_up:]), state.state_dict()
            outcome = _elsewhere(make, folder, actions[warm_up:])
    finally:
        env.close()
    if isinstance(outcome, str):
        return SelfTestReport(False, steps, None, outcome, missing)
    return _judge(expected, last, outcome, missing)


def _judge(expected: list[Any], last: Any, outcome: tuple[list[Any], Parts], missing: list[str]) -> SelfTestReport:
    found, final = outcome
    for step, (here, there) in enumerate(zip(expected, found, strict=True)):
        if not same(here, there):
            names = ("observation", "reward", "terminated", "truncated", "observation after the reset")
            names_found = [name for name, a, b in zip(names, here, there, strict=False) if not same(a, b)]
            problem = f"step {step} after the capture: another {', '.join(names_found) or 'end of the episode'}"
            return SelfTestReport(False, len(expected), step, problem, missing)
    path = first_difference(last["env"], tree_of(final), "env")
    problem = f"the state after {len(expected)} equal steps: {path}" if path else ""
    return SelfTestReport(not path and not missing, len(expected), None, problem or "; ".join(missing), missing)


def _play(env: Any, actions: list[Any]) -> list[Any]:
    """One tuple a step; where an episode ends, the next one's first observation is the last item."""
    played = []
    for action in actions:
        observation, reward, terminated, truncated, _ = env.step(action)
        record = [copy.deepcopy(observation), float(reward), bool(terminated), bool(truncated)]
        if terminated or truncated:
            record.append(copy.deepcopy(env.reset()[0]))
        played.append(tuple(record))
    return played


def _elsewhere(make: Callable[[], Any], folder: str, actions: list[Any]) -> Any:
    """What `_work` sends from a fresh process; text when it failed."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(there, CloudpickleWrapper(make), folder, actions), daemon=True)
    process.start()
    there.close()
    try:
        if not here.poll(TIMEOUT_S):
            return f"the fresh process did not answer within {TIMEOUT_S:.0f} s"
        return here.recv()
    except EOFError:
        process.join()
        return f"the fresh process ended with exit code {process.exitcode}"
    finally:
        here.close()
        if process.is_alive():
            process.join(5)
            process.kill()
        process.join()
        process.close()


def _work(pipe: Any, make: Any, folder: str, actions: list[Any]) -> None:
    try:
        env = make.fn()
        state = EnvState(env, strict=False)
        with open_store(folder, read_only=True) as store:
            store.restore_into({"env": state})
        played = _play(env, actions)
        pipe.send((played, parts_of(state.state_dict()["env"])))
        env.close()
    except Exception:  # noqa: BLE001 - whatever the environment raises there is the answer
        pipe.send(f"in the fresh process: {traceback.format_exc()}")
    finally:
        pipe.close()
