"""Fills one micro-batch under a makespan: which of the remaining items run in it, in which packs, on how many ranks
each.

Items come largest first. Each goes to the open pack with the least room, in memory and in time, that holds it
(`best_fit`). Otherwise it opens a pack on the fewest ranks that meet the makespan, if that many are left. Otherwise it
waits for another micro-batch. Ranks are assigned fastest first, so the slowest ranks get the last (smallest) packs, and
no more work than they can do. O(items + packed items x (log packs + shift)).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dhp_ray.planner.encoders import Images, deal_more
from dhp_ray.planner.items import Item, Items, Machine, compiled_encoding_s, compiled_predicted_s, time_s
from dhp_ray.planner.primitives.best_fit import OWNER, add, first_with, rooms_for, shrink
from dhp_ray.planner.primitives.bisection import compiled_halve
from dhp_ray.planner.primitives.compiled import compiled, inner
from dhp_ray.planner.rates import Rates

LANGUAGE, ATTENTION, VISION, ENCODE, LEAST, HOST, TOKENS = range(7)
"""Rows of the sums over open packs. ENCODE and LEAST: encoding time of the most and the least loaded rank of the pack,
at the rank's own speed. TOKENS: number of tokens. The others: seconds on one nominal rank.
"""


class MicroBatch(NamedTuple):
    """`pack[i]` is the pack of `rest[i]`, -1 if it waits.

    Pack p runs for `time[p]` seconds on `degree[p]` ranks: those that follow, by speed, after the ranks of the packs
    before it. `seconds`: those of the micro-batch (`pricing.micro_batches_s`). `value`: the sum over the packed items.
    `tokens`: their tokens.
    """

    pack: np.ndarray
    degree: np.ndarray
    time: np.ndarray
    seconds: float
    value: float
    tokens: int
    complete: bool


class Fastest(NamedTuple):
    """Speeds and nodes of the ranks of `machine`, fastest first.

    linear_s, quadratic_s: seconds of language for a token and a token squared. gather_s: the least seconds of a
    micro-batch; the machine's rates do not include it, so that packs may fill it. `degrees[d]`: the least allowed
    degree from d on; beyond the last, more than there are ranks.
    """

    machine: Machine
    speed: np.ndarray
    node: np.ndarray
    linear_s: float
    quadratic_s: float
    gather_s: float
    degrees: np.ndarray


@inner
def _crosses(ranks: Fastest, first: int, degree: int) -> bool:
    """Whether the `degree` ranks from place `first` on span several nodes. Ranks of equal speed are placed inside a
    node wherever they fit (`placing`).
    """
    if ranks.machine.uniform:
        return degree > ranks.machine.ranks_per_node
    place = first + 1
    while place < first + degree and ranks.node[place] == ranks.node[first]:
        place += 1
    return place < first + degree


@inner
def _with_item(
    item: Item, sums: np.ndarray, pack: int, encode_s: float, degree: int, slowest: float, crosses: bool, rates: Rates
) -> float:
    """Seconds of a pack after adding an item. `encode_s`: encoding time of its most loaded rank, including that item.
    """
    rate = rates[degree]
    return compiled_predicted_s(
        sums[LANGUAGE, pack] + item.language_s,
        sums[ATTENTION, pack] + item.attention_s,
        encode_s + (rate.encoder_pass_s / slowest if encode_s > 0.0 else 0.0),
        sums[HOST, pack] + item.host_s,
        sums[TOKENS, pack] + item.tokens,
        degree,
        slowest,
        rate.across_s if crosses else rate.inside_s,
        rate,
    )


@inner
def _seconds_of(time: np.ndarray, sums: np.ndarray, degree: np.ndarray, first: np.ndarray, ranks: Fastest) -> float:
    """Seconds of a micro-batch (`pricing.micro_batches_s`). `time`: of each pack, without `gather_s`."""
    longest_s, rest_s = 0.0, 0.0
    for pack in range(len(time)):
        rate, encode_s = ranks.machine.rates[degree[pack]], sums[ENCODE, pack]
        if encode_s > 0.0:
            encode_s += rate.encoder_pass_s / ranks.speed[first[pack] + degree[pack] - 1]
            encode_s = compiled_encoding_s(encode_s, sums[TOKENS, pack], rate)
        longest_s, rest_s = max(longest_s, encode_s), max(rest_s, time[pack] - encode_s)
    return max(ranks.gather_s, longest_s + rest_s)


@inner
def _longest(time_left: float, quadratic_s: float, linear_s: float) -> float:
    """The largest number of tokens n for which quadratic n^2 + linear n is at most `time_left`."""
    if time_left <= 0.0:
        return 0.0
    return 2.0 * time_left / (linear_s + np.sqrt(linear_s * linear_s + 4.0 * quadratic_s * time_left)) * (1.0 + 1e-9)


@compiled
def fill_micro_batch(
    items: Items, images: Images, rest: np.ndarray, value: np.ndarray, makespan: float, ranks: Fastest,
    all_or_none: bool,
) -> MicroBatch:
    """Fill a micro-batch. `rest`: items, largest first, with their images. `value`: the value of each item. With
    `all_or_none` it stops as soon as an item does not fit.
    """
    speed, rates, capacity = ranks.speed, ranks.machine.rates, float(ranks.machine.tokens_per_rank)
    num_ranks = len(speed)
    pack = np.full(len(rest), -1)
    limit = min(num_ranks, len(rest))
    degree, first, time = np.zeros(limit, dtype=np.int64), np.zeros(limit, dtype=np.int64), np.zeros(limit)
    sums = np.zeros((7, limit))
    encodes, busy = np.zeros(num_ranks), np.zeros(num_ranks)  # encoding seconds of each rank; and with one item more
    rooms, state = rooms_for(limit)  # tokens of the longest sequence that each open pack may take
    count, used, served, served_tokens, complete = 0, 0, 0.0, 0, True
    for place in range(len(rest)):
        item = items[rest[place]]
        found, spent, into, encode_s = first_with(rooms, state, item.tokens), 0.0, -1, 0.0
        while found >= 0:
            into = int(rooms[OWNER, found])
            begin, end = first[into], first[into] + degree[into]
            encode_s = sums[ENCODE, into]
            if item.image_s > 0.0:  # a lower bound, which costs less than dealing out the images
                even_s = (sums[VISION, into] + item.vision_s) / (degree[into] * speed[begin])
                encode_s = max(encode_s, max(even_s, sums[LEAST, into] + item.image_s / speed[begin]) * (1 - 1e-12))
            crosses = _crosses(ranks, begin, degree[into])
            spent = _with_item(item, sums, into, encode_s, degree[into], speed[end - 1], crosses, rates)
            if item.image_s > 0.0 and spent <= makespan:
                busy[: degree[into]] = encodes[begin:end]
                encode_s = deal_more(images, rest[place], speed[begin:end], busy[: degree[into]])
                spent = _with_item(item, sums, into, encode_s, degree[into], speed[end - 1], crosses, rates)
            if spent <= makespan:
                break
            found -= 1
        if found < 0:
            need = num_ranks + 1
            if used < num_ranks:
                need = max(item.minimum_degree, int(item.language_s / (makespan * speed[used])))
            need = ranks.degrees[min(need, num_ranks + 1)]
            while used + need <= num_ranks:
                spent = time_s(item, need, _crosses(ranks, used, need), speed[used + need - 1], rates[need])
                if spent <= makespan:
                    break
                need = ranks.degrees[need + 1]
            if used + need > num_ranks:
                complete = False
                if all_or_none:
                    break
                continue
            into = count
            degree[into], first[into] = need, used
            if item.image_s > 0.0:
                busy[:need] = 0.0
                encode_s = deal_more(images, rest[place], speed[used : used + need], busy[:need])
            used += need
            count += 1
        if item.image_s > 0.0:
            encodes[first[into] : first[into] + degree[into]], sums[ENCODE, into] = busy[: degree[into]], encode_s
            sums[LEAST, into] = busy[: degree[into]].min()
        pack[place] = into
        served += value[rest[place]]
        served_tokens += item.tokens
        sums[LANGUAGE, into] += item.language_s
        sums[ATTENTION, into] += item.attention_s
        sums[VISION, into] += item.vision_s
        sums[HOST, into] += item.host_s
        sums[TOKENS, into] += item.tokens
        time[into] = spent
        # The longest sequence that the pack may still take: an upper bound if it has images or attention hides
        # communication.
        rate, share, left_s = (
            rates[degree[into]],
            degree[into] * speed[first[into] + degree[into] - 1],
            makespan - spent,
        )
        transfer_s = rate.across_s if _crosses(ranks, first[into], degree[into]) else rate.inside_s
        if rate.overlap > 0.0:
            hidden_s = rate.overlap * sums[ATTENTION, into] * degree[into] / share
            left_s += max(0.0, transfer_s * sums[TOKENS, into] - hidden_s)
            transfer_s = 0.0
        longest = min(
            degree[into] * capacity - sums[TOKENS, into],
            _longest(left_s, ranks.quadratic_s / share, ranks.linear_s / share + transfer_s),
        )
        if found >= 0:
            shrink(rooms, state, found, longest)
        else:
            add(rooms, state, longest, into)
    seconds = _seconds_of(time[:count], sums, degree, first, ranks)
    time = np.maximum(time[:count], ranks.gather_s)
    return MicroBatch(pack, degree[:count], time, seconds, served, served_tokens, complete)


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
        alone_s = time_s(items[item], degree, _crosses(ranks, 0, degree), ranks.speed[degree - 1], rates[degree])
        least_s = min(least_s, alone_s)
    first = num_ranks - least if ranks.speed[0] == ranks.speed[-1] else 0
    alone_s = time_s(items[item], least, _crosses(ranks, first, least), ranks.speed[least - 1], rates[least])
    return alone_s * (1 + 1e-12), least_s * (1 + 1e-12)


@compiled
def trials(
    items: Items, images: Images, rest: np.ndarray, value: np.ndarray, count: int, span: float, longest_s: float,
    ranks: Fastest,
) -> np.ndarray:
    """(count, 4): a makespan, and the seconds, value and tokens of what fits under it; seconds are 0 if the first item
    does not.

    Makespans fall. Each is the time of a pack with the first item. The first one is that of similar items that fill the
    memory of its minimum degree, at most `longest_s`. The last one is `span` times less, or that of the item alone on
    its best degree if that is more. All are at least `gather_s`.
    """
    most_s, least_s = extremes_s(items, rest[0], ranks)
    most_s *= max(1.0, ranks.machine.tokens_per_rank * items[rest[0]].minimum_degree / items[rest[0]].tokens)
    most_s = max(least_s, min(most_s, longest_s))
    ratio = (max(least_s, most_s / span) / most_s) ** (1.0 / (count - 1))
    found = np.zeros((count, 4))
    for index in range(count):
        makespan = max(most_s * ratio**index, least_s, ranks.gather_s)
        packed = fill_micro_batch(items, images, rest, value, makespan, ranks, False)
        if packed.pack[0] >= 0:
            found[index, 0], found[index, 1], found[index, 2], found[index, 3] = (
                makespan,
                packed.seconds,
                packed.value,
                packed.tokens,
            )
    return found


@compiled
def shortest_micro_batch(
    items: Items, images: Images, rows: np.ndarray, value: np.ndarray, low: float, high: float, tolerance: float,
    ranks: Fastest,
) -> tuple[MicroBatch, float]:
    """The shortest micro-batch found with all rows, and a makespan under which they do not fit, at most the share
    `tolerance` below the least under which they did.

    Bisects between `high` (`complete` is False if even that is infeasible) and `low`, which is infeasible.
    """
    best, low = fill_micro_batch(items, images, rows, value, high, ranks, True), max(low, ranks.gather_s)
    span = np.array([low, best.time.max() if best.complete else low, low])
    while compiled_halve(span, tolerance):
        packed = fill_micro_batch(items, images, rows, value, span[2], ranks, True)
        span[int(packed.complete)] = packed.time.max() if packed.complete else span[2]
        best = packed if packed.complete and packed.seconds <= best.seconds else best
    return best, span[0]
