"""The constructor for sync=step: packs under a target makespan, largest sequence first.

A sequence takes the ranks that it wastes least: seconds of all its ranks, and those for which they wait for the last of
them, each weighted by the rank's speed; among equal ones those that leave the least room until the target. If none end
by the target, those that end first.
"""

from __future__ import annotations

import numpy as np

from dhp_ray.planner.cost.rates import running_s
from dhp_ray.planner.primitives.compiled import compiled, inner
from dhp_ray.planner.primitives.sorting import ascending
from dhp_ray.planner.problem import encode_s_of, time_s
from dhp_ray.planner.schedule import Schedule, by_owner, in_order
from dhp_ray.planner.search.batch import SearchBatch
from dhp_ray.planner.search.placing import CachedGroups

STEPS, FIRST, TOLERANCE = 10, 1e-3, 5e-4
"""Targets of a bisection at most; the first, as a share above the bound; and where it ends."""

WINDOWS = 5
"""What a look for several ranks takes of each rank, over one for a single rank."""

NO_GROUPS = CachedGroups(np.zeros(0, dtype=np.int64), np.zeros(1, dtype=np.int64))


def with_groups_of_the_pool(
    batch: SearchBatch, target_s: float, pool: CachedGroups, reuse_s: float
) -> Schedule | None:
    """A plan under a target in which a group of the pool may waste `reuse_s` more rank-seconds than other ranks."""
    latest_s = target_s * (1 + 1e-9)
    built = build(batch, target_s, latest_s, 1, False, pool, reuse_s)
    return _schedule_of(*built[:-1]) if built[-1] <= latest_s else None


def shortest_under_targets(
    batch: SearchBatch, bound_s: float, below_s: float, least: int, loose: bool
) -> tuple[Schedule | None, int]:
    """The shortest plan of a bisection of the target, whose packs have at least `least` ranks (`loose`: or one, if that
    ends by the target); none if one trial finds nothing shorter than `below_s`. And how many ranks all trials look at,
    in units of the look for a single rank."""
    low_s, high_s, found, trials, looks = bound_s, below_s, None, 0, 0
    target_s = bound_s * (1 + FIRST) if below_s == np.inf else below_s
    while found is None or trials < STEPS:
        trials += 1
        next_s = bound_s * (1 + FIRST * 4**trials)  # if all is later, it is tried next
        built = build(batch, target_s, min(high_s, max(target_s, next_s)), least, loose, NO_GROUPS, 0.0)
        looks += len(batch.speeds) * (len(batch.items) + WINDOWS * int((built[2] > 1).sum()))
        if built[-1] < high_s:
            found, high_s = built, built[-1]
        if found is None and below_s < np.inf:
            break
        if built[-1] > target_s * (1 + 1e-9):
            low_s = target_s
        if low_s * (1 + TOLERANCE) >= high_s:
            break
        target_s = min((low_s + high_s) / 2, next_s)
    return (None if found is None else _schedule_of(*found[:-1])), looks


def _schedule_of(
    pack_of: np.ndarray, start: np.ndarray, degree: np.ndarray, first: np.ndarray, ranks: np.ndarray
) -> Schedule:
    """The packs in the order in which they start."""
    rows, first_row = by_owner(pack_of, len(degree))
    ranks = ranks[np.lexsort((ranks, np.repeat(np.arange(len(degree)), degree)))]
    packs = Schedule(rows, first_row, ranks, first, np.zeros(len(degree), dtype=np.int64))
    return in_order(packs, np.argsort(start, kind="stable"))


