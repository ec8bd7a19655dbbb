"""Values that are scalars but not Python's own: enum members, numpy scalars, torch sizes, dtypes and devices.

`to_foreign` gives the stored form, `from_foreign` the object again. An enum member comes back as a `StoredEnum`, since
importing a class by a stored name would be code in data; the owner of the class resolves it.
"""

from __future__ import annotations

import enum
import sys
from dataclasses import dataclass
from typing import Any, TypeVar

from casckpt.errors import CorruptionError, MismatchError
from casckpt.format.dtypes import TORCH_ITEMSIZES
from casckpt.format.scalars import Foreign

E = TypeVar("E", bound=enum.Enum)


@dataclass(frozen=True)
class StoredEnum:
    """A member of an enum class that the reader has to name: equal for equal members, and storable again."""

    type_name: str
    name: str | None
    value: Any

    def resolve(self, cls: type[E]) -> E:
        """The member of `cls` that was stored.

        Raises:
            MismatchError: `cls` has another name, or no member of this name and value.
        """
        member: Any = None
        if cls.__name__ == self.type_name:
            try:
                member = cls(self.value)
            except ValueError:
                member = None
        was_renamed = cls.__members__.get(self.name or "", member) is not member
        if member is None or was_renamed or (member.name != self.name and not isinstance(member, enum.Flag)):
            raise MismatchError(
                f"stored {self.type_name}.{self.name} = {self.value!r} is no member of {cls.__name__}. "
                "Restore the value without a target and convert it."
            )
        return member  # type: ignore[no-any-return]


def to_foreign(value: Any) -> Foreign | None:
    """The stored form of `value`, or None where there is none.

    Raises:
        ValueError: a numpy scalar of a dtype that is not stored.
    """
    if isinstance(value, enum.Enum):
        return Foreign("enum", [type(value).__name__, value.name, value.value])
    if type(value) is StoredEnum:
        return Foreign("enum", [value.type_name, value.name, value.value])
    if "numpy" in sys.modules:
        from casckpt.state import _numpy

        if isinstance(value, _numpy.SCALAR):
            return Foreign("numpy", _numpy.scalar_payload(value))
        if isinstance(value, _numpy.DTYPE):
            return Foreign("numpy.dtype", _numpy.dtype_name(value))
    torch = sys.modules.get("torch")
    if torch is not None:
        if type(value) is torch.Size:
            return Foreign("torch.Size", list(value))
        if type(value) is torch.dtype:
            name = str(value).removeprefix("torch.")
            return Foreign("torch.dtype", name) if name in TORCH_ITEMSIZES else None
        if type(value) is torch.device:
            return Foreign("torch.device", str(value))
    return None


def from_foreign(found: Foreign) -> Any:
    """The object that a stored form stands for.

    Raises:
        CorruptionError: a kind or payload that `to_foreign` never makes.
    """
    kind, payload = found.kind, found.payload
    try:
        if kind == "enum":
            type_name, name, value = payload
            return StoredEnum(type_name, name, value)
        if kind.startswith("numpy"):
            from casckpt.state import _numpy

            return _numpy.scalar_of(payload) if kind == "numpy" else _numpy.checked_dtype(payload)
        if kind.startswith("torch."):
            from casckpt.state import _torch

            return _torch.value_of(kind, payload)
    except (ValueError, TypeError, RuntimeError) as error:
        raise CorruptionError(f"scalar block: bad {kind} value ({error})") from None
    raise CorruptionError(f"scalar block: unknown kind {kind!r:.60}")
