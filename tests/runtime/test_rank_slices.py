"""Slices of plans as bytes."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from dhp_ray.data.blocks import BlockRows
from dhp_ray.planner.plan import RankPack, RankPlan, Sample, SplitImage, VisionPlan
from dhp_ray.runtime.rank_slices import packed_slice, unpacked_slice

SAMPLES = (Sample("a", 8, 4, ((1, 4, 4),)), Sample("b", 9))
PACK = RankPack(3, (0, 2), SAMPLES, (2,), 0.5, 1, (0,), (SplitImage(0, (0, 2), (0, 1)),), 0.25)
PLANS = [RankPlan(7, 0, ((0, 2), (1, 3)), (PACK,), (True, False), "1.7.2", VisionPlan(layout="world"), (PACK, PACK)),
         RankPlan(1, 5, (), ())]


@pytest.mark.parametrize("plan", PLANS)
def test_a_slice_arrives_as_it_was_sent(plan: RankPlan) -> None:
    blocks = [BlockRows(["first"], [3, 5], "node"), BlockRows(["second"], [0])]  # type: ignore[list-item]
    packed, references = packed_slice(plan, blocks)
    assert references == ["first", "second"]
    assert unpacked_slice(packed, references) == (plan, blocks)


def test_no_object_of_a_slice_calls_python_to_be_pickled() -> None:
    """Each is pickled by a call of `_REDUCERS`; a dataclass that is new in a slice would call its `__getstate__`."""
    assert names_of_calls(pickle.dumps, PLANS) > {"_dataclass_getstate"}
    for plan in PLANS:
        assert names_of_calls(packed_slice, plan, []) == {"packed_slice", "<lambda>", "<listcomp>"}


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
