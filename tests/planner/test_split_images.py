"""Images that several ranks encode: which, in how many parts, on which ranks, when, and what a plan file says of it."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dhp_ray.planner import ClusterSpec, CostModel, Plan, PlanError, Sample, plan_batch, replay
from dhp_ray.planner.image_parts import cut_in_time, exchanges, most_parts, shares
from dhp_ray.planner.plan import SplitImage, VisionPlan
from dhp_ray.planner.split_images import LIMITS, exchange_s, part_bytes, parts_for_memory, parts_for_time
from dhp_ray.planner.timeline import apart_timeline, plan_starts
from tests.planner.reference_encoder import timeline

ALONE = CostModel(0.0, 1.0, 0.0, 0.0, {2: 1e9}, vision_linear_s=1.0, latency_s=3.0, image_piece_patches=1.0)
"""A second a token and a patch; groups of several ranks do not pay; images are cut between any two patches."""
LARGE = [Sample("large", 4, 3, ((1, 3, 4),)), *(Sample(str(index), 1, 1, ((1, 1, 1),)) for index in range(12))]
"""The example of split_images.py."""


def test_how_an_image_is_cut():
    assert cut_in_time((5, 4, 8), 2) == [(3, 4, 8), (2, 4, 8)]
    assert [exchanges((2, 4, 8), count) for count in (1, 2, 3)] == [False, False, True]
    assert shares((5, 4, 8), 2) == [0.6, 0.4]
    assert shares((1, 4, 8), 4) == [0.25] * 4
    assert [most_parts((2, 4, 8), piece) for piece in (0, 4, 20, 32, 64)] == [1, 16, 3, 2, 2]


@pytest.mark.parametrize(("latency_s", "num_parts"), [(0.0, 2), (0.5, 2), (3.0, 2), (30.0, 1)])
def test_the_module_s_example(latency_s, num_parts):
    """With 3 s for each part more two are best, and still longer than the mean; with 30 s none is worth it."""
    cost = replace(ALONE, image_latency_s=latency_s)
    seconds = np.array([12.0] + [1.0] * 12)
    found = parts_for_time(lambda image: (1, 3, 4), seconds, np.ones(13, dtype=np.int64), np.ones(4), cost)
    assert found.tolist() == [num_parts] + [1] * 12


def test_an_image_stays_whole_where_another_one_takes_longer_anyway():
    """20 s in one piece, and one of 12 s that two ranks could share: the mean of four ranks is 8 s."""
    found = parts_for_time([(1, 1, 1), (1, 3, 4)].__getitem__, np.array([20.0, 12.0]), np.ones(2, dtype=np.int64),
                           np.ones(4), ALONE)
    assert found.tolist() == [1, 1]


def parts_in_plain_python(grids, seconds, least, speeds, cost):
    """The rule of split_images.py, image by image."""
    mean, longest = sum(seconds) / sum(speeds), max(seconds)
    above = [image for image, time in enumerate(seconds) if time / max(speeds) > mean * (1 + 1e-9)]

    def part_s(image, count):
        return shares(grids[image], count)[0] * seconds[image] + exchange_s(grids[image], count, cost)

    found = []
    for limit in np.linspace(longest, max(speeds) * mean, LIMITS) if above else []:
        counts, work, end = list(least), sum(seconds), 0.0
        for image in above:
            most = min(len(speeds), most_parts(grids[image], cost.image_piece_patches))
            allowed = range(least[image], max(least[image], most) + 1)
            within = [count for count in allowed if part_s(image, count) <= limit * (1 + 1e-9)]
            count = counts[image] = within[0] if within else min(allowed, key=lambda count: part_s(image, count))
            work += count * exchange_s(grids[image], count, cost)
            end = max(end, part_s(image, count) / max(speeds))
        found.append((max(end, work / sum(speeds)), counts))
    return min(found, key=lambda one: one[0], default=(0.0, least))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 9), st.integers(1, 30)), min_size=1, max_size=8),
       st.integers(1, 7), st.booleans(), st.sampled_from([0.0, 0.7, 9.0]), st.integers(1, 2))
def test_parts_as_a_plain_loop_chooses_them(grids, num_ranks, uneven, latency_s, least):
    speeds = [0.5 + 0.25 * (rank % 3) if uneven else 1.0 for rank in range(num_ranks)]
    cost = replace(ALONE, image_piece_patches=2.0, image_latency_s=latency_s, image_comm_bytes_per_patch=1e7)
    seconds = [float(time * height * width) for time, height, width in grids]
    at_least = [min(least, num_ranks, most_parts(grid, 2.0)) for grid in grids]
    found = parts_for_time(grids.__getitem__, np.array(seconds), np.array(at_least), np.array(speeds), cost).tolist()
    _, expected = parts_in_plain_python(grids, seconds, at_least, speeds, cost)
    assert found == expected


def plan_of(cost, sync="step", samples=LARGE, num_ranks=4, **more):
    return plan_batch(samples, ClusterSpec(num_ranks, num_ranks, 7, **more), cost, sync=sync, encoder="world")


@pytest.mark.parametrize("sync", ["step", "micro_batch"])
def test_an_image_is_split_where_that_makes_the_step_shorter(sync):
    """Packs take 19 tokens of 13 samples; of 24 seconds of images a rank has 6, or one has 12."""
    whole, split, costly = (plan_of(replace(ALONE, **change), sync) for change in (
        {"image_piece_patches": 0.0}, {}, {"image_latency_s": 30.0}))
    assert not any(group.splits for plan in (whole, costly) for group in plan.groups)
    ((large,),) = [group.splits for group in split.groups if group.splits]
    assert (large.image, len(large.ranks)) == (0, 2)
    assert [encoding_s(plan) for plan in (whole, split)] == pytest.approx([12.0, 6.0])
    assert split.predicted_time_s <= whole.predicted_time_s - 5.0
    assert costly.predicted_time_s == whole.predicted_time_s
    assert split.process_groups()[0] == large.ranks
    for plan in (whole, split):
        assert timeline(plan, ALONE) == pytest.approx(plan.predicted_time_s)
        assert plan.lower_bound_s <= plan.predicted_time_s


def encoding_s(plan):
    """Of both phases, until the last rank is done."""
    apart = apart_timeline(plan)
    return float(apart.encoded_s.max() + (apart.end_s - apart.backward_s).max())


def test_parts_in_time_need_no_exchange():
    cost = replace(ALONE, image_latency_s=30.0)
    plan = plan_of(cost, samples=[replace(LARGE[0], vision_grids=((4, 1, 3),)), *LARGE[1:]])
    ((large,),) = [group.splits for group in plan.groups if group.splits]
    assert len(large.ranks) == 2
    assert not list(plan.rings())
    assert large.ranks not in plan.process_groups()
    assert timeline(plan, cost) == pytest.approx(plan.predicted_time_s)


def test_what_no_rank_s_memory_holds_is_encoded_by_several():
    """A rank has 70 bytes for images: seven patches, or where they exchange, less. No rank is to hold twelve."""
    cost = replace(ALONE, memory_bytes_per_token=10.0, encoder_bytes_per_patch=10.0, image_part_bytes_per_patch=12.0,
                   image_latency_s=30.0)
    assert part_bytes((1, 3, 4), 3, cost) == 12.0 * (4 + 1)
    plan = plan_of(cost)
    ((large,),) = [group.splits for group in plan.groups if group.splits]
    assert len(large.ranks) == 3
    assert not plan.vision.keeps
    assert timeline(plan, cost) == pytest.approx(plan.predicted_time_s)
    for change in ({"image_part_bytes_per_patch": 18.0}, {"image_piece_patches": 0.0}, {"image_piece_patches": 5.0}):
        assert plan_of(replace(cost, **change)).vision == VisionPlan(), "nor do four ranks: packs encode their own"


def test_room_counts_what_is_gathered():
    counts = [parts_for_memory([(1, 3, 4), (1, 1, 7)].__getitem__, np.array([12.0, 7.0]), room, 4,
                               replace(ALONE, encoder_bytes_per_patch=10.0, image_part_bytes_per_patch=10.0))
              for room in (120.0, 119.0, 70.0, 69.0, 40.0, 39.0)]
    assert [None if found is None else found.tolist() for found in counts] == [
        [1, 1], [2, 1], [2, 1], [3, 2], [4, 3], None]


def test_groups_of_images_in_parts_are_weighed():
    """Making one takes longer than it saves; one of the pool or of a pack is there."""
    assert any(group.splits for group in plan_of(replace(ALONE, group_s=4.0)).groups)
    costly = replace(ALONE, group_s=7.0)
    assert not any(group.splits for group in plan_of(costly).groups)
    ((large,),) = [group.splits for group in plan_of(ALONE).groups if group.splits]
    again = plan_batch(LARGE, ClusterSpec(4, 4, 7), costly, encoder="world", pool=[large.ranks])
    assert [group.splits for group in again.groups if group.splits] == [(large,)]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 12), st.integers(1, 12)), min_size=1, max_size=6),
       st.integers(1, 6), st.sampled_from(["step", "micro_batch"]), st.booleans(), st.booleans(),
       st.sampled_from([0.0, 0.2, 20.0]))
def test_plans_with_images_in_parts(grids, num_ranks, sync, uneven, tight, latency_s):
    speeds = tuple(0.5 + 0.25 * (rank % 3) for rank in range(num_ranks)) if uneven else ()
    cost = replace(ALONE, image_piece_patches=2.0, image_latency_s=latency_s, image_comm_bytes_per_patch=1e7,
                   feature_bytes=1e6, vision_quadratic_s=1e-2)
    if tight:
        cost = replace(cost, memory_bytes_per_token=10.0, encoder_bytes_per_patch=1.0, image_part_bytes_per_patch=2.0)
    samples = [Sample(str(row), 3, 2, (grid,) * (1 + row % 2)) for row, grid in enumerate(grids)]
    plan = plan_batch(samples, ClusterSpec(num_ranks, 2, 8, speeds), cost, sync=sync, encoder="world")
    plan.validate()
    assert plan.vision.apart or tight
    assert timeline(plan, cost) == pytest.approx(plan.predicted_time_s)
    assert plan.lower_bound_s <= plan.predicted_time_s * (1 + 1e-9)
    tree = json.loads(json.dumps(plan.to_json()))
    read = Plan.from_json(tree)
    assert [group.splits for group in read.groups] == [group.splits for group in plan.groups]
    assert plan_starts(read)[1] == pytest.approx(plan.predicted_time_s)
    assert (replay(tree).groups, replay(tree).vision) == (plan.groups, plan.vision)
    whole = plan_batch(samples, ClusterSpec(num_ranks, 2, 8, speeds), replace(cost, image_piece_patches=0.0), sync=sync,
                       encoder="world")
    assert plan.predicted_time_s <= whole.predicted_time_s * (1 + 1e-9) or not whole.vision.apart


def test_a_part_pays_for_the_patches_of_the_others():
    cost = replace(ALONE, image_comm_bytes_per_patch=1e9, image_latency_s=0.25)
    assert exchange_s((1, 3, 4), 3, cost) == pytest.approx(8.0 + 0.5)
    assert exchange_s((3, 3, 4), 3, cost) == 0.0


@pytest.mark.parametrize(("split", "message"), [
    (SplitImage(1, (0, 1)), "image 1 in parts on ranks"), (SplitImage(0, (0,)), r"on ranks \(0,\)"),
    (SplitImage(0, (0, 0)), r"on ranks \(0, 0\)"), (SplitImage(0, (0, 9)), r"on ranks \(0, 9\)"),
    (SplitImage(0, (1, 0)), "as `encoders` and `passes` begin"), (SplitImage(0, (0, 1), (0, 0)), r"passes \(0, 0\)")])
def test_a_plan_with_parts_that_cannot_be_is_refused(split, message):
    plan = plan_of(replace(ALONE, image_piece_patches=0.0))
    index = next(index for index, group in enumerate(plan.groups) if 0 in group.pack.sequences)
    group = plan.groups[index]
    place = sum(len(LARGE[row].vision_grids) for row in group.pack.sequences[:group.pack.sequences.index(0)])
    encoders = list(group.encoders)
    encoders[place] = 0
    wrong = replace(split, image=split.image + (len(encoders) if split.image else place))
    groups = [*plan.groups[:index], replace(group, encoders=tuple(encoders), splits=(wrong,)), *plan.groups[index + 1:]]
    with pytest.raises(PlanError, match=message.replace("image 1", f"image {wrong.image}")):
        replace(plan, groups=tuple(groups)).validate()


def test_in_lockstep_parts_that_exchange_are_alone_in_one_pass():
    plan = plan_of(ALONE, "micro_batch")
    plan = replace(plan, vision=replace(plan.vision, num_passes=2))
    index = next(index for index, group in enumerate(plan.groups) if group.splits)
    group = plan.groups[index]
    (split,) = group.splits
    apart = replace(group, splits=(replace(split, passes=(0, 1)),))
    with pytest.raises(PlanError, match=r"exchange are in passes \(0, 1\); allowed: one"):
        replace(plan, groups=(*plan.groups[:index], apart, *plan.groups[index + 1:])).validate()
    crowded = [replace(other, encoders=split.ranks[:1] * len(other.encoders)) if other is not group else other
               for other in plan.groups]
    with pytest.raises(PlanError, match=f"rank {split.ranks[0]} has more in pass 0 than a part of an image that exch"):
        replace(plan, groups=tuple(crowded)).validate()
