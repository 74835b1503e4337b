"""What the repeats of a pack say, and what its members take together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from dhp_ray.measure.fitting import Fit
from dhp_ray.measure.observations import Observations, PackSeconds, observed
from dhp_ray.measure.rounds import Spec
from dhp_ray.measure.timings import PackTiming, PartResult
from dhp_ray.planner.work import IMAGES, TERMS
from tests.measure.known_world import REPEATS, results_of
from tests.measure.specs import spec

Seen = tuple[float, float]
"""Seconds of a member in one repeat: compute and waiting."""


def seen_of(of: Spec, part: str, seen: Callable[[int, int], Seen]) -> Observations:
    """Of a part whose every pack takes `seen(rank, repeat)`."""
    def timing(pack: PackTiming, rank: int, repeat: int) -> PackTiming:
        busy_s, blocked_s = seen(rank, repeat)
        return PackTiming(pack.group, busy_s, blocked_s, 0.0, busy_s + blocked_s)

    found = [PartResult([[step._replace(packs=tuple(timing(pack, rank, repeat) for pack in step.packs))
                          for repeat, step in enumerate(round_)] for round_ in result.rounds])
             for rank, result in enumerate(results_of(of)[part])]
    return observed(of, {part: found})


def test_the_median_of_repeats_counts_and_their_spread_is_known() -> None:
    """A slow first pass is one of several."""
    found = seen_of(spec(), "rings", lambda rank, repeat: (1.0 if repeat < 3 else 1.2, 0.5 if repeat < 2 else 0.2))
    assert len(found.packs) > 3
    assert all(pack.exposed_s == pytest.approx(0.4) for pack in found.packs)
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
    assert all(pack.busy_s + pack.exposed_s == pytest.approx(1.3) for pack in packs)


def test_the_compute_of_a_pack_is_that_of_one_member() -> None:
    """One member has the larger image, the other one the more patches."""
    amounts = np.zeros((2, len(TERMS)))
    amounts[:, IMAGES] = [[1024.0**2, 1024.0, 1.0], [3 * 400.0**2, 1200.0, 1.0]]
    pack = PackSeconds("rings", 2, False, np.array([100.0]), amounts, 0.07, 0.0, 0.07)
    constants = np.zeros(len(TERMS))
    constants[IMAGES] = [1e-8, 5e-5, 0.0]
    fit = Fit(dict(zip(TERMS, constants.tolist())), {}, np.zeros(0), np.zeros(0))
    assert fit.seconds(pack) == pytest.approx(3 * 400.0**2 * 1e-8 + 1200 * 5e-5)
    assert fit.seconds(replace(pack, amounts=amounts[:1])) == pytest.approx(1024.0**2 * 1e-8 + 1024 * 5e-5)
