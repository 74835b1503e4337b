"""Images that several ranks encode: which, in how many parts, on which ranks, when, and what a plan file says of it."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dhp_ray.planner import ClusterSpec, CostModel, Plan, PlanError, Sample, plan_batch, replay
from dhp_ray.planner.encoder.images import LIMITS, parts_for_memory, parts_for_time
from dhp_ray.planner.plan.types import SplitImage, VisionPlan, cut_in_time, shares
from dhp_ray.planner.timeline import apart_timeline, plan_starts
from tests.planner.reference_encoder import timeline

ALONE = CostModel(0.0, 1.0, 0.0, 0.0, {2: 1e9}, vision_linear_s=1.0, latency_s=3.0, encoder_bytes_per_patch=1.0)
"""A second a token and a patch; groups of several ranks do not pay; there is memory for any image."""
LARGE = [Sample("large", 4, 3, ((12, 1, 1),)), *(Sample(str(index), 1, 1, ((1, 1, 1),)) for index in range(12))]
"""The example of encoder/images.py."""
WHOLE = [replace(LARGE[0], vision_grids=((1, 3, 4),)), *LARGE[1:]]
"""The same where the large image has one step in time."""


def test_how_an_image_is_cut():
    assert cut_in_time((5, 4, 8), 2) == [(3, 4, 8), (2, 4, 8)]
    assert shares((5, 4, 8), 2) == [0.6, 0.4]


@pytest.mark.parametrize(("grid", "num_parts"), [((12, 1, 1), 2), ((3, 2, 2), 3), ((1, 3, 4), 1)])
def test_the_module_s_example(grid, num_parts):
    """In three steps two parts would take 8 s and 4."""
    seconds = np.array([12.0] + [1.0] * 12)
    found = parts_for_time(lambda image: grid, seconds, np.ones(13, dtype=np.int64), np.ones(4))
    assert found.tolist() == [num_parts] + [1] * 12


def test_an_image_stays_whole_where_another_one_takes_longer_anyway():
    """20 s in one piece, and one of 12 s that two ranks could share: the mean of four ranks is 8 s."""
    found = parts_for_time([(1, 1, 1), (12, 1, 1)].__getitem__, np.array([20.0, 12.0]), np.ones(2, dtype=np.int64),
                           np.ones(4))
    assert found.tolist() == [1, 1]


def parts_in_plain_python(grids, seconds, least, speeds):
    """The rule of encoder/images.py, image by image."""
    mean, longest = sum(seconds) / sum(speeds), max(seconds)
    above = [image for image, time in enumerate(seconds) if time / max(speeds) > mean * (1 + 1e-9)]

    def part_s(image, count):
        return shares(grids[image], count)[0] * seconds[image]

    found = []
    for limit in np.linspace(longest, max(speeds) * mean, LIMITS) if above else []:
        counts, end = list(least), mean
        for image in above:
            allowed = range(least[image], max(least[image], min(len(speeds), grids[image][0])) + 1)
            within = [count for count in allowed if part_s(image, count) <= limit * (1 + 1e-9)]
            count = counts[image] = within[0] if within else min(allowed, key=lambda count: part_s(image, count))
            end = max(end, part_s(image, count) / max(speeds))
        found.append((end, counts))
    return min(found, key=lambda one: one[0], default=(0.0, least))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 12), st.integers(1, 4), st.integers(1, 9)), min_size=1, max_size=8),
       st.integers(1, 7), st.booleans(), st.integers(1, 2))
def test_parts_as_a_plain_loop_chooses_them(grids, num_ranks, uneven, least):
    speeds = [0.5 + 0.25 * (rank % 3) if uneven else 1.0 for rank in range(num_ranks)]
    seconds = [float(time * height * width) for time, height, width in grids]
    at_least = [min(least, num_ranks, grid[0]) for grid in grids]
    found = parts_for_time(grids.__getitem__, np.array(seconds), np.array(at_least), np.array(speeds)).tolist()
    assert found == parts_in_plain_python(grids, seconds, at_least, speeds)[1]


def plan_of(cost, sync="step", samples=LARGE, num_ranks=4, **more):
    return plan_batch(samples, ClusterSpec(num_ranks, num_ranks, 7, **more), cost, sync=sync, encoder="world")


def test_images_of_which_memory_is_not_known_stay_whole():
    assert not any(group.splits for group in plan_of(replace(ALONE, encoder_bytes_per_patch=0.0)).groups)


@pytest.mark.parametrize("sync", ["step", "micro_batch"])
def test_an_image_is_split_where_that_makes_the_step_shorter(sync):
    """Packs take 19 tokens of 13 samples; of 24 seconds of images a rank has 6, or one has 12."""
    whole, split = (plan_of(ALONE, sync, samples) for samples in (WHOLE, LARGE))
    assert not any(group.splits for group in whole.groups)
    ((large,),) = [group.splits for group in split.groups if group.splits]
    assert (large.image, len(large.ranks)) == (0, 2)
    assert [encoding_s(plan) for plan in (whole, split)] == pytest.approx([12.0, 6.0])
    assert split.predicted_time_s <= whole.predicted_time_s - 5.0
    assert large.ranks not in split.process_groups()
    for plan in (whole, split):
        assert timeline(plan, ALONE) == pytest.approx(plan.predicted_time_s)
        assert plan.lower_bound_s <= plan.predicted_time_s


def encoding_s(plan):
    """Of both phases, until the last rank is done."""
    apart = apart_timeline(plan)
    return float(apart.encoded_s.max() + (apart.end_s - apart.backward_s).max())


def test_what_no_rank_s_memory_holds_is_encoded_by_several():
    """A rank has 49 bytes for images: four patches. No rank is to hold twelve."""
    cost = replace(ALONE, memory_bytes_per_token=7.0, encoder_bytes_per_patch=10.0)
    plan = plan_of(cost)
    ((large,),) = [group.splits for group in plan.groups if group.splits]
    assert len(large.ranks) == 3
    assert not plan.vision.keeps
    assert timeline(plan, cost) == pytest.approx(plan.predicted_time_s)
    for grid in ((1, 3, 4), (2, 2, 3)):
        samples = [replace(LARGE[0], vision_grids=(grid,)), *LARGE[1:]]
        assert plan_of(cost, samples=samples).vision == VisionPlan(), "nor do four ranks: packs encode their own"


def test_parts_are_as_many_as_memory_requires():
    counts = [parts_for_memory([(12, 1, 1), (7, 1, 1)].__getitem__, np.array([12.0, 7.0]), room, 4,
                               replace(ALONE, encoder_bytes_per_patch=10.0))
              for room in (120.0, 119.0, 70.0, 69.0, 40.0, 39.0, 29.0)]
    assert [None if found is None else found.tolist() for found in counts] == [
        [1, 1], [2, 1], [2, 1], [2, 2], [3, 2], [4, 3], None]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=6),
       st.integers(1, 6), st.sampled_from(["step", "micro_batch"]), st.booleans(), st.booleans())
def test_plans_with_images_in_parts(grids, num_ranks, sync, uneven, tight):
    speeds = tuple(0.5 + 0.25 * (rank % 3) for rank in range(num_ranks)) if uneven else ()
    cost = replace(ALONE, feature_bytes=1e6)
    if tight:
        cost = replace(cost, memory_bytes_per_token=10.0, encoder_bytes_per_patch=1.0)
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
    in_one = [replace(sample, vision_grids=tuple((1, time * height, width) for time, height, width in
                                                 sample.vision_grids)) for sample in samples]
    whole = plan_batch(in_one, ClusterSpec(num_ranks, 2, 8, speeds), cost, sync=sync, encoder="world")
    assert plan.predicted_time_s <= whole.predicted_time_s * (1 + 1e-9) or not whole.vision.apart


@pytest.mark.parametrize(("split", "message"), [
    (SplitImage(1, (0, 1)), "image 1 in parts on ranks"), (SplitImage(0, (0,)), r"on ranks \(0,\)"),
    (SplitImage(0, (0, 0)), r"on ranks \(0, 0\)"), (SplitImage(0, (0, 9)), r"on ranks \(0, 9\)"),
    (SplitImage(0, (1, 0)), "as `encoders` and `passes` begin"), (SplitImage(0, (0, 1), (0, 0)), r"passes \(0, 0\)")])
def test_a_plan_with_parts_that_cannot_be_is_refused(split, message):
    with pytest.raises(PlanError, match=message.replace("image 1", r"image \d+")):
        with_split(plan_of(ALONE), split).validate()


def test_a_plan_with_more_parts_than_steps_in_time_is_refused():
    with pytest.raises(PlanError, match=r"of 1 steps in time in 2 parts; allowed: at most as many as it has steps$"):
        with_split(plan_of(ALONE, samples=WHOLE), SplitImage(0, (0, 1))).validate()


def with_split(plan, split):
    """The plan with a split of the first image of all; a split of image 1 is of one that its pack does not have."""
    index = next(index for index, group in enumerate(plan.groups) if 0 in group.sequences)
    group, groups = plan.groups[index], list(plan.groups)
    place = sum(len(plan.samples[row].vision_grids)
                for row in group.sequences[:group.sequences.index(0)])
    encoders = list(group.encoders)
    encoders[place] = 0
    wrong = replace(split, image=len(encoders) if split.image else place)
    groups[index] = replace(group, encoders=tuple(encoders), splits=(wrong,))
    return replace(plan, groups=tuple(groups))
