"""Which rank encodes which part of an image, and what is cut further where images are uneven."""

from dataclasses import replace

import numpy as np
import pytest

from dhp_ray.planner import ClusterSpec, CostModel, Sample, plan_batch
from dhp_ray.planner.timeline import apart_timeline

COST = CostModel(0.0, 1.0, 0.0, 0.0, {2: 1e9}, vision_linear_s=1.0, latency_s=3.0, image_piece_patches=1.0)
"""A second a token and a patch; groups of several ranks do not pay; images are cut between any two patches."""


def plan_of(widths, num_ranks, texts=(), cost=COST, speeds=(), **more):
    samples = [*(Sample(f"image {row}", 1, 0, ((1, 1, width),)) for row, width in enumerate(widths)),
               *(Sample(f"text {row}", text) for row, text in enumerate(texts))]
    return plan_batch(samples, ClusterSpec(num_ranks, 8, 64, speeds), cost, encoder="world", **more)


def rings_of(plan):
    return {split.ranks for group in plan.groups for split in group.splits}


def encoding_s(plan):
    timeline = apart_timeline(plan)
    return timeline.forward_busy_s + timeline.backward_busy_s


def test_parts_go_to_a_group_of_the_pool_before_any_other():
    """Twelve patches in two or three parts; to make another group takes longer than it saves."""
    costly = replace(COST, group_s=100.0)
    assert rings_of(plan_of([12, 1, 1, 1], 4, cost=costly, pool=[(0, 3)])) == {(0, 3)}
    assert rings_of(plan_of([12, 1, 1, 1], 4, cost=costly)) == set()
    assert rings_of(plan_of([12, 1, 1, 1], 4)) == {(0, 1, 2, 3)}
    assert rings_of(plan_of([12, 1, 1, 1], 4, cost=costly, pool=[(0, 1, 2)])) == {(0, 1, 2)}


def test_parts_go_to_a_pack_s_group():
    """A text of 80 tokens needs two ranks; each of them then has half of the image as well."""
    plan = plan_of([12, 1, 1], 3, texts=[80], cost=replace(COST, group_s=100.0))
    (pack,) = [group.ranks for group in plan.groups if group.degree > 1]
    assert rings_of(plan) == {pack}


def test_new_groups_are_of_neighbours_so_that_other_batches_make_the_same():
    rings = rings_of(plan_of([12, 12, 1, 1, 1, 1], 6))
    assert rings
    for ranks in rings:
        assert ranks[0] % len(ranks) == 0
        assert list(ranks) == list(range(ranks[0], ranks[0] + len(ranks)))


@pytest.mark.parametrize(("widths", "speeds", "time_s"), [
    ([12, 1, 1], (0.5, 1, 1, 1), 5.0), ([12, 3, 3], (0.5, 1, 1), 9.5),
    ([12, 12, 4, 4, 4], (0.5, 1, 1, 1, 1, 0.5), 10.0)])
def test_neighbours_in_speed_encode_an_image_together(widths, speeds, time_s):
    """A slow rank would hold up all of its group."""
    assert plan_of(widths, len(speeds), speeds=speeds).predicted_time_s == pytest.approx(time_s)


def test_two_images_that_hold_up_two_ranks_are_both_cut():
    """Four of 6 patches on 3 ranks: 12 s; with one cut in two 9 s. Two of 12 on 3 ranks: 12 s, with one cut still 12,
    with both in three parts 8."""
    assert encoding_s(plan_of([6] * 4, 3)).max() <= 9.0
    assert encoding_s(plan_of([12] * 2, 3)).max() <= 9.0


def test_an_image_below_the_mean_is_cut_where_whole_images_come_out_uneven():
    """Five of 6 patches on 4 ranks: 12 s, with the fifth cut in two 9 s."""
    whole = plan_of([6] * 5, 4, cost=replace(COST, image_piece_patches=0.0))
    cut = plan_of([6] * 5, 4)
    assert (encoding_s(whole).max(), encoding_s(cut).max()) == (12.0, 9.0)
    assert cut.predicted_time_s == whole.predicted_time_s - 3.0
    costly = plan_of([6] * 5, 4, cost=replace(COST, image_latency_s=9.0))
    np.testing.assert_array_equal(encoding_s(costly), encoding_s(whole))


def test_of_few_images_a_small_one_is_cut_where_its_halves_fill_what_the_others_leave():
    """Of 10, 9 and 5 patches on two ranks; whole, the fullest rank has 14. The longest image there, of 9, gains nothing
    in halves, which take half a second more each: 10 and 5, 5 and 5. That of 5 does: 10 and 3, 9 and 3."""
    plan = plan_of([10, 9, 5], 2, texts=[20], cost=replace(COST, image_latency_s=0.5))
    assert max(encoding_s(plan)) == pytest.approx(13.0)
    assert sum(len(group.splits) for group in plan.groups) == 1
