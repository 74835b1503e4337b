"""Which rank encodes which part of an image, and what is cut further where images are uneven."""

from dhp_ray.planner import ClusterSpec, CostModel, Sample, plan_batch
from dhp_ray.planner.timeline import apart_timeline

COST = CostModel(0.0, 1.0, 0.0, 0.0, {2: 1e9}, vision_linear_s=1.0, latency_s=3.0, encoder_bytes_per_patch=1.0)
"""A second a token and a patch; groups of several ranks do not pay; there is memory for any image."""


def plan_of(lengths, num_ranks, texts=(), whole=False):
    """Images of so many patches: one a step in time, or all in one."""
    samples = [*(Sample(f"image {row}", 1, 0, ((1, 1, length) if whole else (length, 1, 1),))
                 for row, length in enumerate(lengths)),
               *(Sample(f"text {row}", text) for row, text in enumerate(texts))]
    return plan_batch(samples, ClusterSpec(num_ranks, 8, 64), COST, encoder="world")


def encoding_s(plan):
    timeline = apart_timeline(plan)
    return timeline.forward_busy_s + timeline.backward_busy_s


def test_two_images_that_hold_up_two_ranks_are_both_cut():
    """Four of 6 patches on 3 ranks: 12 s; with one cut in two 9 s. Two of 12 on 3 ranks: 12 s, with one cut still 12,
    with both in three parts 8."""
    assert encoding_s(plan_of([6] * 4, 3)).max() <= 9.0
    assert encoding_s(plan_of([12] * 2, 3)).max() <= 9.0


def test_an_image_below_the_mean_is_cut_where_whole_images_come_out_uneven():
    """Five of 6 patches on 4 ranks: 12 s; in parts at most 9 s: 8 where every rank has a second of text, too."""
    whole, cut = plan_of([6] * 5, 4, whole=True), plan_of([6] * 5, 4)
    assert encoding_s(whole).max() == 12.0
    assert encoding_s(cut).max() <= 9.0
    assert cut.predicted_time_s == whole.predicted_time_s - 4.0


def test_of_few_images_a_small_one_is_cut_where_its_halves_fill_what_the_others_leave():
    """Of 10, 9 and 5 patches on two ranks; whole, the fullest rank has 14. The longest image there, of 9, gains nothing
    in halves. That of 5 does: 10 and 2, 9 and 3."""
    plan = plan_of([10, 9, 5], 2, texts=[20])
    assert max(encoding_s(plan)) == 12.0
    assert sum(len(group.splits) for group in plan.groups) == 1
