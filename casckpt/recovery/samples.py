"""Samples and who made them: what a learner trains on after a recovery, and what an actor sends.

Every sample carries a `Version`: the generation of the run and the learner's step whose policy made it. After a
recovery the learner stands at an older step of a newer generation. Samples of another generation come from a line that
was left, and are never trained on, however fresh their step looks; of its own generation, only those made at most
`behind_max` steps ago are.

An actor that has lost its learner goes on, holds what it makes, and sends it when it knows the version again; what it
made with a policy of an older generation is thrown away and counted. A `Frontier` knows which items of a queue were
handed out, trained and dropped; committed with the weights, each item is trained exactly once across kills.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

from casckpt.arguments import LIST, MAPPING, STEP, WHOLE, Kind, check, checked, maybe, within
from casckpt.errors import FencedError, InvalidInputError, NotFoundError
from casckpt.limits import SAMPLE_BEHIND_MAX

T = TypeVar("T")
ADMITTED = ""


class Version(NamedTuple):
    """Which policy: the generation of the run, and the learner's step in it."""

    generation: int
    step: int


VERSION = Kind(
    "a Version(generation, step)",
    lambda value: isinstance(value, Version) and all(WHOLE.fits(each) for each in value),
)
_SAMPLE = {"sample": VERSION}


class SampleGate:
    """The learner's side. Not thread-safe: asked by whoever takes samples in.

    Args:
        version: where the learner stands now.
        behind_max: how many steps older the policy of a sample may be.

    Attributes:
        admitted_count, refused_count: since it was made.
    """

    @checked(version=VERSION, behind_max=within(WHOLE, 0))
    def __init__(self, version: Version, *, behind_max: int = SAMPLE_BEHIND_MAX) -> None:
        self.version = version
        self.behind_max = behind_max
        self.admitted_count = self.refused_count = 0

    @checked(step=WHOLE)
    def advance(self, step: int) -> None:
        """The learner has come to a later step of its generation."""
        if step < self.version.step:
            raise InvalidInputError(
                f"step {step} comes before {self.version.step}. After a restore, make a gate for the new generation.",
                step=step,
            )
        self.version = self.version._replace(step=step)

    def admit(self, sample: Version) -> str:
        """Why a sample of this version is refused; ADMITTED, the empty text, when it is not."""
        check(_SAMPLE, {"sample": sample})  # for each sample: no signature is bound
        reason = self._reason(sample)
        if reason:
            self.refused_count += 1
        else:
            self.admitted_count += 1
        return reason

    def _reason(self, sample: Version) -> str:
        if sample.generation != self.version.generation:
            return f"made in generation {sample.generation}, this is {self.version.generation}"
        if sample.step > self.version.step:
            return f"made at step {sample.step}, the learner is at {self.version.step}: a step of a line that was left"
        behind = self.version.step - sample.step
        return (
            f"made {behind} steps ago, at most {self.behind_max} are allowed" if behind > self.behind_max else ADMITTED
        )


class SampleHold(Generic[T]):
    """The actor's side: samples wait here while the learner's version is not known.

    Args:
        count_max: how many are held; beyond it the oldest go.

    Attributes:
        version: of the policy that makes samples now; None while it is not known.
        dropped_count: thrown away, as too many or as made in an older generation.
    """

    @checked(count_max=within(WHOLE, 1))
    def __init__(self, count_max: int) -> None:
        self.version: Version | None = None
        self.dropped_count = 0
        self._policy: Version | None = None
        self._held: deque[tuple[Version, T]] = deque()
        self._count_max = count_max

    @checked(made_by=maybe(VERSION))
    def add(self, sample: T, *, made_by: Version | None = None) -> None:
        """A sample made by the policy that the actor has.

        Args:
            made_by: the policy that it was begun with, when another may have been taken over meanwhile. What a policy
                of an older generation made is thrown away and counted.

        Raises:
            InvalidInputError: it never had one.
        """
        if self._policy is None:
            raise InvalidInputError("there is no policy yet: call `learn` with the learner's version first.")
        version = self._policy if made_by is None else made_by
        if version.generation != self._policy.generation:
            self.dropped_count += 1
            return
        self._held.append((version, sample))
        if len(self._held) > self._count_max:
            self._held.popleft()
            self.dropped_count += 1

    def lose(self) -> None:
        """The learner does not answer: from now on samples are held."""
        self.version = None

    @checked(version=VERSION)
    def learn(self, version: Version) -> None:
        """The learner says where it stands, and its policy was taken over.

        Raises:
            FencedError: it is of an older generation than the actor has seen: a learner that was thought dead.
        """
        if self._policy is not None and version.generation < self._policy.generation:
            raise FencedError(
                f"a learner of generation {version.generation} speaks, {self._policy.generation} is known. Do not "
                "listen to it.",
                generation=version.generation,
                newer=self._policy.generation,
            )
        kept = [each for each in self._held if each[0].generation == version.generation]
        self.dropped_count += len(self._held) - len(kept)
        self._held = deque(kept)
        self.version = self._policy = version

    def take(self) -> list[tuple[Version, T]]:
        """What can be sent now, oldest first, each with the version that made it; nothing while that is not known."""
        if self.version is None:
            return []
        taken = list(self._held)
        self._held.clear()
        return taken

    def __len__(self) -> int:
        return len(self._held)


