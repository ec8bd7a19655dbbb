"""Chunks hashed, looked up, and encoded where they are new: the part of a commit that runs on pool threads.

A chunk is compared with the id that the parent snapshot has in the same place; what differs is looked up; what is not
stored is encoded, by itself or with bases: its own content in the parent snapshot, what that goes back to, or the
operands of an optimizer's step. Operands of the same snapshot are in the same batch, so that they are encoded before
what is predicted from them, and all that a batch decodes for bases is decoded once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from casckpt.codec.contract import PREDICTION, Encoded
from casckpt.codec.level import COST_MAX, DEPTH_MAX, burden, decode_cost, missed_cost, prediction_cost
from casckpt.codec.memory import Limits, Memory
from casckpt.codec.models import NEAR, ROUNDING, Model
from casckpt.digest import digest
from casckpt.errors import ConcurrentMutationError
from casckpt.format.record import CODEC_RAW
from casckpt.ids import ObjectId
from casckpt.limits import BATCH_SIZE
from casckpt.objects.bases import Bases, IsPresent, ReadParent, Standing, inherit
from casckpt.objects.reader import ObjectReader

if TYPE_CHECKING:  # loads NumPy
    from casckpt.codec.frames import Frames
    from casckpt.codec.prediction import Operand


_SIZE_MIN = 256  # bytes of a prediction that misses nothing, its bases' ids included
GROUP_TASKS_MAX = 8  # chunks in one group where they are so large that a few fill a batch


class OperandRef(NamedTuple):
    """An operand of a prediction: the tasks, by position, whose chunks hold it, as of this snapshot or its parent."""

    positions: tuple[int, ...]
    is_before: bool
    itemsize: int
    skip: int = 0


class Prediction(NamedTuple):
    """What a chunk may follow from: candidate models, and the operands in the order of their kind.

    `key` names the candidate in the memory of its leaf: it stays when other candidates come or go.
    """

    models: Sequence[Model]
    operands: Sequence[OperandRef]
    key: Hashable = None

    @property
    def cost(self) -> int:
        """Of decoding it, without its operands."""
        kind = self.models[0].kind
        return prediction_cost(kind, 4 if kind == NEAR else self.operands[0].itemsize)


class Sibling(NamedTuple):
    """Another chunk of this snapshot that likely has frames of a chunk: by position; `skip` as in `Base`."""

    position: int
    skip: int


class ChunkTask(NamedTuple):
    """A chunk to be stored if it is new.

    `read` gives its plain bytes, without copying where it can; `known_id` is what the parent snapshot has in its place,
    and `read_parent` gives those bytes while they are still in memory. `predictions` are candidates: one
    of them may hold. `frames` says how a chunk of pictures is frames, and `sibling` which earlier chunk may have some.
    """

    read: Callable[[], memoryview]
    size: int
    itemsize: int
    known_id: ObjectId | None
    memory: Memory
    limits: Limits
    predictions: Sequence[Prediction] = ()
    read_parent: ReadParent | None = None
    frames: Frames | None = None
    sibling: Sibling | None = None

    def operands(self, number: int) -> set[tuple[int, bool]]:
        """Positions of the operands of one candidate, each with whether it is of the parent snapshot."""
        return {(at, ref.is_before) for ref in self.predictions[number].operands for at in ref.positions}

    def candidates(self) -> Sequence[int]:
        """The predictions that are worth a trial now, by what the leaf's memory says."""
        return self.memory.predictions_to_try([each.key for each in self.predictions])


class Outcome(NamedTuple):
    """One chunk done. `encoded` is None where it was stored already, or is with an equal chunk of the same batch.

    `is_tied`: it is or has a base that this same commit stores, so neither may stay inline. `own_cost` is what decoding
    the record costs, `cost` adds its bases.
    """

    position: int
    object_id: ObjectId
    size: int
    encoded: Encoded | None = None
    bases: tuple[ObjectId, ...] = ()
    depth: int = 0
    cost: int = 0
    is_tied: bool = False
    own_cost: int = 0


