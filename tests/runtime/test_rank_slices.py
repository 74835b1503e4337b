"""Slices of plans as bytes."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from dhp_ray.data.blocks import BlockOrigin, BlockRows
from dhp_ray.planner.plan.types import MicroBatch, Pack, RankPlan, Sample, SplitImage, VisionPlan
from dhp_ray.runtime.rank_slices import RowIndex, packed_slice, unpacked_slice

SAMPLES = (Sample("a", 8, 4, ((1, 4, 4),)), Sample("b", 9))
PACK = Pack((0, 2), (0, 1), 0.5, encoders=(2,), micro_batch=1, passes=(0,), splits=(SplitImage(0, (0, 2), (0, 1)),),
            offload=0.25, index=3, samples=SAMPLES)
PLANS = [RankPlan(7, 0, ((0, 2), (1, 3)), (PACK,), (MicroBatch(True, 9, 0.5), MicroBatch()), "1.7.2",
                  VisionPlan(layout="world"), (PACK, PACK)),
         RankPlan(1, 5, (), ())]
OWN = Pack((5,), (2,), 0.1, index=5, samples=(Sample("c", 3),))
SLICES = [RankPlan(7, 4, ((4, 5),), (PACK,), (MicroBatch(True),), "1.7.2", VisionPlan(layout="world")),
          RankPlan(7, 5, ((4, 5),), (PACK, OWN), (MicroBatch(True),), "1.7.2", VisionPlan(layout="world"),
                   (PACK,))]
INDEX = RowIndex({"a": ("second", 5), "b": ("first", 0), "c": ("second", 2), "d": ("third", 1)},  # type: ignore[dict-item]
                 {"first": BlockOrigin("node", "a part", 7), "third": BlockOrigin("other", "a part", 8)})  # type: ignore[dict-item]


@pytest.mark.parametrize("plan", PLANS)
def test_a_slice_arrives_as_it_was_sent(plan: RankPlan) -> None:
    blocks = [BlockRows(["first"], [3, 5], BlockOrigin("node", "a part", 7)), BlockRows(["second"], [0]),
              BlockRows(["third"], [1], BlockOrigin("other", "a part", 8))]  # type: ignore[list-item]
    packed, references = packed_slice(plan, blocks)
    assert references == ["first", "second", "third", "a part", None]
    assert unpacked_slice(packed, references) == (plan, blocks)


def test_each_block_is_sent_once_with_the_rows_that_a_rank_needs() -> None:
    blocks = INDEX.blocks_of(SLICES[1])
    assert blocks == [BlockRows(["second"], [2, 5]), BlockRows(["first"], [0], BlockOrigin("node", "a part", 7))]  # type: ignore[list-item]
    only_encoded = RankPlan(1, 2, (), (), vision=VisionPlan("world"), encoded=(PACK,))
    assert INDEX.blocks_of(only_encoded) == [BlockRows(["second"], [5])]  # type: ignore[list-item]


def test_no_object_of_a_slice_calls_python_to_be_pickled() -> None:
    """Each is pickled by a call of `_REDUCERS`; a dataclass that is new in a slice would call its `__getstate__`."""
    assert names_of_calls(pickle.dumps, PLANS) > {"_dataclass_getstate"}
    for plan in PLANS:
        assert names_of_calls(packed_slice, plan, []) <= {
            "packed_slice", "<lambda>", "<listcomp>", "<dictcomp>", "<genexpr>"}


def names_of_calls(function: Callable[..., Any], *arguments: Any) -> set[str]:
    """Python functions that a call runs."""
    found = set()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            found.add(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        function(*arguments)
    finally:
        sys.setprofile(None)
    return found
