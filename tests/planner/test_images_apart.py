"""Plans whose images are encoded apart from the packs: who encodes what, when, what memory holds, and which plan is
taken."""

import json
from dataclasses import replace

import hypothesis
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dhp_ray.planner import GAIN, ClusterSpec, CostModel, Plan, PlanError, Sample, plan_batch, replay
from dhp_ray.planner.cost.derived import encoder_bytes, language_bytes, with_encoder_apart
from dhp_ray.planner.memory.model import MemoryModel, MemorySettings
from dhp_ray.planner.plan.types import VisionPlan
from tests.published_configs import shape_of

ALONE = CostModel(0.0, 1.0, 0.0, 0.0, {2: 1e9}, vision_linear_s=1.0, latency_s=3.0)
"""A second a token and a patch; groups of several ranks do not pay."""
MIXED = [Sample("many", 40, 10, ((1, 2, 2),) * 10), *(Sample(f"text {index}", 60) for index in range(7))]


def example(tokens_of_b: int) -> list[Sample]:
    """That of docs/planner.md."""
    return [Sample("a", 1, 1, ((1, 1, 1),) * 3), Sample("b", tokens_of_b)]


@pytest.mark.parametrize(("tokens_of_b", "group_s", "world_s"), [(2, 5.0, 4.0), (4, 5.0, 6.0)])
def test_the_page_s_example(tokens_of_b, group_s, world_s):
    plans = {encoder: plan_batch(example(tokens_of_b), ClusterSpec(2, 2, 4), ALONE, encoder=encoder)
             for encoder in ("group", "world", "auto")}
    assert plans["group"].predicted_time_s == pytest.approx(group_s)
    assert plans["world"].predicted_time_s == pytest.approx(world_s)
    assert plans["auto"].predicted_time_s == pytest.approx(min(group_s, world_s))
    assert plans["auto"].vision == plans["group" if group_s < world_s else "world"].vision
    counts = sorted(sum(encoder == rank for group in plans["world"].groups for encoder in group.encoders)
                    for rank in range(2))
    assert counts == [1, 2]
    assert all(plan.lower_bound_s <= plan.predicted_time_s for plan in plans.values())


@settings(max_examples=20, deadline=None)
@hypothesis.example(904, [[194, 214, 162]], 4, "step")
@given(st.integers(100, 1000), st.lists(st.lists(st.integers(1, 220), min_size=1, max_size=4), min_size=1, max_size=3),
       st.integers(2, 8), st.sampled_from(["step", "micro_batch"]))
def test_auto_is_the_shorter_of_both(text, widths, num_ranks, sync):
    """A long text beside few images, no packs over several ranks: the text's rank need not encode any image."""
    samples = [Sample("text", text)] + [Sample(str(row), 37, 0, tuple((1, 2, width) for width in of_row))
                                        for row, of_row in enumerate(widths)]
    group, world, auto = (plan_batch(samples, ClusterSpec(num_ranks, 8, 1100), replace(ALONE, latency_s=1e4), sync=sync,
                                     encoder=encoder).predicted_time_s for encoder in ("group", "world", "auto"))
    assert auto <= min(group, world) * (1 + GAIN)


def test_features_and_their_gradients_take_their_time():
    cost = replace(ALONE, feature_bytes=1e9)  # a second a row
    slower = plan_batch(example(2), ClusterSpec(2, 2, 4), cost, encoder="world").predicted_time_s
    assert slower == pytest.approx(4.0 + 2 * 1 / 3)  # a third of a's row travels, there and back


def test_a_frozen_encoder_has_no_second_phase():
    plan = plan_batch(example(2), ClusterSpec(2, 2, 4), replace(ALONE, vision_forward=1.0), encoder="world")
    assert plan.predicted_time_s == pytest.approx(2.0 + 2.0)
    with pytest.raises(PlanError, match=r"vision_forward: got 0\.0; allowed: above 0, up to 1"):
        replace(ALONE, vision_forward=0.0)


