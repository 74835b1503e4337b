"""Fits what rings take in addition to their share of the compute: bandwidth, seconds of a ring's step, and the overlap.

    a message      seconds = waiting + bytes / bandwidth                 fitted to exchanges alone, by degree and link
    a pack's ring  seconds - compute / d = latency_s (d - 1) + max(0, slowness (d - 1) bytes / d / bandwidth
                                                                      - overlap (d - 1) / d * attention / d)

`slowness`, at least 1, is the time of an exchange beside compute over its time alone, with all else that a ring does
for each token that travels (it merges outputs, and adds up gradients in fp32); the bandwidths in the file are already
divided by it. With sync=micro_batch a ring's messages queue behind those that gather parameters, so `latency_s` is
fitted for each mode.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dhp_ray.measure.fitting import Fit
from dhp_ray.measure.observations import PackSeconds
from dhp_ray.measure.timings import Exchanged
from dhp_ray.planner.least_squares import bounded_least_squares, weighted_median

SLOWNESS = np.geomspace(1.0, 32.0, 41)
OVERLAP = np.linspace(0.0, 1.0, 21)
AS_GOOD = 1.05
"""Points of the grid with an error of up to this many times the least error count as equally good."""


class Links(NamedTuple):
    """Bytes per second by degree, inside nodes and across them (empty: not measured)."""

    intra: dict[int, float]
    inter: dict[int, float]


class Ring(NamedTuple):
    """`slowness`, `overlap` and `latency_s` as above, and the predicted and measured seconds of each pack."""

    slowness: float
    overlap: float
    latency_s: float
    predicted: np.ndarray
    measured: np.ndarray


def fit_links(by_rank: Sequence[Sequence[Exchanged]]) -> Links:
    """Fit bandwidths to the median message times of all ranks in each kind of ring."""
    tables: dict[bool, dict[int, float]] = {False: {}, True: {}}
    kinds = sorted({(ring.across, ring.degree) for rings in by_rank for ring in rings})
    for across, degree in kinds:
        alike = [ring.seconds for rings in by_rank for ring in rings if (ring.across, ring.degree) == (across, degree)]
        size, seconds = np.array([point for ring in alike for point in ring.items()], dtype=np.float64).T
        found = bounded_least_squares(np.stack([1.0 / seconds, size / seconds], 1), np.ones(len(size)))
        tables[across][degree] = 1.0 / max(float(found[1]), 1e-15)
    return Links(tables[False], tables[True])


class RingSeconds(NamedTuple):
    """One entry for each pack on several ranks: its degree, its measured seconds, and predicted parts of them: the
    compute of one rank, the transfer at the bandwidth of exchanges alone, and the attention that can hide the transfer.
    """

    degree: np.ndarray
    whole: np.ndarray
    compute: np.ndarray
    transfer: np.ndarray
    hidden: np.ndarray

    def exposed(self, slowness: float, overlap: float) -> np.ndarray:
        found: np.ndarray = np.maximum(0.0, slowness * self.transfer - overlap * self.hidden)
        return found

    def latency(self, slowness: float, overlap: float) -> tuple[float, float]:
        """Return (weighted median of the remaining seconds of a ring's step, sum of the relative errors of all packs).
        """
        left = self.whole - self.compute - self.exposed(slowness, overlap)
        latency = max(0.0, weighted_median(left / (self.degree - 1), (self.degree - 1) / self.whole))
        return latency, float((np.abs(left - latency * (self.degree - 1)) / self.whole).sum())


def ring_seconds(
    packs: Sequence[PackSeconds], known: Fit, bytes_per_token: float, links: Links, gathers_s: float | None = None
) -> RingSeconds:
    """The entries of packs whose compute is fitted (`known`). `gathers_s`: seconds that a micro-batch takes in addition
    to its packs; None: sync=step.
    """
    degree = np.array([pack.degree for pack in packs], dtype=np.float64)
    whole = np.array([pack.busy_s + pack.exposed_s if gathers_s is None else max(pack.busy_s, pack.whole_s - gathers_s)
                      for pack in packs])
    bandwidth = np.array([(links.inter if pack.across else links.intra)[pack.degree] for pack in packs])
    transfer = (degree - 1) / degree * bytes_per_token * np.array([pack.tokens for pack in packs]) / bandwidth
    # attention in one rank's share of the pack
    attention = known.constants["quadratic_s"] * np.array([pack.amounts_at(known.block)[0, 0] for pack in packs])
    return RingSeconds(degree, whole, np.array([known.seconds(pack) for pack in packs]), transfer,
                       (degree - 1) / degree * attention)


def fit_ring(seen: RingSeconds) -> Ring:
    """Take the grid point with the least slowness, then the least overlap, of those that are as good as the best one.
    """
    points = []
    for slowness in SLOWNESS.tolist():
        for overlap in OVERLAP.tolist():
            latency, off = seen.latency(slowness, overlap)
            points.append((off, slowness, overlap, latency))
    least = min(off for off, *_ in points)
    _, slowness, overlap, latency = next(point for point in points if point[0] <= AS_GOOD * least + 1e-12)
    predicted = seen.compute + seen.exposed(slowness, overlap) + latency * (seen.degree - 1)
    return Ring(slowness, overlap, latency, predicted, seen.whole)


def fit_latency(seen: RingSeconds, ring: Ring) -> float:
    """Fit the seconds of a ring's step in the other mode; slowness and overlap are those of `ring`."""
    return seen.latency(ring.slowness, ring.overlap)[0]
