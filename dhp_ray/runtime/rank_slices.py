"""How the ranks' slices of a plan are sent: as bytes that the C pickler writes, since Ray's cloudpickle calls Python
for every object. References to blocks go beside them, because Ray has to count them.
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
from dhp_ray.planner.plan.types import MicroBatch, Pack, RankPlan, Sample, SplitImage, VisionPlan, planned_samples

Packed = tuple[bytes, list[ray.ObjectRef]]
"""The arguments of a call: the pickled bytes, and the references to the blocks that belong to them."""


def _reducer(cls: type[Any]) -> Callable[[Any], Any]:
    """Pickle an instance as a call of its class with the values of its fields."""
    values = attrgetter(*(field.name for field in fields(cls)))
    return lambda instance: (cls, values(instance))


_REDUCERS: dict[type, Callable[[Any], Any]] = {
    cls: _reducer(cls) for cls in (Sample, MicroBatch, Pack, RankPlan, SplitImage, VisionPlan)
}


@dataclass(frozen=True)
class RowIndex:
    """Where rows are: `payload` maps a sample to its block and row, `origins` a block to where and how it was made."""

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


def packed_slice(plan: RankPlan, blocks: Sequence[BlockRows]) -> Packed:
    """Return the packed slice of a rank, and references to its blocks, then to what those were made from."""
    sources = list(dict.fromkeys(block.origin.source for block in blocks))
    place = {source: len(blocks) + number for number, source in enumerate(sources)}
    described = [(block.rows, block.origin.node, block.origin.item, block.origin.rows, place[block.origin.source])
                 for block in blocks]
    stream = BytesIO()
    pickler = pickle.Pickler(stream, pickle.HIGHEST_PROTOCOL)
    pickler.dispatch_table = _REDUCERS
    pickler.dump((plan, described))
    return stream.getvalue(), [*(block.reference[0] for block in blocks), *sources]


def unpacked_slice(packed: bytes, references: Sequence[ray.ObjectRef]) -> tuple[RankPlan, list[BlockRows]]:
    plan, described = pickle.loads(packed)
    return plan, [BlockRows([reference], rows, BlockOrigin(node, references[place], item, stored))
                  for reference, (rows, node, item, stored, place) in zip(references, described)]