@pytest.mark.parametrize("planner", ["dhp", "static", "dhp_quick"])
@pytest.mark.parametrize("speeds", [(), (0.5, 1.0, 1.0, 1.0)])
def test_a_plan_of_any_planner_is_read_and_planned_again(planner, speeds):
    plan = plan_batch(MIXED, ClusterSpec(4, 2, 200, speeds), ALONE, planner=planner, encoder="world")
    assert plan.vision == VisionPlan("world")
    tree = json.loads(json.dumps(plan.to_json()))
    assert (Plan.from_json(tree).groups, Plan.from_json(tree).vision) == (
        tuple(replace(group, predicted_memory_bytes=0.0) for group in plan.groups), plan.vision)
    assert (replay(tree).groups, replay(tree).vision) == (plan.groups, plan.vision)
    auto = plan_batch(MIXED, ClusterSpec(4, 2, 200, speeds), ALONE, planner=planner, encoder="auto")
    group = plan_batch(MIXED, ClusterSpec(4, 2, 200, speeds), ALONE, planner=planner)
    assert auto.predicted_time_s == min(plan.predicted_time_s, group.predicted_time_s)


def test_a_plan_file_that_names_encoders_by_their_places_is_read():
    plan = plan_batch(MIXED, ClusterSpec(4, 2, 60), replace(ALONE, latency_s=0.0))
    tree = plan.to_json()
    del tree["vision"], tree["inputs"]["encoder"]
    for group in tree["groups"]:
        group["encoders"] = [group["ranks"].index(rank) for rank in group["encoders"]]
    assert [group.encoders for group in Plan.from_json(tree).groups] == [group.encoders for group in plan.groups]
    assert replay(tree).groups == plan.groups


def test_a_plan_file_of_before_passes_and_parts_is_read():
    plan = plan_batch(MIXED, ClusterSpec(4, 2, 200), ALONE, encoder="world")
    tree = json.loads(json.dumps(plan.to_json()))
    assert tree["vision"].pop("num_passes") == 0
    assert not any({"passes", "splits"} & group.keys() for group in tree["groups"])
    for name in list(tree["inputs"]["cost"]):
        if name.startswith("image_") or name in ("encoder_gather_s", "encoder_bytes"):
            assert tree["inputs"]["cost"].pop(name) == 0.0
    assert Plan.from_json(tree).vision == plan.vision
    assert (replay(tree).groups, replay(tree).vision) == (plan.groups, plan.vision)


def test_where_there_is_nothing_to_encode_apart():
    text = [Sample(str(index), 50) for index in range(6)]
    plan = plan_batch(text, ClusterSpec(4, 2, 200), ALONE, encoder="world")
    assert plan.vision == VisionPlan("group")
    assert plan.groups == plan_batch(text, ClusterSpec(4, 2, 200), ALONE).groups
    with pytest.raises(PlanError, match="encoder: got 'disjoint'; allowed: group, world, auto"):
        plan_batch(text, ClusterSpec(4, 2, 200), ALONE, encoder="disjoint")


def test_without_vision_costs_patches_are_balanced():
    plan = plan_batch(MIXED, ClusterSpec(5, 5, 200), replace(ALONE, vision_linear_s=0.0), encoder="world")
    encoders = [encoder for group in plan.groups for encoder in group.encoders]
    assert sorted(encoders.count(rank) for rank in range(5)) == [2] * 5


