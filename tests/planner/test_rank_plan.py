"""What ranks run of a plan, and which images they encode."""

from dataclasses import replace

from dhp_ray.planner.plan.cluster import ClusterSpec
from dhp_ray.planner.plan.types import Pack, Plan, Sample, SplitImage, VisionPlan, encoded_images, planned_samples

SAMPLES = (Sample("a", 8, 4, ((1, 4, 4),)), Sample("b", 9), Sample("c", 7, 8, ((1, 4, 4), (2, 4, 4))))
GROUPS = (Pack((0, 1), (0,), 1.0, encoders=(3,)), Pack((2,), (1,), 0.5),
          Pack((1, 2, 3), (2,), 0.2, encoders=(0, 2), splits=(SplitImage(1, (2, 3)),)))
APART = Plan("dhp", "step", ClusterSpec(4, 4, 15), SAMPLES, GROUPS, 1.2, 1.0, vision=VisionPlan("world"))
IN_PACKS = replace(APART, vision=VisionPlan(), groups=tuple(
    replace(group, encoders=group.ranks[:1] * len(group.encoders), splits=()) for group in GROUPS))


def test_a_rank_has_its_packs_and_those_with_an_image_that_it_encodes_apart():
    found = APART.rank_plans(7, "1.7.1")
    assert [[pack.index for pack in plan.packs] for plan in found] == [[0], [0, 2], [1, 2], [2]]
    assert [[pack.index for pack in plan.encoded] for plan in found] == [[2], [], [2], [0, 2]]
    assert {(plan.step, plan.plan_id, plan.process_groups, plan.vision) for plan in found} == {
        (7, "1.7.1", ((0, 1), (1, 2, 3)), APART.vision)}
    assert [plan.encoded for plan in IN_PACKS.rank_plans(7)] == [()] * 4


def test_a_rank_decodes_the_images_that_the_plan_gives_it():
    pack = Pack((4, 6), (), 1.0, encoders=(6, 4, 6), samples=SAMPLES)
    assert encoded_images(pack, 4) == [(False,), (), (True, False)]
    assert encoded_images(pack, 6) == [(True,), (), (False, True)]
    parts = replace(pack, splits=(SplitImage(2, (6, 4)),))
    assert encoded_images(parts, 4) == [(False,), (), (True, True)]


def test_a_rank_needs_rows_of_its_packs_and_of_images_that_it_encodes():
    assert [[sample.id for sample in planned_samples(APART.rank_plan(1, rank))] for rank in range(4)] == [
        ["a", "c"], ["a", "c"], ["b", "c", "c"], ["c", "a", "c"]]
