"""benchmarks/disjoint.py: what it says disjoint could gain at most."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks.disjoint import BEFORE, disjoint_s, packs_s, planned_s, row, tokens_without_images
from benchmarks.encoder_cases import batch, cluster_and_cost
from dhp_ray.planner import ClusterSpec, CostModel, Sample, plan_batch
from tests.readme import ROOT

ALONE = CostModel(0.0, 1.0, 0.0, 0.5, {2: 1e9}, vision_linear_s=1.0, latency_s=3.0, memory_bytes_per_token=2.0,
                  language_bytes_per_token=1.0)
"""A second a token and a patch, and half a second once; groups of several ranks do not pay."""


def test_the_best_share() -> None:
    """Twelve sequences of 2 s and 24 images of 1 s: two of four ranks encode for 12 s while the others run 12 s."""
    samples = [Sample(str(row), 1, 1, ((1, 1, 1),) * 2) for row in range(12)]
    seconds, encoding = disjoint_s(samples, ClusterSpec(4, 4, 100), ALONE)
    assert (seconds, encoding) == (pytest.approx(12.5), 2)
    assert planned_s(samples, ClusterSpec(4, 4, 100), ALONE) == pytest.approx(12.5)


@pytest.mark.parametrize("kind", ["text", "image"])
def test_it_is_the_best_of_all_shares_and_below_no_bound(kind: str) -> None:
    cluster, cost = cluster_and_cost("3B", 8, recomputes=True)
    samples = batch(kind, 64, 0)
    images_s = sum(seconds for sample in samples for seconds in cost.image_s(sample))
    tokens = tokens_without_images(cluster, cost)
    shares = [max(images_s / each + cost.fixed_s, packs_s(samples, 8 - each, tokens, cost)) for each in range(1, 8)]
    assert tokens > cluster.tokens_per_rank
    assert min(shares) == pytest.approx(disjoint_s(samples, cluster, cost)[0])
    assert planned_s(samples, cluster, cost) >= disjoint_s(samples, cluster, cost)[0]


def test_auto_has_the_groups_of_the_batches_before() -> None:
    cluster, cost = cluster_and_cost("3B", 8, recomputes=True)
    batches, pool = [batch("text", 64, seed) for seed in range(BEFORE + 1)], list[tuple[int, ...]]()
    for samples in batches:
        plan = plan_batch(samples, cluster, cost, encoder="auto", pool=pool)
        pool = list(dict.fromkeys((*pool, *plan.process_groups())))
    assert pool
    assert row(batches, cluster, cost)[0] == f"{plan.predicted_time_s:.2f}"


def test_the_command_runs_in_a_checkout() -> None:
    found = subprocess.run([sys.executable, "benchmarks/disjoint.py", "512"], cwd=ROOT, capture_output=True, text=True)
    assert (found.returncode, found.stderr) == (2, "disjoint.py: 512: allowed: no argument\n")
