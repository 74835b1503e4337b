"""What ranks run of a plan, and which images they encode."""

from dataclasses import replace

import pytest

from dhp_ray.planner.plan.cluster import ClusterSpec
from dhp_ray.planner.plan.types import (
    GroupPlan,
    Pack,
    Plan,
    RankPack,
    Sample,
    SplitImage,
    VisionPlan,
    encoded_images,
    planned_samples,
)

SAMPLES = (Sample("a", 8, 4, ((1, 4, 4),)), Sample("b", 9), Sample("c", 7, 8, ((1, 4, 4), (2, 4, 4))))
GROUPS = (GroupPlan((0, 1), Pack((0,)), 1.0, encoders=(3,)), GroupPlan((2,), Pack((1,)), 0.5),
          GroupPlan((1, 2, 3), Pack((2,)), 0.2, encoders=(0, 2), splits=(SplitImage(1, (2, 3)),)))
APART = Plan("dhp", "step", ClusterSpec(4, 4, 15), SAMPLES, GROUPS, 1.2, 1.0, vision=VisionPlan("world"))
IN_PACKS = replace(APART, vision=VisionPlan(), groups=tuple(
    replace(group, encoders=group.ranks[:1] * len(group.encoders), splits=()) for group in GROUPS))
CUTS = [[range(4)], [range(2), range(2, 4)], [range(1), range(1, 3), range(3, 4)], [range(rank, rank + 1)
                                                                                  for rank in range(4)]]


def test_a_rank_has_its_packs_and_those_with_an_image_that_it_encodes_apart():
    found = APART.slices(7, "1.7.1").rank_plans()
    assert [[pack.index for pack in plan.packs] for plan in found] == [[0], [0, 2], [1, 2], [2]]
    assert [[pack.index for pack in plan.encoded] for plan in found] == [[2], [], [2], [0, 2]]
    assert {(plan.step, plan.plan_id, plan.process_groups, plan.vision) for plan in found} == {
        (7, "1.7.1", ((0, 1), (1, 2, 3)), APART.vision)}
    assert [plan.encoded for plan in IN_PACKS.slices(7).rank_plans()] == [()] * 4


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("plan", [APART, IN_PACKS, replace(IN_PACKS, sync="micro_batch", groups=tuple(
    replace(group, micro_batch=number) for number, group in enumerate(IN_PACKS.groups)))])
def test_shares_of_the_ranks_hold_the_same_slices(cut, plan):
    slices = plan.slices(7, "1.7.1")
    assert [found for ranks in cut for found in slices.of(ranks).rank_plans()] == slices.rank_plans()


def test_a_share_has_the_packs_of_its_ranks_once_and_is_shared_again():
    share = APART.slices(7).of(range(1, 3))
    assert [pack.index for pack in share.packs] == [0, 1, 2]
    assert [pack.index for pack in share.of(range(2, 3)).packs] == [1, 2]
    assert share.of(range(2, 3)).rank_plans() == [APART.rank_plan(7, 2)]


def test_a_rank_decodes_the_images_that_the_plan_gives_it():
    pack = RankPack(0, (4, 6), SAMPLES, (6, 4, 6), 1.0)
    assert encoded_images(pack, 4) == [(False,), (), (True, False)]
    assert encoded_images(pack, 6) == [(True,), (), (False, True)]
    parts = replace(pack, splits=(SplitImage(2, (6, 4)),))
    assert encoded_images(parts, 4) == [(False,), (), (True, True)]


def test_a_rank_needs_rows_of_its_packs_and_of_images_that_it_encodes():
    assert [[sample.id for sample in planned_samples(APART.rank_plan(1, rank))] for rank in range(4)] == [
        ["a", "c"], ["a", "c"], ["b", "c", "c"], ["c", "a", "c"]]
