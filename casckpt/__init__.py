"""casckpt: content-addressed, deduplicating snapshots for reinforcement-learning training.

Three lines in a training loop::

    store = casckpt.open("runs/walker", create=True)
    report = store.resume_into({"policy": policy, "optimizer": optimizer})
    store.commit(step, {"policy": policy, "optimizer": optimizer}, metrics={"return": 12.5})

Names are loaded when they are first used: `import casckpt` brings in neither numpy nor torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from casckpt.errors import (
    AlreadyExistsError,
    BusyError,
    CasckptError,
    ConcurrentMutationError,
    ConfigDriftWarning,
    ConflictError,
    CorruptionError,
    FencedError,
    IncompleteError,
    InvalidInputError,
    MismatchError,
    NotFoundError,
    OutOfSpaceError,
    ReadOnlyError,
    SaveFailedError,
    StepOrderError,
    StorageError,
    StoreWarning,
    UnsupportedFormatError,
    UnsupportedStateError,
)
from casckpt.version import __version__ as __version__

if TYPE_CHECKING:
    from casckpt.engine.config import EngineConfig
    from casckpt.engine.engine import CheckpointEngine
    from casckpt.engine.report import EngineReport
    from casckpt.engine.strategy import Recent, SaveStrategy
    from casckpt.recovery.migrations import migration
    from casckpt.state.rng import RngState
    from casckpt.state.rng_guard import RngGuard
    from casckpt.store.background import SaveHandle
    from casckpt.store.opening import open_store as open
    from casckpt.store.store import Store
    from casckpt.store.values import RestoreReport, Snapshot, VerifyReport

__all__ = [
    "AlreadyExistsError",
    "BusyError",
    "CasckptError",
    "CheckpointEngine",
    "ConcurrentMutationError",
    "ConfigDriftWarning",
    "ConflictError",
    "CorruptionError",
    "EngineConfig",
    "EngineReport",
    "FencedError",
    "IncompleteError",
    "InvalidInputError",
    "MismatchError",
    "NotFoundError",
    "OutOfSpaceError",
    "ReadOnlyError",
    "Recent",
    "RestoreReport",
    "RngGuard",
    "RngState",
    "SaveFailedError",
    "SaveHandle",
    "SaveStrategy",
    "Snapshot",
    "StepOrderError",
    "StorageError",
    "Store",
    "StoreWarning",
    "UnsupportedFormatError",
    "UnsupportedStateError",
    "VerifyReport",
    "migration",
    "open",
]

_LAZY = {
    "CheckpointEngine": ("casckpt.engine.engine", "CheckpointEngine"),
    "EngineConfig": ("casckpt.engine.config", "EngineConfig"),
    "EngineReport": ("casckpt.engine.report", "EngineReport"),
    "Recent": ("casckpt.engine.strategy", "Recent"),
    "RestoreReport": ("casckpt.store.values", "RestoreReport"),
    "RngGuard": ("casckpt.state.rng_guard", "RngGuard"),
    "RngState": ("casckpt.state.rng", "RngState"),
    "SaveHandle": ("casckpt.store.background", "SaveHandle"),
    "SaveStrategy": ("casckpt.engine.strategy", "SaveStrategy"),
    "Snapshot": ("casckpt.store.values", "Snapshot"),
    "Store": ("casckpt.store.store", "Store"),
    "VerifyReport": ("casckpt.store.values", "VerifyReport"),
    "migration": ("casckpt.recovery.migrations", "migration"),
    "open": ("casckpt.store.opening", "open_store"),
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'casckpt' has no attribute {name!r}")
    module, attribute = _LAZY[name]
    value = getattr(import_module(module), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
