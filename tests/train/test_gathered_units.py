"""The units that a pack gathers with `sync=micro_batch`: none for a backward pass that is not there."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from dhp_ray.compatibility import fsdp_param_groups
from dhp_ray.planner.plan.types import IN_PACKS, VisionPlan
from dhp_ray.train.sharded_engine import ShardedEngine
from dhp_ray.train.step_inputs import collated
from tests.packs import rough_model
from tests.ranks import run_ranks
from tests.train.test_sharded_engine import make_plan, make_step, payloads_of

PACK = [([0, 1], [[20, (1, 4, 8), 30]], None)]
APART = VisionPlan("world", keeps=True, num_passes=1)


def gathers(rank: int, freeze: list[str], vision: VisionPlan) -> Counter[str]:
    """How often each kind of unit is gathered in a step of one pack with an image."""
    adapter = rough_model()
    adapter.freeze(freeze)
    stepper, found = make_step(adapter, rank, 2), Counter[str]()
    plan, payloads = make_plan(2, [PACK])
    plan = replace(plan, vision=vision, groups=tuple(replace(group, passes=(0,) * vision.num_passes)
                                                     for group in plan.groups))
    plan.validate()
    rank_plan = plan.rank_plan(1, rank)
    assert isinstance(stepper.engine, ShardedEngine)
    for unit in stepper.engine._units:
        for group in fsdp_param_groups(unit):
            count_gathers(group, kind_of(unit, adapter), found)
    stepper.run(collated(rank_plan, payloads_of(rank_plan.packs, payloads, rank), adapter), 1.0)
    return found


def kind_of(unit: Any, adapter: Any) -> str:
    if unit in adapter.language.layers:
        return "layer"
    if unit in adapter.vision_stack().layers:
        return "block"
    return "rest of the encoder" if unit in adapter.units() else "root"


def count_gathers(group: Any, kind: str, found: Counter[str]) -> None:
    unshard = group.unshard

    def counted(*arguments: Any) -> None:
        before = group._all_gather_result, group._sharded_state
        unshard(*arguments)
        found[kind] += (group._all_gather_result, group._sharded_state) != before

    group.unshard = counted


@pytest.mark.parametrize(("freeze", "vision", "passes_of_encoder"), [
    (["vision"], IN_PACKS, 1), ([], APART, 2), *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ([], IN_PACKS, 2), (["vision"], APART, 1)))])
def test_units_are_gathered_for_each_pass_that_they_have_and_no_more(
    freeze: list[str], vision: VisionPlan, passes_of_encoder: int
) -> None:
    adapter = rough_model()
    blocks, layers = (len(stack.layers) for stack in adapter.stacks())
    rest = len(adapter.units()) - blocks - layers
    assert rest > 0
    assert run_ranks(gathers, 2, freeze, vision)[0] == {
        "root": 1, "layer": 2 * layers, "block": passes_of_encoder * blocks,
        "rest of the encoder": passes_of_encoder * rest}
