"""A lower bound on the time of every plan of a batch.

Fix a makespan T. A pack of degree d lasts at least as long as each of its sequences alone, t(d). So a sequence runs at
a degree with t(d) <= T, and takes at least the least area a(T) over those degrees, where area is rank-seconds weighted
by speed. All areas must fit under T:

    sum of a_i(T) <= T * sum of speeds     and     t_i(d) <= T for some d, for every i

Both conditions hold from some T on, and that T is the bound. The area of a sequence at degree d is its compute, plus
its communication on the d slowest ranks, plus its share of what a pack pays once (latency, pack_s): a pack of degree d
holds at most d * most_tokens_per_rank tokens, so each token carries 1 / that many. Members of a group run at the speed
of its slowest member, so with unequal speeds compute takes at least the area of d ranks that are neighbours in speed.
If attention hides communication, a pack may hide more than its sequences do alone; the area then counts only compute.
(Times alone remain valid: what the other sequences of a pack hide, they also compute.) Waiting for copies to host
memory is no area either. A sequence alone waits no longer than with others, which add to compute and to what is moved.

If packs may recompute layers, a sequence pays less at once for its compute again and for its share of the fixed costs
than in one of two extreme packs: as full as recomputation of all layers allows, or without any. For with x tokens a
rank the two together are a line in 1 / x, for every sequence. If a long sequence has too few ranks to avoid
recomputation, the second one is its own pack, with nothing else. Degrees from d(T) to the one that avoids it are looked
at in intervals [d, 2 d), each with the charges of its first degree and the share of its last one.

This share is small if packs are far from full. But a rank that runs anything runs a pack, and pays at least o, the
least that a pack pays once. It has T - o left for the rest, and a rank that runs nothing has no more:

    sum of a_i(T) without shares <= (T - o) * sum of speeds

    2 ranks, packs of at most 100 tokens that cost 1 s each, 4 sequences of 10 tokens and 3 s: shares of 0.1 s give
    4 * 3.1 / 2 = 6.2 s; a pack on each rank gives 4 * 3 / 2 + 1 = 7 s, which is what two packs of two take

If images may be encoded apart from the packs, the images of a sequence are encoded before and after its own time in a
pack. They take at least their time on all ranks together, and the largest image, if it cannot be cut, at least its time
on the fastest rank. A rank may then have images and no pack. Let S be the sum of all speeds, x that of the ranks with
packs, L the rank-seconds of work in packs, and V those of images:

    L <= (T - o) x     and     L + V + o x <= T S     so     o L <= (T - o) (T S - L - V)

With `sync=micro_batch` the same holds for the sum over micro-batches (each is at most T long). Then fixed_s counts once
for each of the micro-batches that the tokens need, and so does o (once in all if images may be encoded apart); each
micro-batch takes at least gather_s.

For each T, a short scan finds a sequence's least degree d(T). Then a(T) is relaxed to the least charge per token over
all degrees from d(T) on, which does not depend on the sequence. O(sequences + ranks) memory, some 40 trials of
O(sequences).
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from dhp_ray.planner.cost.rates import predicted_s, share_of
from dhp_ray.planner.primitives.bisection import halve
from dhp_ray.planner.primitives.compiled import compiled, inner
from dhp_ray.planner.problem import Item, Items, Problem

LIMIT = np.dtype(
    [
        (name, np.float64)
        for name in ("speed", "encode_speed", "transfer_s", "overlap", "overhead_s", "encoder_pass_s", "least_s",
                     "charge_s", "kept_charge_s", "exchange_s", "stretch", "moved", "again", "most_again",
                     "encoded_again", "from_tokens", "free_tokens", "forward")
    ]
)
"""The best that d ranks can do. `speed`: that of the d-th fastest rank. `encode_speed`: the sum of the d fastest (of
all ranks, if images may be encoded apart).

