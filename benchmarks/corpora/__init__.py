"""Corpora: series of states from real training runs, seeded and rebuilt by one command.

A *series* is what one training run would have committed: a state after each of `steps`, in the form in which
`state_dict()` gives it. A *recipe* is the training run that makes it, with its parameters. Each series lies in a folder
of its own inside a folder for all of them, and is there completely or not at all.

    python -m benchmarks.corpora build A D-fp32-1 --folder DIR
    python -m benchmarks.corpora list

| name | run | a commit every |
|---|---|---|
| A | PPO, two MLPs, CartPole, Adam | update |
| B | PPO, Nature-CNN on Atari pixels, Adam, rollout buffer | update |
| C | DQN, Nature-CNN on Atari pixels, target, Adam, a ring of 508 MB that wraps | 1,000 environment steps |
| D-*-1, D-*-4 | policy gradient at 1e-6 on a pretrained transformer, AdamW, frozen reference | 1, 4 optimizer steps |
| E, E-1 | SAC, Pendulum: actor, two critics, two Polyak targets, three Adams | 64, 1 gradient steps |
| F | a league: a learner, and a pool of frozen and fine-tuned copies of it | update |
| R-clean, R-camera | a full ring of 462 MB of stacked pictures, from a game, from a noisy camera | 983 rows (6 %) |
| S | four noisy copies of a fine-tuned transformer with moments, about 1 GB, for throughput | optimizer step |

D comes as fp32, bf16 (weights, gradients and moments), bf16-fp32 (weights and gradients bf16, moments fp32) and lora.
Nothing here knows casckpt: whoever measures it and its peers reads the same states. B, C and R-clean need ale-py; D and
S download a wheel of 84 MB.
"""

from benchmarks.corpora._build import NAMES, build, load
from benchmarks.corpora._series import Series

__all__ = ["NAMES", "Series", "build", "load"]
