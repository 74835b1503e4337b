"""How much of a step planning takes of a batch that is not small, for exchanges between packs; and what that brings."""

import sys
from dataclasses import replace

import numpy as np
import pytest
from test_dhp import ALL_TO_ALL

from dhp_ray.planner import ClusterSpec, Sample, plan_batch
from dhp_ray.planner.parts import EFFORT

CAPTIONS = [Sample(str(row), int(length)) for row, length in enumerate(
    np.clip(np.random.default_rng(3).normal(600, 120, 256), 100, 1000))]
"""Four for each of 64 ranks, which hold one at a time, or two short ones."""


def captions_at(speed, sync, planner="dhp", count=256):
    """Planned for devices so many times as fast as those whose steps take 1.0 s."""
    cost = replace(ALL_TO_ALL, quadratic_s=ALL_TO_ALL.quadratic_s / speed, linear_s=ALL_TO_ALL.linear_s / speed,
                   pack_s=0.1 / speed, fixed_s=0.1 / speed)
    return plan_batch(CAPTIONS[:count], ClusterSpec(64, 8, 1000), cost, planner=planner, sync=sync)


@pytest.mark.parametrize("sync", ["step", "micro_batch"])
def test_a_larger_batch_far_from_the_bound_is_never_behind_a_tuned_baseline(sync):
    """With packs of one rank and more it was 6 % behind `static_best` in step, 8 % in micro_batch."""
    names = ("static_best", "pow2", "dhp_paper", "megatron")
    best_s = min(captions_at(1.0, sync, name).predicted_time_s for name in names)
    assert captions_at(1.0, sync).predicted_time_s <= best_s * (1 + 1e-9)


@pytest.mark.parametrize(("speed", "count", "efforts"), [
    (1e-6, 256, [EFFORT] * 3), (1e-6, 128, [EFFORT] * 3), (100.0, 128, [EFFORT] * 3), (1.0, 256, None),
    (1000.0, 256, None)])
def test_exchanges_are_compared_for_a_share_of_the_step_if_the_batch_is_not_small(monkeypatch, speed, count, efforts):
    """In the three shortest schedules, the shortest first."""
    module, seen = sys.modules["dhp_ray.planner.dhp"], []
    exchanges = module.with_exchanges

    def watched(problem, schedule, effort):
        after, compared = exchanges(problem, schedule, effort)
        seen.append((module.time_of(problem, schedule), effort, compared))
        return after, compared

    monkeypatch.setattr(module, "with_exchanges", watched)
    captions_at(speed, "micro_batch", count=count)
    assert [before_s for before_s, *_ in seen] == sorted(before_s for before_s, *_ in seen)
    if efforts:
        assert [effort for _, effort, _ in seen] == efforts
        return
    left = module.EXCHANGING * seen[0][0] / module.COMPARED_S
    for _, effort, compared in seen:
        assert 0.0 < effort == pytest.approx(min(left, EFFORT))
        left -= compared
    assert len(seen) == 3 or left <= 0.0
    assert len(seen) == 3 or speed == 1000.0
