"""What the repeats of a pack say, and fits to worlds of known costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from dhp_ray.measure.fitting import (
    Fit,
    MeasureError,
    Observations,
    PackSeconds,
    fit_compute,
    fit_links,
    fit_ring,
    fixed_of_micro_batch,
    observed,
)
from dhp_ray.measure.rounds import PartResult, Spec
from dhp_ray.planner.cost.work import IMAGES, TERMS
from dhp_ray.train.results import PackTime
from tests.measure.known_world import FIRST_MESSAGE_S, GATHER_S, REPEATS, TRUE, UPDATE_S, results_of, spec

FULL = spec(sizes=spec().sizes._replace(max_tokens=4096, grids=((1, 4, 4), (1, 8, 12), (1, 32, 32))))


def seen(noise: float = 0.0, seed: int = 0) -> Observations:
    return observed(FULL, results_of(FULL, noise, seed))  # type: ignore[arg-type]


def alone(found: Observations) -> list:
    return [pack for pack in found.packs if pack.degree == 1]


def test_without_noise_the_true_constants_are_found() -> None:
    found = fit_compute(alone(seen()))
    assert found.constants == pytest.approx({name: getattr(TRUE, name) for name in TERMS}, rel=1e-6)
    assert found.relative_errors.max() < 1e-6


@pytest.mark.parametrize("seed", range(3))
def test_with_noise_they_are_near(seed: int) -> None:
    found = fit_compute(alone(seen(0.05, seed=seed)))
    for name in ("quadratic_s", "linear_s", "pack_s"):
        assert found.constants[name] == pytest.approx(getattr(TRUE, name), rel=0.2)
    assert 0.005 < np.median(found.relative_errors) < 0.05
    assert set(found.errors) == set(TERMS)
    assert all(0 < error < 0.1 for error in found.errors.values())


def test_packs_that_take_no_longer_for_more_tokens_are_refused_in_one_line() -> None:
    packs = [replace(pack, busy_s=1.0 / pack.tokens) for pack in alone(seen())]
    with pytest.raises(MeasureError) as caught:
        fit_compute(packs)
    assert str(caught.value) == (f"{len(packs)} packs were measured, and those of more tokens took no longer; allowed: "
                                 "packs that do, as on a machine that others use less")


def test_the_same_measurements_give_the_same_fit() -> None:
    first, second = (fit_compute(alone(seen(0.05))) for _ in range(2))
    assert first.constants == second.constants


def test_too_few_packs_are_refused_in_one_line() -> None:
    with pytest.raises(MeasureError, match=r"^5 different packs were measured; allowed: at least 9 for the 6 constan"):
        fit_compute(alone(seen())[-5:])


def test_what_is_paid_once() -> None:
    found = seen()
    assert found.fixed_s == pytest.approx(TRUE.fixed_s, abs=1e-9)
    of_micro_batches = FULL.__class__(**{**vars(FULL), "sync": "micro_batch"})
    in_step = observed(of_micro_batches, results_of(of_micro_batches))  # type: ignore[arg-type]
    assert fixed_of_micro_batch(in_step.packs, fit_compute(alone(found))) == pytest.approx(GATHER_S, abs=1e-6)
    assert in_step.fixed_s == pytest.approx(UPDATE_S, abs=1e-9)


def test_links_and_rings() -> None:
    """A ring that waits for all that it exchanges, on links of two kinds."""
    both = FULL.__class__(**{**vars(FULL), "nodes": (0, 0, 1, 1)})
    results = results_of(both)
    found = observed(both, results)  # type: ignore[arg-type]
    links = fit_links([result.exchanged for result in results["exchanges"]])
    assert (links.intra, links.inter) == (pytest.approx({2: 5e8}), pytest.approx({2: 1e8}))
    ring = fit_ring([pack for pack in found.packs if pack.degree > 1], fit_compute(alone(found)),
                    TRUE.comm_bytes_per_token, links)
    assert (ring.constants["slowness"], ring.constants["overlap"]) == (1.0, 0.0)
    assert ring.constants["latency_s"] == pytest.approx(TRUE.latency_s, rel=0.05)
    assert np.abs(ring.predicted / ring.measured - 1).max() < 0.02
    assert FIRST_MESSAGE_S > 0  # no part of a bandwidth


Seen = tuple[float, float]
"""Seconds of a member in one repeat: compute and waiting."""


def seen_of(of: Spec, part: str, seen: Callable[[int, int], Seen]) -> Observations:
    """Of a part whose every pack takes `seen(rank, repeat)`."""
    def timing(pack: PackTime, rank: int, repeat: int) -> PackTime:
        busy_s, blocked_s = seen(rank, repeat)
        return PackTime(pack.index, 0.0, busy_s + blocked_s, blocked_s)

    found = [PartResult([[step._replace(packs=tuple(timing(pack, rank, repeat) for pack in step.packs))
                          for repeat, step in enumerate(round_)] for round_ in result.rounds])
             for rank, result in enumerate(results_of(of)[part])]
    return observed(of, {part: found})


def test_the_median_of_repeats_counts_and_their_spread_is_known() -> None:
    """A slow first pass is one of several."""
    found = seen_of(spec(), "rings", lambda rank, repeat: (1.0 if repeat < 3 else 1.2, 0.5 if repeat < 2 else 0.2))
    assert len(found.packs) > 3
    assert all(pack.together_s == pytest.approx(1.4) for pack in found.packs)
    assert all(pack.busy_s == 1.0 for pack in found.packs)
    assert found.spreads == pytest.approx([0.2] * len(found.spreads))
    assert found.num_repeats == REPEATS * len(found.spreads) > 0


def test_a_pack_takes_the_busiest_member_of_every_repeat() -> None:
    """Each member has one compute second in most repeats, but in most repeats one of them has 1.2."""
    busy_s = ([1.2, 1.0, 1.0, 1.0, 1.2], [1.0, 1.0, 1.2, 1.2, 1.0])
    assert len(busy_s[0]) == REPEATS
    packs = seen_of(spec(), "rings", lambda rank, repeat: (
        busy_s[rank][repeat], max(busy_s[0][repeat], busy_s[1][repeat]) + 0.1 - busy_s[rank][repeat])).packs
    assert all(pack.busy_s == 1.0 for pack in packs)
    assert all(pack.together_s == pytest.approx(1.3) for pack in packs)


def test_the_compute_of_a_pack_is_that_of_one_member() -> None:
    """One member has the larger image, the other one the more patches."""
    amounts = np.zeros((2, len(TERMS)))
    amounts[:, IMAGES] = [[1024.0**2, 1024.0, 1.0], [3 * 400.0**2, 1200.0, 1.0]]
    pack = PackSeconds(2, False, 100.0, amounts, 0.07, 0.07, 0.07)
    constants = np.zeros(len(TERMS))
    constants[IMAGES] = [1e-8, 5e-5, 0.0]
    fit = Fit(dict(zip(TERMS, constants.tolist())), {}, np.zeros(0), np.zeros(0))
    assert fit.seconds(pack) == pytest.approx(3 * 400.0**2 * 1e-8 + 1200 * 5e-5)
    assert fit.seconds(replace(pack, amounts=amounts[:1])) == pytest.approx(1024.0**2 * 1e-8 + 1024 * 5e-5)