class ChunkEncoder:
    """Encodes the chunks of one commit. `process` may be called from several threads, each with its own batch.

    Args:
        tasks: all chunks of the commit.
        is_present: for each id, whether a good, existing record of it is in the store.
        reader: of the store, for bases; None: nothing gets a base.
        is_own_memory: nobody else writes to what the tasks read; otherwise what a record was computed from is hashed
            again at the end.
    """

    def __init__(
        self,
        tasks: Sequence[ChunkTask],
        is_present: IsPresent,
        reader: ObjectReader | None,
        *,
        is_own_memory: bool = False,
    ) -> None:
        self.tasks = tasks
        self.is_present = is_present
        self.reader = reader
        self._is_own_memory = is_own_memory
        self._groups = Groups(tasks)

    def process(self, batch: Sequence[int]) -> list[Outcome]:
        """Hash the chunks at these positions and encode the new ones.

        Returns:
            Outcomes of those that are not what the parent snapshot has in their place, in the order of `batch`.

        Raises:
            ConcurrentMutationError: memory that something was computed from is no longer what was hashed.
        """
        tasks = self.tasks
        plains = {at: tasks[at].read() for at in batch}
        ids = {at: digest(plain) for at, plain in plains.items()}
        unknown = [at for at in batch if ids[at] != tasks[at].known_id]
        if not unknown:
            return []
        present = self.is_present([ids[at] for at in unknown])
        new = [at for at, is_there in zip(unknown, present, strict=True) if not is_there]
        outcomes = {at: Outcome(at, ids[at], tasks[at].size) for at in unknown}
        if new:
            work = _Batch(self, plains, ids, new)
            first = self._first_of_each(new, ids)
            for at in sorted(first.values(), key=self._groups.ranks.__getitem__):
                outcomes[at] = work.encode(at)
            for at in new:
                same = outcomes[first[ids[at]]]
                if same.position != at:
                    tasks[at].memory.learn_cost(same.cost, has_bases=bool(same.bases))
            for at in () if self._is_own_memory else work.relied_on:
                if digest(plains[at]) != ids[at]:
                    raise moved(ids[at])  # what was computed from it was proven against something else
        return list(outcomes.values())

    def _first_of_each(self, new: Sequence[int], ids: Mapping[int, ObjectId]) -> dict[ObjectId, int]:
        """Of chunks with the same content the one that is encoded: where there is one, one that has a past."""
        first: dict[ObjectId, int] = {}
        for at in sorted(new, key=lambda at: self.tasks[at].known_id is None):
            first.setdefault(ids[at], at)
        return first

    def allowed(self, at: int) -> Sequence[int]:
        """Candidates of a chunk whose operands are in its batch."""
        return self._groups.allowed.get(at, ())

    def sibling(self, at: int) -> Sibling | None:
        """The sibling of a chunk, if it is in its batch."""
        return self.tasks[at].sibling if at in self._groups.beside else None

    def batches(self) -> list[list[int]]:
        """Positions in batches of about BATCH_SIZE; chunks and the operands they are predicted from stay together."""
        found: list[list[int]] = []
        room = 0
        for group, size in self._groups.members():
            if room <= 0:
                found.append([])
                room = BATCH_SIZE
            found[-1] += group
            room -= size
        return found


class _Inputs(NamedTuple):
    """What one chunk is predicted from, and depth and cost of its record."""

    operands: Sequence[Operand]
    bases: tuple[ObjectId, ...]
    depth: int
    cost: int