On d ranks or more: `charge_s` is the least area in seconds that a token adds to its compute, `kept_charge_s` if nothing
is recomputed; `exchange_s` is the same without fixed costs of packs. `most_again`: what the largest pack computes again
for each second. `stretch` is the least area over compute, which is 1 except with unequal speeds, where a group is as
slow as its slowest member.
"""

STRETCHED = 64
"""Number of ranks in the largest set that is examined."""


def limits_of(problem: Problem) -> np.recarray:
    """The limits of a cluster with its costs: a LIMIT for each number of ranks from 0 (unused) to N."""
    cluster, rates = problem.cluster, problem.machine.rates
    fastest = np.sort(problem.speeds)[::-1]
    degrees = np.arange(cluster.num_ranks + 1)
    limits = np.recarray(len(degrees), dtype=LIMIT)
    limits.speed = fastest[np.maximum(degrees, 1) - 1]
    limits.encode_speed = np.concatenate([[1.0], np.cumsum(fastest)])
    if problem.encoder != "group":
        limits.encode_speed[1:] = fastest.sum()
    limits.transfer_s = transfer_s = np.where(
        degrees > cluster.ranks_per_node, rates.across_s, np.minimum(rates.inside_s, rates.across_s)
    )
    limits.overlap, limits.overhead_s, limits.least_s = rates.overlap, rates.overhead_s, rates.least_s
    limits.encoder_pass_s = rates.encoder_pass_s
    for name in ("moved", "again", "encoded_again", "from_tokens", "free_tokens", "forward"):
        setattr(limits, name, getattr(rates, name))
    if problem.encoder != "group":  # packs then run no image again
        limits.encoded_again[:] = 0.0
    slowest_sum = np.concatenate([[0.0], np.cumsum(fastest[::-1])])
    exchange = (0.0 if rates.overlap.any() else 1.0) * transfer_s * slowest_sum
    again = cluster.recomputation
    kept_tokens = again.free_tokens or cluster.most_tokens_per_rank
    charge, kept_charge = (exchange + rates.overhead_s * slowest_sum / (tokens * np.maximum(degrees, 1))
                           for tokens in (cluster.most_tokens_per_rank, kept_tokens))
    limits.exchange_s, limits.charge_s, limits.kept_charge_s = (
        np.concatenate([[0.0], np.minimum.accumulate(each[:0:-1])[::-1]]) for each in (exchange, charge, kept_charge)
    )
    limits.most_again = np.full(len(degrees), again.share * problem.cost.forward)
    limits.stretch = np.ones(len(degrees)) if fastest[0] == fastest[-1] else _stretch(fastest)
    return limits


@compiled
def _stretch(fastest: np.ndarray) -> np.ndarray:
    """For d ranks or more: the least of (sum of speeds) / (d * slowest speed) over all sets. The best sets are
    neighbours by speed.

    It never decreases with d: a set of d + 1 without its fastest rank has a lower value. So beyond STRETCHED ranks the
    value of STRETCHED is a valid bound. O(N STRETCHED).
    """
    num_ranks = len(fastest)
    stretch = np.ones(num_ranks + 1)
    for degree in range(1, num_ranks + 1):
        if degree > STRETCHED:
            stretch[degree] = stretch[STRETCHED]
            continue
        best, total = np.inf, 0.0
        for last in range(num_ranks):
            total += fastest[last]
            if last >= degree:
                total -= fastest[last - degree]
            if last >= degree - 1:
                best = min(best, total / (degree * fastest[last]))
        stretch[degree] = best
    return np.maximum(stretch * (1 - 1e-12), 1.0)


class RankSeconds(NamedTuple):
    """What all ranks have within a makespan: the sum of their `speed`, less `once_s`, which each rank with a pack pays.
    `apart`: a rank may have images and no pack.
    """

    speed: float
    once_s: float
    apart: bool


def lower_bound_s(problem: Problem) -> float:
    """Seconds that no plan of this batch can beat, including fixed costs."""
    micro_batches = 1
    if problem.sync == "micro_batch":
        micro_batches = -(-int(problem.items.tokens.sum()) // problem.cluster.max_tokens)
    items, apart = problem.items, problem.encoder != "group"
    if apart:
        items = items.copy()
        items.host_s = problem.cost.host_s(items.tokens.astype(np.float64))  # packs then move no patches
        if problem.cost.cuts_images:  # several ranks may encode one image
            items.image_s = 0.0
    once_s = float(problem.machine.rates.overhead_s[1:].min())
    room = RankSeconds(float(problem.speeds.sum()), once_s * (1 if apart else micro_batches), apart)
    packs_s = float(_bound(items, limits_of(problem), room))
    return max(packs_s, problem.cost.gather_s * micro_batches) + problem.cost.fixed_s * micro_batches


def bounded(problem: Problem) -> Problem:
    return replace(problem, lower_bound_s=lower_bound_s(problem))


@inner
def _least_time(item: Item, degree: int, limit: np.record, fastest: float) -> float:
    encode_s = max(item.vision_s / limit.encode_speed, item.image_s / fastest)
    if item.image_s > 0.0:
        encode_s += limit.encoder_pass_s / fastest
    return predicted_s(item.language_s, item.attention_s, encode_s, item.host_s, item.tokens, degree, limit.speed,
                       limit.transfer_s, limit)


@inner
def _add_areas(areas: np.ndarray, item: Item, degree: int, limits: np.recarray) -> None:
    """Add the least areas of an item on at least `degree` ranks: of its pack, with and without its share of fixed
    costs, and of its images, which may be divided among the members in any way, so their area is not stretched.
    """
    limit, tokens = limits[degree], item.tokens
    own_s = item.language_s * limit.stretch
    if limit.again == 0.0:
        areas[0] += own_s + tokens * limit.charge_s
        areas[1] += own_s + tokens * limit.exchange_s
    else:
        rest_s = (item.language_s - item.attention_s) * limit.stretch  # attention does not run again
        least_s = own_s + rest_s * limit.most_again + tokens * limit.charge_s  # in a pack that recomputes all layers
        alone_s = np.inf
        keeps = max(degree, int(np.ceil(tokens / limits[1].free_tokens))) if limits[1].free_tokens else len(limits)
        while degree < min(keeps, len(limits)):  # its pack has no fewer tokens than it, and computes as much again
            limit, after = limits[degree], min(2 * degree, keeps, len(limits))
            again = limits[after - 1].again * share_of(tokens, limits[after - 1])
            own_s = (item.language_s + (item.language_s - item.attention_s) * again) * limit.stretch
            alone_s = min(alone_s, own_s + tokens * limit.exchange_s)
            once_s = limit.overhead_s * limits[len(limits) - 1].speed * degree  # of a pack with this sequence alone
            least_s = min(least_s, own_s + tokens * limit.exchange_s + once_s)
            degree = after
        if keeps < len(limits):
            limit = limits[keeps]
            own_s = item.language_s * limit.stretch
            least_s = min(least_s, own_s + tokens * limit.kept_charge_s)
            alone_s = min(alone_s, own_s + tokens * limit.exchange_s)
        areas[0] += least_s
        areas[1] += alone_s
    areas[2] += item.vision_s


@inner
def _have_room(areas: np.ndarray, makespan: float, room: RankSeconds) -> bool:
    """Whether the ranks have room for areas (`_add_areas`) within a makespan."""
    makespan *= 1 + 1e-12
    shared, packs, images = areas
    left_s, left = makespan - room.once_s, makespan * room.speed - packs - images
    if shared + images > makespan * room.speed or packs > left_s * room.speed:
        return False
    return room.once_s * packs <= left_s * left if room.apart else room.once_s * room.speed <= left


@inner
def _shortest(item: Item, floor_s: float, limits: np.recarray) -> float:
    """Least time of an item over all degrees; may return any time up to `floor_s` instead."""
    best = np.inf
    for degree in range(item.minimum_degree, len(limits)):
        best = min(best, _least_time(item, degree, limits[degree], limits[1].speed))
        if best <= floor_s:
            break
    return best


@inner
def _fits(
    items: Items, rows: np.ndarray, others: np.ndarray, limits: np.recarray, makespan: float, room: RankSeconds
) -> bool:
    """Whether `rows` fit in addition to the areas of the others, on the degrees that meet the makespan."""
    fastest, areas = limits[1].speed, others.copy()
    for row in rows:
        item = items[row]
        degree = max(item.minimum_degree, int(item.language_s / (makespan * fastest)))
        while _least_time(item, degree, limits[degree], fastest) > makespan * (1 + 1e-12):
            degree += 1
            if degree == len(limits):
                return False
        _add_areas(areas, item, degree, limits)
    return _have_room(areas, makespan, room)


@compiled
def _bound(items: Items, limits: np.recarray, room: RankSeconds) -> float:
    areas, fastest = np.zeros(3), limits[1].speed
    for row in range(len(items)):
        _add_areas(areas, items[row], items[row].minimum_degree, limits)
    low = max((areas[0] + areas[2]) / room.speed, areas[1] / room.speed + room.once_s)
    if not room.apart:
        low = max(low, (areas[1] + areas[2]) / room.speed + room.once_s)
    for row in range(len(items)):
        low = max(low, _shortest(items[row], low, limits))
    rows, count, others = np.zeros(len(items), dtype=np.int64), 0, np.zeros(3)
    for row in range(len(items)):
        degree = items[row].minimum_degree
        if _least_time(items[row], degree, limits[degree], fastest) > low:
            rows[count] = row
            count += 1
        else:  # this degree meets every makespan from `low` on
            _add_areas(others, items[row], degree, limits)
    rows = rows[:count]
    span = np.array([low, low, low])
    if _fits(items, rows, others, limits, low, room):
        return low
    while not _fits(items, rows, others, limits, span[1], room):
        span[0], span[1] = span[1], span[1] * 1.2
    while halve(span, 1e-6):
        span[int(_fits(items, rows, others, limits, span[2], room))] = span[2]
    return span[0]