class Frontier:
    """Which items of a queue are open, trained and dropped. A Checkpointable: commit it with the weights.

    Items are numbers from 0 up: prompts, tasks, rollouts to be made. An item that is neither trained nor dropped in a
    restored snapshot is handed out again, whoever had it; a result that comes for one that is settled is refused. So in
    the line of steps that lives, each item was trained exactly once or dropped.
    """

    def __init__(self) -> None:
        self._next = 0
        self._open: dict[int, bool] = {}  # item → handed out since this object was made or restored
        self._dropped: set[int] = set()

    @property
    def open(self) -> list[int]:
        """Items that were handed out and are not settled, ascending."""
        return sorted(self._open)

    @property
    def dropped(self) -> list[int]:
        """Items that were given up, ascending."""
        return sorted(self._dropped)

    @property
    def trained_count(self) -> int:
        return self._next - len(self._open) - len(self._dropped)

    @checked(item=WHOLE)
    def is_trained(self, item: int) -> bool:
        return item < self._next and item not in self._open and item not in self._dropped

    @checked(count=within(WHOLE, 0))
    def take(self, count: int) -> list[int]:
        """Items to work on: first those that a restore left open, then new ones.

        Raises:
            InvalidInputError: `count` is below 0.
        """
        again = [item for item in self.open if not self._open[item]][:count]
        new = range(self._next, self._next + count - len(again))
        self._next = new.stop
        taken = [*again, *new]
        self._open.update(dict.fromkeys(taken, True))
        return taken

    @checked(items=LIST)
    def train(self, items: Iterable[int]) -> None:
        """These go into the weights at the coming update; all or, on an error, none of them are settled.

        Raises:
            NotFoundError: one of them is not open, so it would be trained twice.
        """
        for item in self._checked(items):
            del self._open[item]

    @checked(items=LIST)
    def drop(self, items: Iterable[int]) -> None:
        """These are given up.

        Raises:
            NotFoundError: one of them is not open.
        """
        for item in self._checked(items):
            del self._open[item]
            self._dropped.add(item)

    def _checked(self, items: Iterable[int]) -> list[int]:
        found = list(items)
        wrong = sorted({item for item in found if item not in self._open or found.count(item) > 1})
        if wrong:
            raise NotFoundError(
                f"items {wrong[:8]} are not open: trained or dropped already, or never handed out in this line of "
                "steps. Throw their results away.",
                items=wrong,
            )
        return found

    def state_dict(self) -> dict[str, Any]:
        """The next new item, what is open and what was dropped."""
        return {"next": self._next, "open": self.open, "dropped": self.dropped}

    @checked(state=MAPPING)
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Stand where the state was taken; everything open is to be handed out again.

        Raises:
            InvalidInputError: it is not the state of a Frontier; nothing was changed.
        """
        if not _is_frontier(state):
            raise InvalidInputError(
                f"state={state!r:.80}: expected that of a Frontier: 'next', a number, and 'open' and 'dropped', items "
                "below it. Nothing was changed. Is another component's state given?",
                name="state",
            )
        self._next = state["next"]
        self._open = dict.fromkeys(state["open"], False)
        self._dropped = set(state["dropped"])


def _is_frontier(state: Mapping[str, Any]) -> bool:
    lists: list[Any] = [state.get(name) for name in ("open", "dropped")]
    if state.keys() != {"next", "open", "dropped"} or not all(map(LIST.fits, lists)):
        return False
    items = [item for each in lists for item in each]
    are_items = STEP.fits(state["next"]) and all(STEP.fits(item) and item < state["next"] for item in items)
    return are_items and len(set(items)) == len(items)
