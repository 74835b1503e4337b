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


def gathers(rank: int, freeze: list[str], vision: VisionPlan, tie: bool, events: list[str]) -> Counter[str]:
    """How often each kind of unit is gathered in a step of one pack with an image."""
    adapter = rough_model(tie_word_embeddings=tie)
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
            record(group, kind_of(unit, adapter), found, events)
    record_passes(adapter.language.layers[-1], events)
    stepper.run(collated(rank_plan, payloads_of(rank_plan.packs, payloads, rank), adapter), 1.0)
    return found


def kind_of(unit: Any, adapter: Any) -> str:
    if unit in adapter.language.layers:
        return "layer"
    if unit in adapter.vision_stack().layers:
        return "block"
    if unit is adapter.head:
        return "head"
    return "rest of the encoder" if unit in adapter.units() else "root"


def record(group: Any, kind: str, found: Counter[str], events: list[str]) -> None:
    unshard, post_backward = group.unshard, group.post_backward

    def counted(*arguments: Any) -> None:
        before = group._all_gather_result, group._sharded_state
        unshard(*arguments)
        if (group._all_gather_result, group._sharded_state) != before:
            found[kind] += 1
            events.append(f"{kind} gathered")

    def reduced(*arguments: Any) -> None:
        events.append(f"{kind} reduced")
        post_backward(*arguments)

    group.unshard, group.post_backward = counted, reduced


def record_passes(layer: Any, events: list[str]) -> None:
    """When a layer begins and ends what it computes, forward, and begins it backward."""
    layer.self_attn.register_forward_pre_hook(lambda *_: events.append("last layer, forward"), prepend=True)
    layer.mlp.register_full_backward_hook(lambda *_: events.append("last layer, backward"))


def order(rank: int) -> list[str]:
    events: list[str] = []
    gathers(rank, [], IN_PACKS, False, events)
    return [event for event in events if event.startswith(("head", "last layer"))]


def test_the_last_layer_hides_the_gathering_of_a_head_and_its_reduction() -> None:
    assert run_ranks(order, 2)[0] == ["head gathered", "last layer, forward", "head reduced", "last layer, backward"]


@pytest.mark.parametrize(("freeze", "vision", "passes_of_encoder", "tie"), [
    (["vision"], IN_PACKS, 1, True), ([], APART, 2, False), *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ([], IN_PACKS, 2, True), (["vision"], APART, 1, False), (["language"], IN_PACKS, 2, False)))])
def test_units_are_gathered_for_each_pass_that_they_have_and_no_more(
    freeze: list[str], vision: VisionPlan, passes_of_encoder: int, tie: bool
) -> None:
    adapter = rough_model()
    blocks, layers = (len(stack.layers) for stack in adapter.stacks())
    rest = len(adapter.units()) - blocks - layers
    assert rest > 0
    head = {} if tie else {"head": 1}
    assert run_ranks(gathers, 2, freeze, vision, tie, [])[0] == head | {
        "root": 1, "layer": 2 * layers, "block": passes_of_encoder * blocks,
        "rest of the encoder": passes_of_encoder * rest}
