"""Does a Stable-Baselines3 training that was killed go on as if it had not been? `python -m benchmarks.resume_sb3`

Each experiment trains one algorithm on a real environment three times: without interruption; in a process that is
killed with SIGKILL in the middle of a rollout; and in a new process that goes on from what the killed one saved.
Everything that the first and the last did is then compared. Saved is with

* `casckpt`: `CheckpointCallback` and `resume` of `casckpt.integrations.sb3`;
* `sb3`: SB3's own `CheckpointCallback` with replay buffer and VecNormalize, then `load`, `load_replay_buffer`,
  `VecNormalize.load` and `learn(reset_num_timesteps=False)`;
* `sb3-boundary`: the same files, but written between two rollouts, which SB3's callback cannot do.

The expected values are the first training's; casckpt takes no part in the comparison. About four minutes of one core.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

EVERY_STEPS = 64
METHODS = ("casckpt", "sb3", "sb3-boundary")
REFERENCE = "reference"


@dataclass(frozen=True)
class Experiment:
    """An algorithm on an environment; `kill_at` lies within a rollout."""

    algorithm: str
    env_id: str
    env_count: int
    total_steps: int
    kill_at: int
    arguments: Mapping[str, Any] = field(default_factory=dict)
    is_normalized: bool = False


_SMALL = {"seed": 3, "device": "cpu", "policy_kwargs": {"net_arch": [16]}}
_ON_POLICY = {**_SMALL, "n_steps": 32, "batch_size": 32, "n_epochs": 2}
_OFF_POLICY = {**_SMALL, "learning_starts": 50, "buffer_size": 300, "batch_size": 32, "train_freq": 4}
EXPERIMENTS = {
    "PPO": Experiment("PPO", "CartPole-v1", 2, 640, 420, _ON_POLICY, is_normalized=True),
    "RecurrentPPO": Experiment(
        *("RecurrentPPO", "CartPole-v1", 2, 384, 230),
        {**_ON_POLICY, "policy_kwargs": {"net_arch": [16], "lstm_hidden_size": 16}},
    ),
    "SAC": Experiment("SAC", "Pendulum-v1", 1, 480, 330, {**_OFF_POLICY, "gradient_steps": 2}),
    "DQN": Experiment(
        *("DQN", "CartPole-v1", 1, 640, 450),
        {**_OFF_POLICY, "target_update_interval": 60, "exploration_fraction": 0.8},
    ),
}


@dataclass
class Outcome:
    """What one training did.

    Attributes:
        resumed_at: `num_timesteps` at which it began; 0 for a new training.
        trajectory: for each step of the environments (step, digest of actions, rewards, observations).
        learning_rates: (step, rate) at the beginning of each rollout.
        digests: of what was there at the end, by name: parameters, optimizers, counters, replay samples, next draws.
        parameters: file with all parameters in one run.
        evaluation: steps and results of an `EvalCallback`, and its best.
    """

    resumed_at: int
    trajectory: list[tuple[int, str]]
    learning_rates: list[tuple[int, float]]
    digests: dict[str, str]
    parameters: str
    evaluation: list[Any]


@dataclass(frozen=True)
class Comparison:
    """A resumed training beside the uninterrupted one.

    Attributes:
        resumed_at: step.
        diverged_at: first step of the environments that differs; None if none does.
        parameter_difference: largest difference of a parameter at the end.
        is_equal: by name, whether what was there at the end is equal, bit for bit.
    """

    experiment: str
    method: str
    resumed_at: int
    diverged_at: int | None
    parameter_difference: float
    is_equal: dict[str, bool]


def main() -> int:
    """Print the table, or be one of the trainings."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.resume_sb3", description=__doc__)
    parser.add_argument("--experiments", default=",".join(EXPERIMENTS))
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--train", choices=("whole", "killed", "resumed"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    names, methods = options.experiments.split(","), options.methods.split(",")
    if options.train:
        return _train_all(options.train, names, methods, Path(options.folder))
    with tempfile.TemporaryDirectory(prefix="casckpt-sb3-") as folder:
        comparisons = run(names, methods, Path(folder))
    print(table(comparisons))
    return 0


