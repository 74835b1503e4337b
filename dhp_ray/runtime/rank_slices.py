"""How the ranks' slices of a plan are sent: in a form that stays fast with thousands of ranks.

    few ranks     driver cuts a slice for each rank                         -> rank
    many ranks    driver -> a share of the plan -> relay cuts its slices    -> rank

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

from dhp_ray.data.blocks import BlockRows
from dhp_ray.planner.plan import RankPack, RankPlan, Sample, SplitImage, VisionPlan
from dhp_ray.planner.rank_plan import PlanSlices, planned_samples

PROTOCOL = 5

Packed = tuple[bytes, list[ray.ObjectRef]]
"""The arguments of a call: the pickled bytes, and the references to the blocks that belong to them."""


def _reducer(cls: type[Any]) -> Callable[[Any], Any]:
    """Pickle an instance as a call of its class with the values of its fields."""
    values = attrgetter(*(field.name for field in fields(cls)))
    return lambda instance: (cls, values(instance))


_REDUCERS: dict[type, Callable[[Any], Any]] = {
    cls: _reducer(cls) for cls in (Sample, RankPack, RankPlan, PlanSlices, SplitImage, VisionPlan)
}


@dataclass(frozen=True)
class RowIndex:
    """Where the rows of samples are. `payload` maps a sample's id to the reference of its block and its row there,
    `nodes` a block to the node where it was made (absent: unknown).
    """

    payload: Mapping[str, tuple[ray.ObjectRef, int]]
    nodes: Mapping[ray.ObjectRef, str]

    def blocks_of(self, plan: RankPlan) -> list[BlockRows]:
        """Return the blocks that hold a rank's samples, each once, with the rows that the rank needs from it."""
        blocks: dict[ray.ObjectRef, set[int]] = {}
        for sample in planned_samples(plan):
            reference, row = self.payload[sample.id]
            blocks.setdefault(reference, set()).add(row)
        return [BlockRows([reference], sorted(rows), self.nodes.get(reference, ""))
                for reference, rows in blocks.items()]


def packed_slices(slices: PlanSlices, index: RowIndex) -> list[Packed]:
    """Return the packed slice of each rank, with the blocks that hold its rows, as `unpacked_slice` takes it."""
    return [packed_slice(plan, index.blocks_of(plan)) for plan in slices.rank_plans()]


def packed_slice(plan: RankPlan, blocks: Sequence[BlockRows]) -> Packed:
    return _dumped((plan, [(block.rows, block.node) for block in blocks])), [block.reference[0] for block in blocks]


def unpacked_slice(packed: bytes, references: Sequence[ray.ObjectRef]) -> tuple[RankPlan, list[BlockRows]]:
    plan, rows = pickle.loads(packed)
    return plan, [BlockRows([reference], *found) for reference, found in zip(references, rows, strict=True)]


def packed_share(slices: PlanSlices, index: RowIndex) -> Packed:
    """Return slices that are not cut yet, and where the rows of their samples are, packed as `unpacked_share` takes
    them.
    """
    ids = dict.fromkeys(sample.id for pack in slices.packs for sample in pack.samples)
    references = list(dict.fromkeys(index.payload[own][0] for own in ids))
    place = {reference: number for number, reference in enumerate(references)}
    rows = [(own, place[index.payload[own][0]], index.payload[own][1]) for own in ids]
    return _dumped((slices, rows, [index.nodes.get(reference, "") for reference in references])), references


def unpacked_share(packed: bytes, references: Sequence[ray.ObjectRef]) -> tuple[PlanSlices, RowIndex]:
    slices, rows, nodes = pickle.loads(packed)
    return slices, RowIndex({own: (references[place], row) for own, place, row in rows},
                            dict(zip(references, nodes, strict=True)))


def _dumped(value: Any) -> bytes:
    stream = BytesIO()
    pickler = pickle.Pickler(stream, PROTOCOL)
    pickler.dispatch_table = _REDUCERS
    pickler.dump(value)
    return stream.getvalue()