@compiled
def build(
    batch: SearchBatch, target_s: float, latest_s: float, least: int, loose: bool, pool: CachedGroups, reuse_s: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, float]:
    """All packs under a target, and their makespan: infinite, and the rest left out, once a sequence cannot end by
    `latest_s`."""
    num_ranks, count = len(batch.speeds), len(batch.by_work)
    # rooms: the ends of the ranks, and gaps before packs of several ranks
    size = num_ranks + 64
    rank_of, at, until, pack_at = np.arange(size), np.zeros(size), np.full(size, target_s), np.full(size, -1)
    num_rooms = num_ranks
    pack_of, start, degree = np.full(count, -1), np.zeros(count), np.zeros(count, dtype=np.int64)
    tokens, first, ranks = np.zeros(count), np.zeros(count + 1, dtype=np.int64), np.zeros(count + num_ranks, np.int64)
    num_packs, chosen = 0, np.zeros(num_ranks, dtype=np.int64)
    for row in batch.by_work:
        item, rate = batch.items[row], batch.rates[1]
        best, best_room, late, late_s = -1, np.inf, -1, np.inf
        if item.minimum_degree <= 1 and (loose or least <= 1):
            alone_s = _alone_s(batch, row)
            once_s = rate.overhead_s + (rate.encoder_pass_s if item.image_s > 0.0 else 0.0)
            for room in range(num_rooms):
                if until[room] - at[room] < alone_s * 0.5 and room >= num_ranks:
                    continue
                pack = pack_at[room]
                joins = pack >= 0 and tokens[pack] + item.tokens <= batch.capacity
                end_s = at[room] + alone_s / batch.speeds[rank_of[room]] + (0.0 if joins else once_s)
                if end_s <= until[room]:
                    if until[room] - end_s < best_room:
                        best, best_room = room, until[room] - end_s
                elif room < num_ranks and end_s < late_s:
                    late, late_s = room, end_s
        room = best
        if room < 0:
            found_d, start_s, end_s = _ranks(
                batch, row, at[:num_ranks], target_s, min(late_s, latest_s), least, pool, reuse_s, chosen)
            if found_d == 0 and late_s > latest_s:
                break
            if found_d > 0:
                if len(ranks) < first[num_packs] + found_d:
                    ranks = np.concatenate((ranks, np.zeros(len(ranks) + found_d, np.int64)))
                for place in range(found_d):
                    rank = chosen[place]
                    ranks[first[num_packs] + place] = rank
                    if start_s > at[rank]:
                        if num_rooms == len(at):
                            rank_of, pack_at = np.concatenate((rank_of, rank_of)), np.concatenate((pack_at, pack_at))
                            at, until = np.concatenate((at, at)), np.concatenate((until, until))
                        rank_of[num_rooms], at[num_rooms], until[num_rooms] = rank, at[rank], start_s
                        pack_at[num_rooms] = pack_at[rank]
                        num_rooms += 1
                    at[rank], pack_at[rank] = end_s, -1
                pack_of[row], start[num_packs], degree[num_packs] = num_packs, start_s, found_d
                tokens[num_packs] = item.tokens
                num_packs += 1
                first[num_packs] = first[num_packs - 1] + found_d
                continue
            room = late
        pack = pack_at[room]
        alone_s = _alone_s(batch, row) / batch.speeds[rank_of[room]]
        if pack < 0 or tokens[pack] + item.tokens > batch.capacity:
            alone_s += batch.rates[1].overhead_s + (batch.rates[1].encoder_pass_s if item.image_s > 0.0 else 0.0)
            if first[num_packs] == len(ranks):
                ranks = np.concatenate((ranks, np.zeros(len(ranks), np.int64)))
            pack, pack_at[room] = num_packs, num_packs
            start[pack], degree[pack], ranks[first[pack]] = at[room], 1, rank_of[room]
            num_packs += 1
            first[num_packs] = first[num_packs - 1] + 1
        pack_of[row], tokens[pack] = pack, tokens[pack] + item.tokens
        at[room] += alone_s
    seconds = at[:num_ranks].max() if (pack_of >= 0).all() else np.inf
    return pack_of, start[:num_packs], degree[:num_packs], first[: num_packs + 1], ranks[: first[num_packs]], seconds


@inner
def _alone_s(batch: SearchBatch, row: int) -> float:
    """Seconds that a sequence adds to a pack of one rank."""
    item, rate = batch.items[row], batch.rates[1]
    seconds = running_s(
        item.language_s, item.attention_s, encode_s_of(item, 1), item.host_s, item.tokens, 1, 1.0, 0.0, rate)
    return seconds - rate.overhead_s


