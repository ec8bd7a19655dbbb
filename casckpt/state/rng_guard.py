"""A guard over random generators: which of them moved between a restore and the first use.

The usual accident is a constructor that seeds a global generator (`np.random.seed(0)`), or draws from it, after the
streams were restored: training goes on with other numbers and nothing says so. The guard remembers a digest of each
generator's state, and names those that have another one now.
"""

from __future__ import annotations

from typing import Any

from casckpt.digest import hasher
from casckpt.errors import MismatchError
from casckpt.state.capture import capture
from casckpt.state.rng import RngState, kind_of, tree_of


class RngGuard:
    """Watches the generators of an `RngState`, from now on.

        store.resume_into({..., "rng": rng})
        guard = RngGuard(rng)
        ...                      # whatever is built before the first update
        guard.check()            # MismatchError names the generator that moved

    Generators of libraries that are loaded later are not watched. Cost: 20 µs a generator.
    """

    def __init__(self, rng: RngState) -> None:
        self._rng = rng
        self.renew()

    def renew(self) -> None:
        """Take the states of now as those that must not move."""
        self._state = self._rng.state_dict()
        self._digests = _digests(self._state)

    def moved(self) -> list[str]:
        """Names of the generators in another state: `python`, `numpy`, `torch.cpu`, `torch.cuda:0`, own names."""
        now = _digests(self._rng.state_dict())
        return [name for name, known in self._digests.items() if now.get(name) != known]

    def check(self) -> None:
        """Refuse to go on with a generator that moved.

        Raises:
            MismatchError: `moved` has their names.
        """
        moved = self.moved()
        if moved:
            raise MismatchError(
                f"random generators moved since they were restored: {', '.join(moved)}. Something drew from them or "
                "seeded them; build it before the restore, or put the streams back with put_back()",
                moved=moved,
            )

    def put_back(self) -> None:
        """Put every watched generator back to where it was."""
        self._rng.load_state_dict(self._state)


def _digests(state: dict[str, Any]) -> dict[str, bytes]:
    trees = {"python": state["python"]}
    if "numpy" in state:
        trees["numpy"] = state["numpy"]
    if "torch" in state:
        trees["torch.cpu"] = state["torch"]["cpu"]
        trees.update((f"torch.cuda:{number}", tree) for number, tree in enumerate(state["torch"]["cuda"]))
    for name, generator in state["extra"].items():
        trees[name] = tree_of(str(kind_of(generator)), generator)
    return {name: _digest(tree) for name, tree in trees.items()}


def _digest(tree: Any) -> bytes:
    captured = capture("rng", tree)
    hashed = hasher()
    hashed.update(captured.structure_bytes)
    hashed.update(captured.scalars)
    for number, (size, _) in enumerate(captured.structure.blocks):
        hashed.update(captured.blocks.view(number, 0, size))
    return bytes(hashed.digest())