def test_memory_says_whether_activations_are_kept_and_whether_images_are_encoded_apart():
    """200 tokens a rank hold 2,000 bytes. Of `many`'s packs 10 rows of features and their gradients are held."""
    def planned(**sizes):
        cost = replace(ALONE, memory_bytes_per_token=10.0, language_bytes_per_token=5.0, **sizes)
        return plan_batch(MIXED, ClusterSpec(2, 2, 200), cost, encoder="world").vision

    # 20 patches of a rank, packs of at most 200 tokens: 1,000 bytes
    assert planned(encoder_bytes_per_patch=45.0) == VisionPlan("world", True, 2000 // 45)
    assert planned(encoder_bytes_per_patch=60.0) == VisionPlan("world", False, 2000 // 60)
    # and of the 10 rows that passes leave behind, 5 on each rank
    assert planned(encoder_bytes_per_patch=60.0, feature_bytes=10.0) == VisionPlan("world", False, 1750 // 60)
    assert planned(encoder_bytes_per_patch=501.0) == VisionPlan("group")  # one image of four patches
    assert planned(encoder_bytes_per_patch=1.0, feature_bytes=101.0) == VisionPlan("group")
    assert planned(encoder_bytes_per_patch=1.0, pack_bytes=1990.0) == VisionPlan("group")


def test_encoding_again_takes_a_forward_pass_more():
    kept = plan_batch(example(2), ClusterSpec(2, 2, 4), ALONE, encoder="world")
    cost = replace(ALONE, memory_bytes_per_token=10.0, language_bytes_per_token=5.0, encoder_bytes_per_patch=20.0)
    again = plan_batch(example(2), ClusterSpec(2, 2, 4), cost, encoder="world")
    assert (kept.vision.keeps, again.vision.keeps) == (True, False)
    assert again.predicted_time_s == pytest.approx(kept.predicted_time_s + 2 / 3)


@pytest.mark.parametrize(("frozen", "recomputes", "forward"), [
    ((), False, 0.3), ((), True, 0.3), (("vision",), False, 1.0), (("language",), False, 0.3)])
def test_what_a_model_s_memory_says_of_images_apart(frozen, recomputes, forward):
    """Not which share of an image's time its forward pass takes, but that a frozen encoder has no other."""
    memory = MemoryModel(shape_of("3B"), MemorySettings(sync="step", world_size=8, precision="bf16",
                                                        recomputes=recomputes, frozen=frozen))
    cost = with_encoder_apart(replace(ALONE, vision_forward=0.3), memory, 4096)
    assert cost.vision_forward == forward
    assert cost.feature_bytes == 2 * 2048
    for tokens in (1, 100, 300, 500, 2048, 4096):
        assert cost.pack_bytes + cost.language_bytes_per_token * tokens >= language_bytes(memory, tokens) * (1 - 1e-9)
    for patches in (1, 4, 63, 64, 65, 1000, 16320, 16384):
        counted = cost.encoder_bytes + cost.encoder_bytes_per_patch * patches
        assert counted >= encoder_bytes(memory, patches) * (1 - 1e-9)
    assert counted == pytest.approx(encoder_bytes(memory, 16384), rel=0.01)


@pytest.mark.parametrize(("frozen", "encoder_bytes_a_value", "language_bytes_a_value"), [
    ((), 8, 8), (("vision",), 2, 8), (("language",), 8, 4)])
def test_the_encoder_is_gathered_for_its_share_of_the_layers_seconds(
    frozen, encoder_bytes_a_value, language_bytes_a_value
):
    settings = MemorySettings(sync="micro_batch", world_size=8, precision="bf16", recomputes=False, frozen=frozen)
    memory = MemoryModel(shape_of("3B"), settings)
    vision, language = (sum(unit.num_parameters * unit.count for unit in memory.shape.units()[:-1] if unit.part == part)
                        for part in ("vision", "language"))
    encoder, rest = encoder_bytes_a_value * vision, language_bytes_a_value * language
    cost = replace(ALONE, gather_s=0.0, gather_s_by_sync={"step": 0.0, "micro_batch": 2.0})
    assert with_encoder_apart(cost, memory, 4096).encoder_gather_s == pytest.approx(2.0 * encoder / (encoder + rest))
    in_step = MemoryModel(shape_of("3B"), replace(settings, sync="step"))
    assert with_encoder_apart(cost, in_step, 4096).encoder_gather_s == 0.0