@inner
def _ranks(
    batch: SearchBatch, row: int, free: np.ndarray, target_s: float, late_s: float, least_degree: int,
    pool: CachedGroups, reuse_s: float, chosen: np.ndarray
) -> tuple[int, float, float]:
    """(degree, start, end) of a sequence on several ranks, which are written to `chosen`; degree 0 if it ends on none
    by the target or before `late_s`."""
    item, num_ranks, fastest = batch.items[row], len(free), batch.speeds.max()
    by_free = ascending(free)
    by_node, so_far = by_free[ascending(batch.node[by_free])], 0
    num_nodes = batch.node.max() + 1 if batch.nodes_matter else 0
    least_d = max(2, item.minimum_degree, least_degree)
    from_d, most_d = num_ranks + 1, 0  # the first degree that may end by the target, the last that may be of use
    # seconds on the fastest ranks by degree: on several nodes, and on one if so many ranks can be of one
    across_s, inside_s = np.zeros(num_ranks + 1), np.zeros(num_ranks + 1)
    for degree in range(least_d, num_ranks + 1):
        across_s[degree] = time_s(item, degree, batch.nodes_matter, fastest, batch.rates[degree])
        inside_s[degree] = across_s[degree]
        if degree <= batch.node_size:
            inside_s[degree] = time_s(item, degree, False, fastest, batch.rates[degree])
        soonest_s = free[by_free[degree - 1]] + min(inside_s[degree], across_s[degree])
        if soonest_s <= target_s or soonest_s < late_s:
            most_d = degree
        if soonest_s <= target_s:
            from_d = min(from_d, degree)
    least, best_d, best_start, best_end, late = np.inf, 0, 0.0, 0.0, True
    start_of, slowest_of = np.zeros(num_ranks), np.zeros(num_ranks)
    listed, alike = np.zeros(num_ranks, np.int64), np.zeros(num_ranks, np.int64)
    speed, before = np.zeros(num_ranks + 1), np.zeros(num_ranks + 1)  # sums: of speeds, and of work before each is free
    for number in range(0 if batch.uniform else -1, num_nodes + 1):
        size = num_ranks
        if number < 0:
            listed[:] = ascending(-batch.speeds)
        elif number == 0:
            listed[:] = by_free
        else:
            size = 0
            while so_far < num_ranks and batch.node[by_node[so_far]] == number - 1:
                listed[size] = by_node[so_far]
                size, so_far = size + 1, so_far + 1
        for place in range(size):
            rank = listed[place]
            speed[place + 1] = speed[place] + batch.speeds[rank]
            before[place + 1] = before[place] + batch.speeds[rank] * free[rank]
            same = place > 0 and batch.node[listed[place]] == batch.node[listed[place - 1]]
            alike[place] = alike[place - 1] + 1 if same else 1
        first_d = least_d if late else from_d
        for degree in range(first_d, min(size, most_d) + 1):
            least_s = min(inside_s[degree], across_s[degree])
            if not late and degree >= from_d and degree * least_s * fastest >= least:
                break
            for last in range(size - 1, size if batch.uniform else degree - 2, -1):  # of so many ranks up to this one
                if degree == first_d:
                    start_of[last], slowest_of[last] = 0.0, np.inf
                    for place in range(last - degree + 1, last + 1):
                        slowest_of[last] = min(slowest_of[last], batch.speeds[listed[place]])
                        start_of[last] = max(start_of[last], free[listed[place]])
                else:
                    slowest_of[last] = min(slowest_of[last - 1], batch.speeds[listed[last]])
                    start_of[last] = max(start_of[last - 1], free[listed[last]])
            if not late and degree < from_d:
                continue
            for last in range(degree - 1, size):
                start_s, slowest = (free[listed[last]], 1.0) if batch.uniform else (start_of[last], slowest_of[last])
                crosses = batch.nodes_matter and alike[last] < degree
                seconds = across_s[degree] if crosses else inside_s[degree]
                if slowest != fastest:
                    seconds = time_s(item, degree, crosses, slowest, batch.rates[degree])
                end_s = start_s + seconds
                if end_s <= target_s:
                    first = last + 1 - degree
                    waste = (speed[last + 1] - speed[first]) * end_s - before[last + 1] + before[first]
                    if late or waste < least - 1e-12 or (waste <= least + 1e-12 and end_s > best_end):
                        least, late, best_d, best_start, best_end = waste, False, degree, start_s, end_s
                        chosen[:degree] = listed[last - degree + 1 : last + 1]
                    continue
                if late and end_s < late_s:
                    late_s, best_d, best_start, best_end = end_s, degree, start_s, end_s
                    chosen[:degree] = listed[last - degree + 1 : last + 1]
                # the soonest end of this window, and of all after it where ranks are listed as they become free
                soonest_s = start_s + least_s
                if number >= 0 and soonest_s > target_s and (not late or soonest_s >= late_s):
                    break
    for group in range(len(pool.first) - 1):
        ranks = pool.ranks[pool.first[group] : pool.first[group + 1]]
        degree, start_s, slowest, sum_speed, work = len(ranks), 0.0, np.inf, 0.0, 0.0
        if degree < least_d:
            continue
        for rank in ranks:
            start_s, slowest = max(start_s, free[rank]), min(slowest, batch.speeds[rank])
            sum_speed, work = sum_speed + batch.speeds[rank], work + batch.speeds[rank] * free[rank]
        crosses = batch.nodes_matter and batch.node[ranks[0]] != batch.node[ranks[-1]]
        seconds = time_s(item, degree, crosses, slowest, batch.rates[degree])
        waste = sum_speed * (start_s + seconds) - work - reuse_s
        if start_s + seconds <= target_s and waste < least:
            least, best_d, best_start, best_end = waste, degree, start_s, start_s + seconds
            chosen[:degree] = ranks
    return best_d, best_start, best_end
