"""Fits to worlds of known costs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dhp_ray.measure.communication import fit_links, fit_ring, ring_seconds
from dhp_ray.measure.fitting import fit_compute, fixed_of_micro_batch, fixed_of_step, forward_share
from dhp_ray.measure.observations import MeasureError, Observations, observed
from dhp_ray.planner.work import TERMS
from tests.measure.known_world import FIRST_MESSAGE_S, GATHER_S, TRUE, UPDATE_S, results_of
from tests.measure.specs import spec

FULL = spec(quick=False, sizes=spec().sizes._replace(max_tokens=4096, grids=((1, 4, 4), (1, 8, 12), (1, 32, 32))))


def seen(noise: float = 0.0, seed: int = 0) -> Observations:
    return observed(FULL, results_of(FULL, noise, seed))  # type: ignore[arg-type]


def alone(found: Observations) -> list:
    return [pack for pack in found.packs if pack.degree == 1]


def test_without_noise_the_true_constants_are_found() -> None:
    found = fit_compute(alone(seen()))
    assert found.block == 512
    assert found.constants == pytest.approx({name: getattr(TRUE, name) for name in TERMS}, rel=1e-6)
    assert found.relative_errors.max() < 1e-6
    assert found.left_out == 0


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


def test_what_is_far_off_is_left_out_and_counted() -> None:
    packs = alone(seen(0.01))
    packs[3] = packs[3].__class__(**{**vars(packs[3]), "busy_s": 3 * packs[3].busy_s})
    found = fit_compute(packs)
    assert found.left_out == 1
    assert found.constants["linear_s"] == pytest.approx(TRUE.linear_s, rel=0.05)


def test_too_few_packs_are_refused_in_one_line() -> None:
    with pytest.raises(MeasureError, match=r"^5 different packs were measured; allowed: at least 9 for the 6 constan"):
        fit_compute(alone(seen())[-5:])


def test_the_share_of_the_forward_pass_and_what_is_paid_once() -> None:
    found = seen()
    assert forward_share(found) == pytest.approx(TRUE.vision_forward)
    assert fixed_of_step(found) == pytest.approx(TRUE.fixed_s, abs=1e-9)
    assert forward_share(Observations()) is None
    of_micro_batches = FULL.__class__(**{**vars(FULL), "sync": "micro_batch"})
    in_step = observed(of_micro_batches, results_of(of_micro_batches))  # type: ignore[arg-type]
    assert fixed_of_micro_batch(in_step, fit_compute(alone(found))) == pytest.approx(GATHER_S, abs=1e-6)
    assert fixed_of_step(in_step) == pytest.approx(UPDATE_S, abs=1e-9)


def test_links_and_rings() -> None:
    """A ring that waits for all that it exchanges, on links of two kinds."""
    both = FULL.__class__(**{**vars(FULL), "nodes": (0, 0, 1, 1)})
    results = results_of(both)
    found = observed(both, results)  # type: ignore[arg-type]
    links = fit_links([result.exchanged for result in results["exchanges"]])
    assert (links.intra, links.inter) == (pytest.approx({2: 5e8}), pytest.approx({2: 1e8}))
    ring = fit_ring(ring_seconds([pack for pack in found.packs if pack.degree > 1], fit_compute(alone(found)),
                                 TRUE.comm_bytes_per_token, links))
    assert (ring.slowness, ring.overlap) == (1.0, 0.0)
    assert ring.latency_s == pytest.approx(TRUE.latency_s, rel=0.05)
    assert np.abs(ring.predicted / ring.measured - 1).max() < 0.02
    assert FIRST_MESSAGE_S > 0  # no part of a bandwidth
