"""Gymnasium environments as part of a snapshot.

* `EnvState(env)` is a Checkpointable of an environment, its wrappers, its generators and its simulator;
* `EnvReport` says what a capture holds and what it lacks;
* `register_env_adapter` teaches it classes that keep their state outside of Python;
* `capturable(make)` makes environments for AsyncVectorEnv that can be captured in their workers;
* `self_test(make)` proves in a fresh process that a captured environment goes on as it would have.
"""

from casckpt.integrations.gymnasium._async import Capturable
from casckpt.integrations.gymnasium.adapters import register_env_adapter
from casckpt.integrations.gymnasium.self_test import SelfTestReport, self_test
from casckpt.integrations.gymnasium.state import EnvReport, EnvState, capturable

__all__ = [
    "Capturable",
    "EnvReport",
    "EnvState",
    "SelfTestReport",
    "capturable",
    "register_env_adapter",
    "self_test",
]