class _Batch:
    """The new chunks of one batch."""

    def __init__(
        self,
        encoder: ChunkEncoder,
        plains: dict[int, memoryview],
        ids: dict[int, ObjectId],
        new: Sequence[int],
    ) -> None:
        self._encoder = encoder
        self._tasks = encoder.tasks
        self._plains = plains
        self._ids = ids
        self._new = set(new)
        self._stored: dict[ObjectId, Standing] = {}  # what this batch has encoded
        self.relied_on: set[int] = set()  # positions whose memory a record was computed from
        self._continued: set[int] = set()  # of these, what is built on its content in the parent snapshot
        self._bases: Bases | None = None
        if encoder.reader is not None:
            wanted: dict[ObjectId, ReadParent | None] = {}
            for at in new:
                operands = {pair for number in encoder.allowed(at) for pair in self._tasks[at].operands(number)}
                for other, is_before in [(at, True), *operands]:
                    known_id = self._tasks[other].known_id
                    if is_before and known_id is not None:
                        wanted[known_id] = self._tasks[other].read_parent
                    elif not is_before and other not in self._new:
                        wanted.setdefault(ids[other], None)
                sibling = encoder.sibling(at)
                if sibling is not None and sibling.position not in self._new:
                    wanted.setdefault(ids[sibling.position], None)
            self._bases = Bases(encoder.reader, encoder.is_present, wanted, (ids[at] for at in new))
            self._fetch(self._bases)

    def _fetch(self, bases: Bases) -> None:
        """Get all bytes that predictions will need, at once: the operands of one step share what they go back to."""
        wanted = []
        for at in self._new:
            for number in self._candidates(at):
                if self._is_predictable(at, number, bases):
                    operands = self._tasks[at].operands(number)
                    wanted += [self._tasks[each].known_id for each, is_before in operands if is_before]
        bases.fetch(each for each in wanted if each is not None)

    def _candidates(self, at: int) -> Sequence[int]:
        task = self._tasks[at]
        if not task.limits.level.has_predictions:
            return ()
        allowed = self._encoder.allowed(at)
        return [each for each in task.candidates() if each in allowed and self._ceiling(task, each) > _SIZE_MIN]

    def _is_predictable(self, at: int, number: int, bases: Bases) -> bool:
        """Whether the operands that are in the store already can be bases and are cheap enough."""
        task = self._tasks[at]
        if self._ids[at] in bases.lost:
            return False
        prediction = task.predictions[number]
        cost = task.memory.prediction_cost(prediction.key, prediction.cost)
        for each, is_before in task.operands(number):
            if each in self._new and not is_before:
                continue
            known = self._tasks[each].known_id if is_before else self._ids[each]
            standing = bases.standing(known) if known is not None else None
            if standing is None:
                return False
            cost += standing.cost if each == at else 0  # of the others only what `_extra` finds
        return cost <= task.limits.cost_max

    def encode(self, at: int) -> Outcome:
        task, object_id = self._tasks[at], self._ids[at]
        outcome = self._predicted(at)
        if outcome is None or self._is_difference_due(at):
            outcome = min(filter(None, (outcome, self._best(at))), key=partial(_burden, price=task.limits.price))
        if outcome.encoded is not None and outcome.encoded.codec != CODEC_RAW:
            self.relied_on.add(at)
        task.memory.learn_cost(outcome.cost, has_bases=bool(outcome.bases))
        assert outcome.encoded is not None
        self._stored[object_id] = Standing(object_id, outcome.depth, outcome.cost, outcome.encoded.codec)
        if outcome.bases[:1] == (task.known_id,):
            self._continued.add(at)
        return outcome

    def _is_difference_due(self, at: int) -> bool:
        """Whether a chunk that is predicted is to show what a difference takes: once, where its past may be a base."""
        task, bases = self._tasks[at], self._bases
        if task.memory.is_difference_known or bases is None or task.memory.prediction is None:
            return not task.memory.is_difference_known
        near = bases.lineage(task.known_id)[:1] if task.known_id is not None else []
        return any(each.object_id == task.known_id and each.cost < task.limits.cost_max for each in near)

    def _predicted(self, at: int) -> Outcome | None:
        """The chunk by the candidate that takes least, if one holds."""
        task, bases = self._tasks[at], self._bases
        if bases is None or not task.predictions:
            return None
        best, held, failed = None, None, []
        for number in self._candidates(at):
            inputs = self._inputs(at, number, bases) if self._is_predictable(at, number, bases) else None
            if inputs is None:
                continue  # not now: that says nothing of whether it would hold
            ceiling = self._ceiling(task, number) if best is None else _stored_size(best)
            outcome = self._predict(at, number, inputs, ceiling)
            if outcome is not None and outcome.cost > task.limits.cost_max:
                continue  # it missed so much that it costs more than was expected
            if outcome is not None:
                best, held = outcome, task.predictions[number].key
            elif best is None:
                failed.append(task.predictions[number].key)
        task.memory.learn_predictions(held, _stored_size(best) / task.size if best else 1.0, failed)
        return best

    def _ceiling(self, task: ChunkTask, number: int) -> int:
        """Bytes that a prediction must stay under. What is nearer to another leaf than to its past has jumped: what
        differences to the past took says nothing."""
        prediction, limit = task.predictions[number], 1 - task.limits.gain_min
        if prediction.models[0].kind != NEAR and task.memory.difference_share < 1:
            limit = min(limit, task.memory.worth_of_difference(prediction.cost, task.limits.price))
        return task.memory.ceiling(task.size, limit)

    def _inputs(self, at: int, number: int, bases: Bases) -> _Inputs | None:
        """What a chunk is predicted from, unless something is missing or it would cost too much."""
        from casckpt.codec.prediction import Operand

        task = self._tasks[at]
        prediction = task.predictions[number]
        standings: list[Standing] = []
        operands = []
        for ref in prediction.operands:
            chunks = []
            for each in ref.positions:
                known_id = self._tasks[each].known_id if ref.is_before else self._ids[each]
                standing = self._stored.get(self._ids[each]) if not ref.is_before and each in self._new else None
                standing = standing or (bases.standing(known_id) if known_id is not None else None)
                if standing is None or standing.object_id == self._ids[at]:
                    return None
                view = bases.plain(standing.object_id) if ref.is_before else self._plains[each]
                if view is None:
                    return None
                standings.append(standing)
                chunks.append(view)
            operands.append(Operand(tuple(chunks), ref.itemsize, ref.skip))
        depth, cost = inherit(standings, self._extra(at, number, standings, bases), prediction.cost)
        if cost > task.limits.cost_max or depth > DEPTH_MAX:
            return None
        return _Inputs(operands, tuple(standing.object_id for standing in standings), depth, min(cost, COST_MAX))

    def _predict(self, at: int, number: int, inputs: _Inputs, ceiling: int) -> Outcome | None:
        from casckpt.codec.difference import encode_difference
        from casckpt.codec.prediction import encode_prediction

        task, prediction = self._tasks[at], self._tasks[at].predictions[number]
        hint = task.memory.prediction_hint(prediction.key)
        if prediction.models[0].kind == NEAR:
            ((base,),) = (operand.chunks for operand in inputs.operands)
            form = encode_difference(self._plains[at], base, task.itemsize, hint, ceiling=ceiling)
        else:
            form = encode_prediction(self._plains[at], prediction.models, inputs.operands, hint, ceiling=ceiling)
        if form is None or form.rejected is not None:
            return None
        self.relied_on.update(each for each, is_before in task.operands(number) if not is_before)
        is_tied = any(each in self._new and not is_before for each, is_before in task.operands(number))
        own_cost = _own_cost(prediction, form, task.size)
        task.memory.learn_prediction_cost(prediction.key, own_cost)
        cost = min(inputs.cost - prediction.cost + own_cost, COST_MAX)
        outcome = Outcome(at, self._ids[at], task.size, form, inputs.bases, inputs.depth, cost)
        return outcome._replace(is_tied=is_tied, own_cost=own_cost)

    def _extra(self, at: int, number: int, standings: list[Standing], bases: Bases) -> list[Standing]:
        """What a restore of the snapshot decodes only because this chunk is predicted from these operands.

        Its own content in the parent, and other operands there, unless what they became is built on them anyway. And
        when its own was predicted too, what that was predicted from, if no operand of today leads there. A copy needs
        nothing of its past: one that is rounded at every commit, nothing at all, as the original is decoded anyway;
        any other may stay when the original moves on.
        """
        operands = self._tasks[at].operands(number)
        own = self._standing_before(at, bases)
        if (at, True) not in operands:
            kind = self._tasks[at].predictions[number].models[0].kind
            return [] if kind == ROUNDING and own is not None and own.codec == PREDICTION else standings
        before = {each for each, is_before in operands if is_before}
        now = {each for each, is_before in operands if not is_before and each in self._new}
        extra = {at} | (before - self._continued - {at})
        if now and own is not None and own.codec == PREDICTION and not now & self._continued:
            extra |= now
        found = (self._standing_before(each, bases) for each in extra)
        return [standing for standing in found if standing is not None]

    def _standing_before(self, at: int, bases: Bases) -> Standing | None:
        known_id = self._tasks[at].known_id
        return bases.standing(known_id) if known_id is not None else None

    def _best(self, at: int) -> Outcome:
        from casckpt.codec.best import Base, encode_best

        task, bases, object_id = self._tasks[at], self._bases, self._ids[at]
        lineage: list[Standing] = []
        if bases is not None and task.known_id is not None and object_id not in bases.lost:
            lineage = bases.lineage(task.known_id)
        skip = task.frames.skip if task.frames else 0
        candidates = [
            Base(each.cost, lambda each=each: bases.plain(each.object_id), skip, each.object_id != task.known_id)  # type: ignore[misc,union-attr]
            for each in lineage
        ]
        sibling = self._encoder.sibling(at)
        beside = self._sibling_standing(at)
        if sibling is not None and beside is not None:
            candidates.append(Base(beside.cost, lambda: self._plains[sibling.position], sibling.skip))
        form, number = encode_best(self._plains[at], task.itemsize, task.memory, candidates, task.limits, task.frames)
        own_cost = decode_cost(form, task.size)
        if number is None:
            # A record that was lost may be a base of others still: what takes its place must not lie inline.
            is_tied = bases is not None and object_id in bases.lost
            return Outcome(at, object_id, task.size, form, cost=own_cost, is_tied=is_tied, own_cost=own_cost)
        is_tied = False
        if number < len(lineage):
            base = lineage[number]
        else:
            assert sibling is not None and beside is not None
            base, is_tied = beside, sibling.position in self._new
            self.relied_on.add(sibling.position)
        depth, cost = inherit([base], [base], own_cost)
        return Outcome(at, object_id, task.size, form, (base.object_id,), depth, min(cost, COST_MAX), is_tied, own_cost)

    def _sibling_standing(self, at: int) -> Standing | None:
        """The sibling of a chunk as a base, if it may be one."""
        sibling, bases = self._encoder.sibling(at), self._bases
        if sibling is None or bases is None or self._ids[at] in bases.lost:
            return None
        if sibling.position in self._new:
            standing = self._stored.get(self._ids[sibling.position])
        else:
            standing = bases.standing(self._ids[sibling.position])
        is_usable = standing is not None and standing.object_id != self._ids[at] and standing.depth < DEPTH_MAX
        return standing if is_usable else None


