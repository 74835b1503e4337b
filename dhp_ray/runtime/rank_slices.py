"""How the ranks' slices of a plan are sent: in a form that stays fast with many ranks.

Ray pickles an argument with cloudpickle, which calls Python for every object in it, and a frozen dataclass with slots
calls Python once more: together this is most of the cost of sending a step. So a slice is sent as bytes that the C
pickler writes, each dataclass as its class and its values. References to blocks are sent beside it, because Ray has to
count them.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from io import BytesIO
from operator import attrgetter
from typing import Any

import ray

from dhp_ray.data.blocks import UNKNOWN, BlockOrigin, BlockRows
from dhp_ray.planner.plan.types import Pack, RankPlan, Sample, SplitImage, VisionPlan, planned_samples

PROTOCOL = 5

Packed = tuple[bytes, list[ray.ObjectRef]]
"""The arguments of a call: the pickled bytes, and the references to the blocks that belong to them."""


def _reducer(cls: type[Any]) -> Callable[[Any], Any]:
    """Pickle an instance as a call of its class with the values of its fields."""
    values = attrgetter(*(field.name for field in fields(cls)))
    return lambda instance: (cls, values(instance))


_REDUCERS: dict[type, Callable[[Any], Any]] = {
    cls: _reducer(cls) for cls in (Sample, Pack, RankPlan, SplitImage, VisionPlan)
}


@dataclass(frozen=True)
class RowIndex:
    """Where the rows of samples are. `payload` maps a sample's id to the reference of its block and its row there,
    `origins` a block to where it was made, and how (absent: unknown).
    """

    payload: Mapping[str, tuple[ray.ObjectRef, int]]
    origins: Mapping[ray.ObjectRef, BlockOrigin]

    def blocks_of(self, plan: RankPlan) -> list[BlockRows]:
        """Return the blocks that hold a rank's samples, each once, with the rows that the rank needs from it."""
        blocks: dict[ray.ObjectRef, set[int]] = {}
        for sample in planned_samples(plan):
            reference, row = self.payload[sample.id]
            blocks.setdefault(reference, set()).add(row)
        return [BlockRows([reference], sorted(rows), self.origins.get(reference, UNKNOWN))
                for reference, rows in blocks.items()]


def packed_slices(slices: Sequence[RankPlan], index: RowIndex) -> list[Packed]:
    """Return the packed slice of each rank, with the blocks that hold its rows, as `unpacked_slice` takes it."""
    return [packed_slice(plan, index.blocks_of(plan)) for plan in slices]


def packed_slice(plan: RankPlan, blocks: Sequence[BlockRows]) -> Packed:
    origins, references = _packed_origins([(block.reference[0], block.origin) for block in blocks])
    return _dumped((plan, [block.rows for block in blocks], origins)), references


def unpacked_slice(packed: bytes, references: Sequence[ray.ObjectRef]) -> tuple[RankPlan, list[BlockRows]]:
    plan, rows, origins = pickle.loads(packed)
    return plan, [BlockRows([reference], found, origin)
                  for found, (reference, origin) in zip(rows, _unpacked_origins(origins, references), strict=True)]


PackedOrigin = tuple[str, int, tuple[int, int], int]
"""The node of a block, its item and rows, and the place of its source among the references."""


def _packed_origins(
    blocks: Sequence[tuple[ray.ObjectRef, BlockOrigin]]
) -> tuple[list[PackedOrigin], list[ray.ObjectRef]]:
    """The origins without references; and the references of the blocks, followed by those of their sources."""
    sources = list(dict.fromkeys(origin.source for _, origin in blocks))
    place = {source: len(blocks) + number for number, source in enumerate(sources)}
    return ([(origin.node, origin.item, origin.rows, place[origin.source]) for _, origin in blocks],
            [*(reference for reference, _ in blocks), *sources])


def _unpacked_origins(
    origins: Sequence[PackedOrigin], references: Sequence[ray.ObjectRef]
) -> list[tuple[ray.ObjectRef, BlockOrigin]]:
    return [(references[number], BlockOrigin(node, references[place], item, rows))
            for number, (node, item, rows, place) in enumerate(origins)]


def _dumped(value: Any) -> bytes:
    stream = BytesIO()
    pickler = pickle.Pickler(stream, PROTOCOL)
    pickler.dispatch_table = _REDUCERS
    pickler.dump(value)
    return stream.getvalue()
