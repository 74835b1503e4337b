"""benchmarks/encoder.py: what its tables are made of, in small cases."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.encoder import LAYOUTS, balance_of, main
from benchmarks.encoder_cases import KINDS, batch, cluster_and_cost
from benchmarks.encoder_exact import fit, proven_s
from dhp_ray.planner import ClusterSpec, CostModel, Plan, Sample, plan_batch, plan_starts
from dhp_ray.planner.plan.types import Pack, VisionPlan
from tests.planner.reference_encoder import timeline
from tests.readme import ROOT

ALONE = CostModel(0.0, 1.0, 0.0, 0.0, {2: 1e9}, vision_linear_s=1.0)
"""A second a token and a patch."""
SAMPLES = (Sample("a", 4, 6, ((1, 4, 4), (1, 2, 4))), Sample("b", 5, 1, ((1, 2, 2),)))


def listed(encoders_of_a: tuple[int, int], encoder_of_b: int, b_first: bool = False) -> Plan:
    """Sample a on ranks 0 and 1, b on rank 2."""
    groups = (Pack((0, 1), (0,), 5.0, encoders=encoders_of_a),
              Pack((2,), (1,), 6.0, encoders=(encoder_of_b,)))
    plan = Plan("listed", "step", ClusterSpec(3, 3, 10), SAMPLES, groups[::-1] if b_first else groups, 6.0, 6.0,
                vision=VisionPlan("world"))
    plan.validate()
    return plan


def test_the_fullest_rank() -> None:
    """Images of 16, 8 and 4 seconds: the mean is 9.3, the largest 16."""
    assert balance_of(listed((0, 1), 2), ALONE, prove=True) == (1.0, 1.0)
    assert balance_of(listed((2, 2), 2), ALONE).ratio == 28 / 16


@pytest.mark.parametrize("kind", ["image", "video", "mixed"])
def test_images_apart_are_balanced(kind: str) -> None:
    cluster, cost = cluster_and_cost(8)
    assert balance_of(plan_batch(batch(kind, 128, 0), cluster, cost, encoder="world"), cost).ratio <= 1.01


def test_what_no_assignment_is_below() -> None:
    """Images of 5, 4, 4 and 3 s on two ranks: 8 s each. Three of 4 s: 8 s, though the mean is 6."""
    pytest.importorskip("ortools", reason="OR-tools is in the dev extra")
    assert fit(np.array([5.0, 4.0, 4.0, 3.0]), 2, 8.0)
    assert proven_s(np.array([5.0, 4.0, 4.0, 3.0]), 2, 9.0) == 8.0
    assert proven_s(np.array([4.0, 4.0, 4.0]), 2, 8.0) == pytest.approx(8.0, rel=2e-3)


@pytest.mark.parametrize(("kind", "num_ranks", "size", "seed"), [
    ("text", 8, 8, 2), ("video", 8, 1, 1), ("video", 16, 1, 1), ("image", 8, 1, 1)])
def test_images_apart_are_balanced_as_well_as_whole_images_can_be(
    kind: str, num_ranks: int, size: int, seed: int
) -> None:
    """In these batches longest first alone came to 1.07 to 1.09."""
    cluster, cost = cluster_and_cost(num_ranks)
    plan = plan_batch(batch(kind, size * num_ranks, seed), cluster, cost, encoder="world")
    ratio = balance_of(plan, cost).ratio
    assert ratio <= 1.05 or ratio <= balance_of(plan, cost, prove=True).least * 1.002


@pytest.mark.parametrize("kind", KINDS)
def test_predicted_makespans_are_those_of_the_plain_timeline(kind: str) -> None:
    cluster, cost = cluster_and_cost(8)
    slowed = ClusterSpec(8, 4, cluster.tokens_per_rank, (0.5, 1.0, 0.75, 1.0) * 2)
    samples, frozen = batch(kind, 64, 0), replace(cost, vision_forward=1.0)
    group, world = (plan_batch(samples, slowed, cost, encoder=layout) for layout in LAYOUTS)
    assert world.vision.apart
    again = replace(world, vision=VisionPlan("world", keeps=False))
    again = replace(again, predicted_time_s=plan_starts(again)[1])
    for plan in (group, world, again):
        assert timeline(plan, cost) == pytest.approx(plan.predicted_time_s, rel=1e-12)
    plan = plan_batch(samples, slowed, frozen, encoder="world")
    assert timeline(plan, frozen) == pytest.approx(plan.predicted_time_s, rel=1e-12)


def test_a_plain_timeline() -> None:
    """Rank 0 encodes 16 s, rank 1 8 s, rank 2 4 s, a third of it before packs of 5 and 6 s."""
    plan = listed((0, 1), 2)
    assert timeline(plan, ALONE) == pytest.approx(16 / 3 + 5 + 2 * 16 / 3)
    assert timeline(plan, ALONE, lambda kind, number: 2.0 if (kind, number) == ("image", 0) else 1.0) == pytest.approx(
        32 / 3 + 5 + 2 * 32 / 3)
    assert timeline(plan, ALONE, lambda kind, number: 10.0 if (kind, number) == ("pack", 1) else 1.0) == pytest.approx(
        4 / 3 + 60 + 2 * 4 / 3)


def test_costs_vary_alike_in_every_plan() -> None:
    """Whatever the order of its groups."""
    asked: dict[bool, dict[tuple[str, int], int]] = {False: {}, True: {}}
    for b_first, counts in asked.items():
        def varied(kind: str, number: int, counts: dict[tuple[str, int], int] = counts) -> float:
            counts[kind, number] = counts.get((kind, number), 0) + 1
            return 1.0 + number / 10 if kind == "image" else 1.0

        assert timeline(listed((0, 1), 2, b_first), ALONE, varied) == pytest.approx(16 / 3 + 5 + 2 * 16 / 3)
    assert asked[False] == asked[True] == {("image", 0): 1, ("image", 1): 1, ("image", 2): 1, ("pack", 0): 1,
                                           ("pack", 1): 1}


def test_costs_that_do_not_vary_leave_the_prediction() -> None:
    cluster, cost = cluster_and_cost(8)
    for layout in LAYOUTS:
        plan = plan_batch(batch("mixed", 32, 0), cluster, cost, encoder=layout)
        assert timeline(plan, cost, lambda kind, number: 1.0) == pytest.approx(plan.predicted_time_s)


def test_help_names_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "python benchmarks/encoder.py balance " in capsys.readouterr().out


def test_a_table_that_there_is_not_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sometimes"]) == 2
    assert capsys.readouterr().err == "encoder.py: sometimes: allowed: balance\n"


@pytest.mark.slow
def test_the_command_runs_in_a_checkout() -> None:
    found = subprocess.run([sys.executable, "benchmarks/encoder.py", "sometimes"], cwd=ROOT, capture_output=True,
                           text=True)
    assert (found.returncode, found.stderr) == (2, "encoder.py: sometimes: allowed: balance\n")
