"""The makespans under which a micro-batch is filled (`filling`), and what its encoding may take of them."""

from __future__ import annotations

import numpy as np

from dhp_ray.planner.encoders import Images
from dhp_ray.planner.items import Items, time_s
from dhp_ray.planner.micro_batch.filling import Fastest, MicroBatch, fill_micro_batch, spans_nodes
from dhp_ray.planner.primitives.bisection import compiled_halve
from dhp_ray.planner.primitives.compiled import compiled

ENCODE_FACTORS = (0.0, 0.85, 0.9, 0.95, 1.0, 1.05, 1.1)
"""The shares of the makespan tried for encoding, as multiples of encoding's share of all remaining work; 0, which must
be the first: no separate limit, so that any item fits. If the rest of packs also includes communication, encoding needs
less than its share of the work; if images cannot be dealt out evenly, more.
"""


def encode_shares_of(items: Items, rows: np.ndarray) -> np.ndarray:
    """The shares of a makespan that encoding may take, as tried for these rows (ENCODE_FACTORS): all below 1."""
    vision_s = float(items.vision_s[rows].sum())
    if vision_s == 0.0:
        return np.zeros(1)
    shares = np.array(ENCODE_FACTORS) * vision_s / (vision_s + float(items.language_s[rows].sum()))
    return shares[shares < 1.0]


@compiled
def extremes_s(items: Items, item: int, ranks: Fastest) -> tuple[float, float]:
    """Seconds of an item alone: on the fewest ranks that it may have (if speeds are equal, on the last ranks, which may
    cross nodes), and on the best number of ranks.
    """
    num_ranks, rates, least_s = len(ranks.speed), ranks.machine.rates, np.inf
    least = ranks.degrees[items[item].minimum_degree]
    for degree in range(least, num_ranks + 1):
        if ranks.degrees[degree] > degree:
            continue
        alone_s = time_s(items[item], degree, spans_nodes(ranks, 0, degree), ranks.speed[degree - 1], rates[degree])
        least_s = min(least_s, alone_s)
    first = num_ranks - least if ranks.speed[0] == ranks.speed[-1] else 0
    alone_s = time_s(items[item], least, spans_nodes(ranks, first, least), ranks.speed[least - 1], rates[least])
    return alone_s * (1 + 1e-12), least_s * (1 + 1e-12)


@compiled
def trials(
    items: Items, images: Images, rest: np.ndarray, value: np.ndarray, count: int, span: float, longest_s: float,
    encode_shares: np.ndarray, ranks: Fastest,
) -> np.ndarray:
    """(at most 2 x count, 5), a row for each trial in which the first item fits: makespan and encode_share, and
    seconds, value and tokens of the micro-batch.

    Each makespan is tried with the first of `encode_shares` and one of the others, in turns. Makespans fall. Each is
    a time that a pack with the first item may take. The first one is that of similar items that fill the memory of its
    minimum degree, at most `longest_s`. The last one is `span` times less, or that of the item alone on its best degree
    if that is more. All are at least `gather_s`.
    """
    most_s, least_s = extremes_s(items, rest[0], ranks)
    most_s *= max(1.0, ranks.machine.tokens_per_rank * items[rest[0]].minimum_degree / items[rest[0]].tokens)
    most_s = max(least_s, min(most_s, longest_s))
    ratio = (max(least_s, most_s / span) / most_s) ** (1.0 / (count - 1))
    found, row = np.zeros((2 * count, 5)), 0
    for index in range(count):
        makespan = max(most_s * ratio**index, least_s, ranks.gather_s)
        for place in range(min(2, len(encode_shares))):
            encode_share = encode_shares[1 + index % (len(encode_shares) - 1) if place else 0]
            packed = fill_micro_batch(items, images, rest, value, makespan, encode_share, ranks, False)
            if packed.pack[0] >= 0:
                found[row, 0], found[row, 1], found[row, 2], found[row, 3], found[row, 4] = (
                    makespan,
                    encode_share,
                    packed.seconds,
                    packed.value,
                    packed.tokens,
                )
                row += 1
    return found[:row]


@compiled
def shortest_micro_batch(
    items: Items, images: Images, rows: np.ndarray, value: np.ndarray, low: float, high: float, tolerance: float,
    encode_share: float, ranks: Fastest,
) -> tuple[MicroBatch, float]:
    """The shortest micro-batch found with all rows, and a makespan under which they do not fit, at most the share
    `tolerance` below the least under which they did.

    Bisects between `high` (`complete` is False if even that is infeasible) and `low`, which is infeasible.
    """
    best, low = fill_micro_batch(items, images, rows, value, high, encode_share, ranks, True), max(low, ranks.gather_s)
    span = np.array([low, best.makespan if best.complete else low, low])
    while compiled_halve(span, tolerance):
        packed = fill_micro_batch(items, images, rows, value, span[2], encode_share, ranks, True)
        span[int(packed.complete)] = packed.makespan if packed.complete else span[2]
        best = packed if packed.complete and packed.seconds <= best.seconds else best
    return best, span[0]