def run(names: Sequence[str], methods: Sequence[str], folder: Path) -> list[Comparison]:
    """Run experiments with methods; each killed training is a process, the others share one per kind."""
    whole = _outcomes(_call("whole", names, [REFERENCE], folder))
    for name in names:
        for method in methods:
            _call("killed", [name], [method], folder)
    resumed = _outcomes(_call("resumed", names, methods, folder))
    return [
        compare(name, method, whole[name, REFERENCE], resumed[name, method]) for name in names for method in methods
    ]


def compare(name: str, method: str, whole: Outcome, resumed: Outcome) -> Comparison:
    """Hold the rest of a resumed training against the same steps of the uninterrupted one."""
    import numpy as np

    expected = [row for row in whole.trajectory if row[0] > resumed.resumed_at]
    pairs = zip(expected, resumed.trajectory, strict=False)
    diverged_at = next((left[0] for left, right in pairs if left != right), None)
    if diverged_at is None and len(expected) != len(resumed.trajectory):
        diverged_at = min(expected[-1][0], resumed.trajectory[-1][0])
    rates = [row for row in whole.learning_rates if row[0] >= resumed.resumed_at]
    is_equal = {key: resumed.digests[key] == value for key, value in whole.digests.items()}
    is_equal |= {"trajectory": diverged_at is None, "learning rates": rates == resumed.learning_rates}
    is_equal["evaluation"] = whole.evaluation == resumed.evaluation
    left, right = np.load(whole.parameters), np.load(resumed.parameters)
    difference = float(np.abs(left - right).max())
    return Comparison(name, method, resumed.resumed_at, diverged_at, difference, is_equal)


def table(comparisons: Sequence[Comparison]) -> str:
    """Markdown."""
    lines = [
        "| algorithm | saved with | resumed at | first step that differs | largest difference of a parameter | "
        "also different |",
        "|---|---|---|---|---|---|",
    ]
    for each in comparisons:
        different = [name for name, is_equal in each.is_equal.items() if not is_equal]
        shown = ", ".join(name for name in different if name not in ("trajectory", "parameters"))
        lines.append(
            f"| {each.experiment} | {each.method} | {each.resumed_at} | {each.diverged_at or 'none'} "
            f"| {each.parameter_difference:.2g} | {shown or 'nothing'} |"
        )
    return "\n".join(lines)


# --- processes ---


def _call(train: str, names: Sequence[str], methods: Sequence[str], folder: Path) -> list[dict[str, Any]]:
    """Start one training process; a killed one gets its SIGKILL when it says that it is there."""
    command = [sys.executable, "-m", "benchmarks.resume_sb3", "--train", train, "--folder", str(folder)]
    command += ["--experiments", ",".join(names), "--methods", ",".join(methods)]
    found: list[dict[str, Any]] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        for line in process.stdout:
            if line == "kill me\n":
                process.send_signal(signal.SIGKILL)
            elif line.startswith("{"):
                found.append(json.loads(line))
        said = process.stderr.read()
    expected = -signal.SIGKILL if train == "killed" else 0
    if process.returncode != expected:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}, expected {expected}:\n{said[-3000:]}")
    return found


def _outcomes(found: list[dict[str, Any]]) -> dict[tuple[str, str], Outcome]:
    outcomes = {}
    for row in found:
        name, method = row.pop("experiment"), row.pop("method")
        row["trajectory"] = [tuple(each) for each in row["trajectory"]]
        row["learning_rates"] = [tuple(each) for each in row["learning_rates"]]
        outcomes[name, method] = Outcome(**row)
    return outcomes


def _train_all(train: str, names: Sequence[str], methods: Sequence[str], folder: Path) -> int:
    import torch

    from benchmarks._resume_sb3_child import train_once

    torch.set_num_threads(1)  # the sum of a reduction depends on how threads share it
    for name in names:
        for method in methods:
            outcome = train_once(EXPERIMENTS[name], name, method, folder, train)
            print(json.dumps({"experiment": name, "method": method, **outcome.__dict__}), flush=True)
    return 0


def digest(*arrays: Any) -> str:
    """Of arrays' bytes, shapes and dtypes."""
    import numpy as np

    state = hashlib.sha256()
    for array in arrays:
        plain = np.ascontiguousarray(array)
        state.update(f"{plain.dtype}{plain.shape}".encode())
        state.update(plain.tobytes())
    return state.hexdigest()


def say_and_wait() -> None:
    """Tell the parent that this process can be killed, and never go on."""
    print("kill me", flush=True)
    while True:
        signal.pause()


if __name__ == "__main__":
    sys.exit(main())
