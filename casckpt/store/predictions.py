"""Relations between leaves turned into relations between chunks.

A relation speaks of whole blocks; a commit encodes chunks. Large blocks start on a chunk boundary, so the items of a
chunk lie in one chunk of an operand with items of the same size, and in two or half of one with others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from casckpt.codec.models import SECOND_MOMENT
from casckpt.format.layout import Layout
from casckpt.objects.chunks import ChunkTask, OperandRef, Prediction
from casckpt.state.relations import Place, Relation, Relations


class Numbered(NamedTuple):
    """A component's layout, and the position of its first chunk among all of the commit."""

    layout: Layout
    first: int


class Predictions:
    """What each chunk of a commit may follow from."""

    def __init__(self, relations: Relations, components: Mapping[str, Numbered], chunk_size: int) -> None:
        self._relations = relations
        self._components = components
        self._chunk_size = chunk_size
        self._blocks: dict[tuple[str, int], tuple[int, int]] = {}

    def of(self, component: str, block: int, start: int, stop: int) -> tuple[Prediction, ...]:
        """Candidates for the chunk that holds the bytes `[start, stop)` of a large block."""
        found = self._relations.of(component, block)
        return tuple(self._prediction(relation, component, block, start, stop) for relation in found)

    def _prediction(self, relation: Relation, component: str, block: int, start: int, stop: int) -> Prediction:
        _, itemsize = self._block(component, block)
        items = range(start // itemsize, stop // itemsize)
        operands = [self._operand(place, items) for place in relation.operands]
        return Prediction(relation.models, operands, (relation.kind, relation.operands))

    def _operand(self, place: Place, items: range) -> OperandRef:
        first, itemsize = self._block(place.component, place.block)
        start, stop = items.start * itemsize, items.stop * itemsize
        chunks = range(start // self._chunk_size, -(-stop // self._chunk_size))
        positions = tuple(first + chunk for chunk in chunks)
        return OperandRef(positions, place.is_before, itemsize, start % self._chunk_size // itemsize)

    def _block(self, component: str, block: int) -> tuple[int, int]:
        """The position of a block's first chunk, and its item size."""
        key = component, block
        if key not in self._blocks:
            layout, first = self._components[component]
            chunk = layout.spans(block)[0].chunk
            self._blocks[key] = first + chunk, layout.itemsizes[chunk]
        return self._blocks[key]


def operand_positions(tasks: Sequence[ChunkTask]) -> set[int]:
    """Tasks from whose chunks second moments are predicted: every restore of these decodes them, once for each step.

    Not those of which differences are known to be better than any prediction.
    """
    return {
        at
        for task in tasks
        for prediction in task.predictions
        if prediction.models[0].kind == SECOND_MOMENT
        and task.memory.worth_of_difference(prediction.cost, task.limits.price) > 0
        for ref in prediction.operands
        if not ref.is_before
        for at in ref.positions
    }
