"""A rank's slice of a plan on its way there, in a form that stays quick with thousands of ranks.

Ray pickles an argument by cloudpickle, which calls Python for every object in it, and a frozen dataclass with slots
calls Python once more: together most of what it costs to send a step. So a slice travels as bytes that the C pickler
writes, each dataclass as its class and its values. References to blocks go beside it, for Ray has to count them.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import fields
from io import BytesIO
from operator import attrgetter
from typing import Any

import ray

from dhp_ray.data.blocks import BlockRows
from dhp_ray.planner.plan import RankPack, RankPlan, Sample, SplitImage, VisionPlan

PROTOCOL = 5


def _reducer(cls: type[Any]) -> Callable[[Any], Any]:
    """Pickle an instance as a call of its class with the values of its fields."""
    values = attrgetter(*(field.name for field in fields(cls)))
    return lambda instance: (cls, values(instance))


_REDUCERS: dict[type, Callable[[Any], Any]] = {
    cls: _reducer(cls) for cls in (Sample, RankPack, RankPlan, SplitImage, VisionPlan)
}


def packed_slice(plan: RankPlan, blocks: Sequence[BlockRows]) -> tuple[bytes, list[ray.ObjectRef]]:
    """A slice with the blocks that it needs rows of, as the arguments of a call; `unpacked_slice` reverses it."""
    stream = BytesIO()
    pickler = pickle.Pickler(stream, PROTOCOL)
    pickler.dispatch_table = _REDUCERS
    pickler.dump((plan, [(block.rows, block.node) for block in blocks]))
    return stream.getvalue(), [block.reference[0] for block in blocks]


def unpacked_slice(packed: bytes, references: Sequence[ray.ObjectRef]) -> tuple[RankPlan, list[BlockRows]]:
    plan, rows = pickle.loads(packed)
    return plan, [BlockRows([reference], *found) for reference, found in zip(references, rows, strict=True)]
