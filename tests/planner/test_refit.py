"""Refits on worlds whose true costs are known: they find them where packs can tell, and never get lost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pytest

from dhp_ray.planner import ClusterSpec, CostModel, Sample, plan_batch
from dhp_ray.planner.cost.refit import FAR, FEWEST, STEP, Observed, refit, slowness_of, with_factors
from dhp_ray.planner.cost.work import TERMS, work_of

PRIOR = CostModel(4e-8, 5e-5, 4608, 0.01, {2: 1e9}, communication="ring", latency_s=2e-3, pack_s=5e-3,
                  vision_quadratic_s=2e-8, vision_linear_s=2e-5, encoder_pass_s=3e-3, attention_block=512)
MIXED = {"quadratic_s": 3.0, "linear_s": 0.7, "vision_quadratic_s": 0.5, "vision_linear_s": 4.0, "pack_s": 2.0}


class World(NamedTuple):
    """By step the typical errors of what was planned with, against what packs take without noise; the last factors;
    the steps after which costs changed, and the largest change of any of them.
    """

    errors: list[float]
    factors: dict[str, float]
    changed: list[int]
    largest_change: float


def batch(draw: np.random.Generator, size: int) -> list[Sample]:
    samples = []
    for row in range(size):
        grids = tuple((1, 2 * int(draw.integers(4, 20)), 2 * int(draw.integers(4, 20)))
                      for _ in range(int(draw.integers(0, 4)))) if draw.random() < 0.6 else ()
        text = int(np.clip(np.exp(draw.normal(5.3, 1)), 16, 3000))
        samples.append(Sample(str(row), text, sum(t * h * w for t, h, w in grids) // 4, grids))
    return samples


def world(
    true: Mapping[str, float], noise: float = 0.02, slowness: Mapping[int, float] | None = None, num_ranks: int = 4,
    sync: str = "step", outliers: float = 0.0, seed: int = 1, steps: int = 16, planner: str = "dhp",
) -> World:
    """A run of so many steps whose packs take what true factors say, ranks as slow as `slowness` says."""
    draw, real = np.random.default_rng(seed), with_factors(PRIOR, dict(true))
    factors: dict[str, float] = {}
    window: list[Observed] = []
    found = World([], factors, [], 1.0)
    for step in range(steps):
        cost = with_factors(PRIOR, factors)
        plan = plan_batch(batch(draw, 40), ClusterSpec(num_ranks, num_ranks, 2048), cost, planner=planner, sync=sync)
        work = work_of(plan)
        nominal_s = work.seconds(real)
        found.errors.append(float(np.median(np.abs(work.seconds(cost) / nominal_s - 1))))
        seconds = nominal_s * np.array([(slowness or {}).get(rank, 1.0) for rank in work.rank.tolist()])
        seconds *= np.exp(draw.normal(0, noise, len(seconds))) * np.where(draw.random(len(seconds)) < outliers, 4, 1)
        window = [*(seen._replace(weight=0.75 * seen.weight) for seen in window),
                  Observed(work.rank, work.amounts, seconds, np.ones(len(seconds)))][-16:]
        changed = refit(PRIOR, factors, Observed(*map(np.concatenate, zip(*window))))
        if changed:
            ratios = [changed.factors[name] / factors.get(name, 1.0) for name in TERMS]
            found.changed.append(step)
            found = found._replace(largest_change=max(found.largest_change, *ratios, *(1 / ratio for ratio in ratios)))
            assert changed.error_after < changed.error_before
            factors = changed.factors
    return found._replace(factors=factors)


by_planner = pytest.mark.parametrize("planner", ["dhp_paper", pytest.param("dhp", marks=pytest.mark.slow)])
"""`dhp` plans batches of 40 samples five times as long, to packs with the same terms."""


def by_mode(worlds: Mapping[str, Mapping[str, float]], *modes: object) -> list[Any]:
    """Each world in each of two modes; in make test in one of them, in turns."""
    return [pytest.param(true, mode, id=f"{name}-{mode}", marks=[pytest.mark.slow] if (row + column) % 2 else [])
            for row, (name, true) in enumerate(worlds.items()) for column, mode in enumerate(modes)]


@by_planner
@pytest.mark.parametrize(("true", "sync"), by_mode(
    {"fiftyfold": dict.fromkeys(TERMS, 50.0), "a fifth": dict.fromkeys(TERMS, 0.2), "mixed": MIXED,
     "attention": {"quadratic_s": 8.0}}, "step", "micro_batch"))
def test_wrong_costs_become_right_ones(true: Mapping[str, float], sync: str, planner: str) -> None:
    """Packs that are all alike do not tell two terms apart, so factors are the median of three worlds."""
    worlds = [world(true, sync=sync, seed=seed, planner=planner) for seed in (1, 2, 3)]
    for found in worlds:
        assert found.errors[0] > 0.3
        assert max(found.errors[-5:]) < 0.05
        assert found.largest_change <= STEP * (1 + 1e-9)
    for name in ("quadratic_s", "linear_s"):  # of which every pack has much
        assert np.median([found.factors[name] for found in worlds]) == pytest.approx(true.get(name, 1.0), rel=0.1)


@by_planner
@pytest.mark.parametrize(("true", "num_ranks"), by_mode(
    {"right": {}, "threefold": dict.fromkeys(TERMS, 3.0), "mixed": MIXED}, 2, 4))
def test_noise_outliers_and_a_slow_rank_lead_nowhere(
    true: Mapping[str, float], num_ranks: int, planner: str
) -> None:
    """20 % of noise, one pack in 33 four times as long, one rank three times as slow."""
    found = world(true, 0.2, {0: 3.0}, num_ranks, outliers=0.03, planner=planner)
    assert np.mean(found.errors[-8:]) < 0.15
    assert all(1 / FAR <= factor <= FAR for factor in found.factors.values())


def test_a_slow_rank_is_no_cost() -> None:
    found = world({}, 0.02, {1: 3.0})
    assert max(found.errors) < 0.03
    for name in ("quadratic_s", "linear_s", "pack_s"):
        assert 0.8 < found.factors.get(name, 1.0) < 1.2


def test_right_costs_stay() -> None:
    assert world({}, 0.0).changed == []


def test_what_no_pack_has_stays_and_what_packs_cannot_tell_apart_moves_together() -> None:
    """Packs of one kind, of text alone, that take three times as long."""
    amounts = np.tile([1e6, 1e3, 0.0, 0.0, 0.0, 1.0], (40, 1))
    seconds = 3.0 * (amounts @ [getattr(PRIOR, name) for name in TERMS])
    observed = Observed(np.arange(40) % 2, amounts, seconds, np.ones(40))
    factors: dict[str, float] = {}
    for _ in range(3):
        found = refit(PRIOR, factors, observed)
        if found is None:
            break
        factors = found.factors
    assert [factors[name] for name in ("quadratic_s", "linear_s", "pack_s")] == pytest.approx([3.0] * 3, rel=0.02)
    assert [factors[name] for name in TERMS[2:5]] == [1.0] * 3


def test_few_packs_and_those_without_a_time_change_nothing() -> None:
    amounts = np.tile([1e6, 1e3, 0.0, 0.0, 0.0, 1.0], (FEWEST, 1))
    seconds = 3.0 * (amounts @ [getattr(PRIOR, name) for name in TERMS])
    ranks = np.zeros(FEWEST, dtype=int)
    assert refit(PRIOR, {}, Observed(ranks, amounts, seconds, np.ones(FEWEST))) is not None
    seconds[0] = np.nan
    assert refit(PRIOR, {}, Observed(ranks, amounts, seconds, np.ones(FEWEST))) is None


def test_rows_without_a_price_do_not_count() -> None:
    """Phases of the encoder under a cost that has no terms of images."""
    priced = np.tile([1e6, 1e3, 0.0, 0.0, 0.0, 1.0], (FEWEST, 1))
    of_images = np.tile([0.0, 0.0, 1e6, 1e3, 1.0, 0.0], (2 * FEWEST, 1))
    seconds = np.concatenate([3.0 * (priced @ [getattr(PRIOR, name) for name in TERMS]), np.full(2 * FEWEST, 0.1)])
    amounts, prior = np.concatenate([priced, of_images]), CostModel(4e-8, 5e-5, 4608, 0.01, {2: 1e9}, pack_s=5e-3)
    found = refit(prior, {}, Observed(np.arange(len(seconds)) % 2, amounts, seconds, np.ones(len(seconds))))
    assert found is not None
    assert found.factors["linear_s"] == pytest.approx(STEP)


def test_slowness_is_beside_the_typical_rank() -> None:
    rows = Observed(np.array([0, 0, 1, 1, 2, 2]), np.ones((6, 6)), np.array([2.0, 2.0, 2.2, 2.2, 6.0, 8.0]),
                    np.ones(6))
    assert slowness_of(rows, np.ones(6)).tolist() == pytest.approx([1.0] * 4 + [6.0 / 2.2] * 2)
    assert slowness_of(rows, np.full(6, 2.0)).tolist() == pytest.approx([1.0] * 4 + [6.0 / 2.2] * 2)