class Groups:
    """Which chunks have to be in one batch, and in which order they are encoded there.

    Attributes:
        allowed: for each task the candidates that may be tried: a group is bounded, and so is what a batch holds in
            memory; nothing is predicted from itself, over however many steps.
        ranks: 0 for what needs nothing of this snapshot, more for what is predicted from such chunks, and so on.
    """

    def __init__(self, tasks: Sequence[ChunkTask]) -> None:
        self._roots = list(range(len(tasks)))
        self._sizes = [task.size for task in tasks]
        self.ranks = [0] * len(tasks)
        predicted = [at for at, task in enumerate(tasks) if task.predictions]
        self.allowed: dict[int, list[int]] = {at: [] for at in predicted}
        # Those whose candidate is known first: the others may have many that are wrong.
        for at in sorted(predicted, key=lambda at: tasks[at].memory.prediction is None):
            for number in tasks[at].candidates():
                self._allow(tasks[at], at, number)
        for at in predicted:
            self._rank(tasks, at, set())
        self.beside: set[int] = set()  # those whose sibling is in their batch
        for at, task in enumerate(tasks):
            if task.sibling is not None and self._unite({at, task.sibling.position}, task.size):
                self.beside.add(at)
                self.ranks[at] = max(self.ranks[at], 1 + self.ranks[task.sibling.position])
        self._has_groups = bool(predicted or self.beside)

    def _allow(self, task: ChunkTask, at: int, number: int) -> None:
        """Let a candidate be tried, unless that would make a group too large."""
        if self._unite({each for each, _ in task.operands(number)} | {at}, task.size):
            self.allowed[at].append(number)

    def _unite(self, positions: Iterable[int], task_size: int) -> bool:
        """Put chunks into one group, unless that would be too large."""
        roots = {self._root(each) for each in positions}
        size = sum(self._sizes[root] for root in roots)
        if len(roots) > 1 and size > max(BATCH_SIZE, GROUP_TASKS_MAX * task_size):
            return False
        first = min(roots)
        for root in roots:
            self._roots[root] = first
        self._sizes[first] = size
        return True

    def _root(self, at: int) -> int:
        while self._roots[at] != at:
            self._roots[at] = self._roots[self._roots[at]]
            at = self._roots[at]
        return at

    def _rank(self, tasks: Sequence[ChunkTask], at: int, above: set[int]) -> int:
        """Set and return a rank; a candidate that leads back to a task in `above` is dropped."""
        if self.ranks[at] or not self.allowed.get(at):
            return self.ranks[at]
        above.add(at)
        kept, rank = [], 0
        for number in self.allowed[at]:
            needed = {each for each, is_before in tasks[at].operands(number) if not is_before}
            if needed & above:
                continue
            rank = max([rank, *(1 + self._rank(tasks, each, above) for each in needed)])
            kept.append(number)
        above.remove(at)
        self.allowed[at] = kept
        self.ranks[at] = rank
        return rank

    def members(self) -> Iterable[tuple[Sequence[int], int]]:
        """Positions by group and the group's size in bytes, in order of the first of each."""
        if not self._has_groups:
            return (((at,), size) for at, size in enumerate(self._sizes))
        groups: dict[int, list[int]] = {}
        for at in range(len(self._roots)):
            groups.setdefault(self._root(at), []).append(at)
        return [(found, self._sizes[root]) for root, found in groups.items()]


def _stored_size(outcome: Outcome) -> int:
    """What a record takes, but for its bases' ids."""
    assert outcome.encoded is not None
    return outcome.encoded.stored_size + len(outcome.encoded.params)


def _own_cost(prediction: Prediction, form: Encoded, size: int) -> int:
    """Of decoding a chunk that was predicted, without its operands."""
    if form.codec != PREDICTION:
        return decode_cost(form, size)
    return max(prediction.cost, missed_cost(form.stored_size / size))


def _burden(outcome: Outcome, price: float) -> float:
    """Of a record as it is, whatever its bases cost."""
    return burden(_stored_size(outcome) / outcome.size, outcome.own_cost, price)


def moved(object_id: ObjectId) -> ConcurrentMutationError:
    """The error for memory that is no longer what was hashed."""
    return ConcurrentMutationError(
        f"chunk {object_id.hex()[:12]}: its memory changed while the commit was reading it. Nothing was committed. "
        "Commit from the thread that trains, between updates.",
        object_id=object_id,
    )
