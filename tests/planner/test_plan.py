"""A plan's own checks, and the slices that ranks get."""

from dataclasses import replace

import pytest

from dhp_ray.planner.errors import PlanError
from dhp_ray.planner.plan.cluster import ClusterSpec
from dhp_ray.planner.plan.types import Pack, Plan, Sample

SAMPLES = (Sample("a", 30), Sample("b", 2, 8, ((1, 4, 4), (1, 4, 4))), Sample("c", 15))
GROUPS = (Pack((0, 1), (0,), 1.0), Pack((2,), (1,), 0.5, encoders=(2, 2)),
          Pack((1, 2), (2,), 0.2))
PLAN = Plan("dhp", "step", ClusterSpec(3, 3, 15), SAMPLES, GROUPS, 1.2, 1.0)


def test_a_sound_plan_passes():
    PLAN.validate()
    replace(PLAN, sync="micro_batch", groups=(*GROUPS[:2], replace(GROUPS[2], micro_batch=1))).validate()


@pytest.mark.parametrize(("change", "message"), [
    ({"groups": GROUPS[:2]}, "2 placements for 3 sequences"), ({"groups": (*GROUPS, GROUPS[0])}, "4 placements for 3"),
    ({"groups": (*GROUPS[:2], replace(GROUPS[2], sequences=(0,)))}, "each must run exactly once"),
    ({"groups": (*GROUPS[:2], replace(GROUPS[2], sequences=(3,)))}, "each must run exactly once"),
    ({"groups": (*GROUPS[:2], replace(GROUPS[2], ranks=(1, 3)))},
     r"group 2 has ranks \(1, 3\); each must be one of 3, once"),
    ({"groups": (*GROUPS[:2], replace(GROUPS[2], ranks=(1, 1)))}, r"group 2 has ranks \(1, 1\)"),
    ({"groups": (*GROUPS[:2], replace(GROUPS[2], ranks=(-1, 1)))}, r"group 2 has ranks \(-1, 1\)"),
    ({"groups": (*GROUPS[:2], replace(GROUPS[2], ranks=()))}, r"group 2 has ranks \(\)"),
    ({"cluster": ClusterSpec(3, 3, 14)}, "group 0 holds 30 tokens on 2 ranks of 14 tokens"),
    ({"groups": (GROUPS[0], replace(GROUPS[1], encoders=(2,)), GROUPS[2])},
     r"group 1 has 2 images and encoders \(2,\)"),
    ({"groups": (GROUPS[0], replace(GROUPS[1], encoders=(2, 1)), GROUPS[2])},
     r"group 1 has 2 images and encoders \(2, 1\)"),
    ({"groups": (replace(GROUPS[0], encoders=(0,)), *GROUPS[1:])}, "group 0 has 0 images"),
    ({"sync": "micro_batch"}, "rank 1 runs twice in micro-batch 0"),
    ({"sync": "micro_batch", "groups": (replace(GROUPS[0], micro_batch=1), *GROUPS[1:])},
     "micro-batches out of order")])
def test_an_unsound_plan_is_refused(change, message):
    with pytest.raises(PlanError, match=message):
        replace(PLAN, **change).validate()


def test_every_rank_gets_its_slice():
    slices = PLAN.rank_plans(7)
    assert slices == [PLAN.rank_plan(7, rank) for rank in range(3)]
    assert [[pack.index for pack in found.packs] for found in slices] == [[0], [0, 2], [1, 2]]
    assert {found.process_groups for found in slices} == {((0, 1), (1, 2))}
    assert slices[2].packs[0].samples == (SAMPLES[1],)
    assert slices[0].micro_batches == ()
    micro_batched = replace(PLAN, sync="micro_batch", groups=(*GROUPS[:2], replace(GROUPS[2], micro_batch=4)))
    assert [[pack.micro_batch for pack in found.packs]
            for found in micro_batched.rank_plans(7)] == [[0], [0, 1], [0, 1]]
    known = micro_batched.rank_plan(7, 0).micro_batches
    assert [each.encodes for each in known] == [True, False]
    assert [each.most_tokens for each in known] == [
        max(-(-sum(SAMPLES[row].num_tokens for row in group.sequences) // group.degree) for group in groups)
        for groups in (GROUPS[:2], GROUPS[2:])]
