"""Fills one micro-batch under a makespan: which of the remaining items run in it, in which packs, on how many ranks
each.

Items come largest first. Each goes to the open pack with the least room, in memory and in time, that holds it
(`best_fit`). Otherwise it opens a pack on the fewest ranks that meet the makespan, if that many are left. Otherwise it
waits for another micro-batch. Ranks are assigned fastest first, so the slowest ranks get the last (smallest) packs, and
no more work than they can do. O(items x packs that are tried + packed items x (log packs + shift)).

A micro-batch takes the longest encoding of any pack plus the longest rest of any (`pricing.micro_batches_s`). Under a
makespan of 10 s a pack of 7 s of encoding and 3 s of the rest, and one of 10 s of text, make it 17 s long. With an
`encode_share` of 0.4 no pack encodes for more than 4 s or takes more than 6 s for the rest, so the micro-batch takes at
most 10 s.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dhp_ray.planner.encoders import Images, deal_more
from dhp_ray.planner.items import Item, Items, Machine, compiled_encoding_s, compiled_predicted_s, encode_s_of, time_s
from dhp_ray.planner.primitives.best_fit import OWNER, add, first_with, rooms_for, shrink
from dhp_ray.planner.primitives.compiled import compiled, inner
from dhp_ray.planner.rates import Rate, Rates

LANGUAGE, ATTENTION, VISION, ENCODE, LEAST, HOST, TOKENS = range(7)
"""Rows of the sums over open packs. ENCODE and LEAST: encoding time of the most and the least loaded rank of the pack,
at the rank's own speed. TOKENS: number of tokens. The others: seconds on one nominal rank.
"""


LOOKS = 64
"""An item with images is tried in at most so many open packs that have room for its tokens and, at first sight, time
for its images. More would take most of the planning of a huge batch, and are hardly ever of use.
"""


class MicroBatch(NamedTuple):
    """`pack[i]` is the pack of `rest[i]`, -1 if it waits.

    Pack p runs for `time[p]` seconds on `degree[p]` ranks: those that follow, by speed, after the ranks of the packs
    before it. `seconds`: those of the micro-batch (`pricing.micro_batches_s`). `makespan`: the least
    under which these packs fit. `value`: the sum over the packed items. `tokens`: their tokens.
    """

    pack: np.ndarray
    degree: np.ndarray
    time: np.ndarray
    seconds: float
    makespan: float
    value: float
    tokens: int
    complete: bool


class Fastest(NamedTuple):
    """Speeds and nodes of the ranks of `machine`, fastest first.

    linear_s, quadratic_s: seconds of language for a token and a token squared. gather_s: the least seconds of a
    micro-batch; the machine's rates do not include it, so that packs may fill it. `degrees[d]`: the least allowed
    degree from d on; beyond the last, more than there are ranks. least: the fewest ranks of a pack; the last pack of a
    micro-batch may have fewer, if no more are left.
    """

    machine: Machine
    speed: np.ndarray
    node: np.ndarray
    linear_s: float
    quadratic_s: float
    gather_s: float
    degrees: np.ndarray
    least: int


@inner
def spans_nodes(ranks: Fastest, first: int, degree: int) -> bool:
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
) -> tuple[float, float]:
    """Seconds of a pack's encoding and of its rest after adding an item. `encode_s`: of its most loaded rank, with that
    item.
    """
    rate, num_tokens = rates[degree], sums[TOKENS, pack] + item.tokens
    if encode_s > 0.0:
        encode_s += rate.encoder_pass_s / slowest
    pack_s = compiled_predicted_s(
        sums[LANGUAGE, pack] + item.language_s,
        sums[ATTENTION, pack] + item.attention_s,
        encode_s,
        sums[HOST, pack] + item.host_s,
        num_tokens,
        degree,
        slowest,
        rate.across_s if crosses else rate.inside_s,
        rate,
    )
    encode_s = compiled_encoding_s(encode_s, num_tokens, rate)
    return encode_s, pack_s - encode_s


@inner
def _alone(item: Item, degree: int, crosses: bool, slowest: float, rate: Rate) -> tuple[float, float]:
    """Seconds of an item's encoding and of its rest in a pack of its own."""
    encode_s = 0.0
    if item.image_s > 0.0:
        encode_s = (encode_s_of(item, degree) + rate.encoder_pass_s) / slowest
        encode_s = compiled_encoding_s(encode_s, item.tokens, rate)
    return encode_s, time_s(item, degree, crosses, slowest, rate) - encode_s


@inner
def _makespan(encode_s: float, rest_s: float, encode_share: float) -> float:
    """The least makespan under which a pack may encode for `encode_s` and take `rest_s` for the rest."""
    return encode_s + rest_s if encode_share == 0.0 else max(encode_s / encode_share, rest_s / (1.0 - encode_share))


@inner
def _longest(time_left: float, quadratic_s: float, linear_s: float) -> float:
    """The largest number of tokens n for which quadratic n^2 + linear n is at most `time_left`."""
    if time_left <= 0.0:
        return 0.0
    return 2.0 * time_left / (linear_s + np.sqrt(linear_s * linear_s + 4.0 * quadratic_s * time_left)) * (1.0 + 1e-9)


@compiled
def fill_micro_batch(
    items: Items, images: Images, rest: np.ndarray, value: np.ndarray, makespan: float, encode_share: float,
    ranks: Fastest, all_or_none: bool,
) -> MicroBatch:
    """Fill a micro-batch. `rest`: items, largest first, with their images. `value`: the value of each item. A pack's
    encoding may take `encode_share` of the makespan and its rest the remainder; if `encode_share` is 0, both together
    may take the makespan. It stops if the first item does not fit, and with `all_or_none` if any does not.
    """
    speed, rates, capacity = ranks.speed, ranks.machine.rates, float(ranks.machine.tokens_per_rank)
    num_ranks = len(speed)
    pack = np.full(len(rest), -1)
    limit, most_rest_s = min(num_ranks, len(rest)), makespan * (1.0 - encode_share)
    most_encode_s = makespan * encode_share if encode_share > 0.0 else makespan
    degree, first = np.zeros(limit, dtype=np.int64), np.zeros(limit, dtype=np.int64)
    seconds, sums = np.zeros((2, limit)), np.zeros((7, limit))  # seconds: of each pack's encoding, and of its rest
    encodes, busy = np.zeros(num_ranks), np.zeros(num_ranks)  # encoding seconds of each rank; and with one item more
    rooms, state = rooms_for(limit)  # tokens of the longest sequence that each open pack may take
    count, used, served, served_tokens, complete, least_makespan = 0, 0, 0.0, 0, True, ranks.gather_s
    for place in range(len(rest)):
        item = items[rest[place]]
        found, into, encode_s = first_with(rooms, state, item.tokens), -1, 0.0
        encoding_s, rest_s, looks = 0.0, 0.0, 0
        fits = item.image_s / speed[0] * (1 - 1e-12) <= most_encode_s
        while fits and found >= 0:
            into = int(rooms[OWNER, found])
            begin, end = first[into], first[into] + degree[into]
            encode_s = sums[ENCODE, into]
            if item.image_s > 0.0:  # first a lower bound, which costs less than dealing out the images
                even_s = (sums[VISION, into] + item.vision_s) / (degree[into] * speed[begin])
                encode_s = max(encode_s, max(even_s, sums[LEAST, into] + item.image_s / speed[begin]) * (1 - 1e-12))
                if encode_s * (1 - 1e-12) > most_encode_s:
                    found -= 1
                    continue
            crosses = spans_nodes(ranks, begin, degree[into])
            encoding_s, rest_s = _with_item(item, sums, into, encode_s, degree[into], speed[end - 1], crosses, rates)
            if item.image_s > 0.0 and _makespan(encoding_s, rest_s, encode_share) <= makespan:
                busy[: degree[into]] = encodes[begin:end]
                encode_s = deal_more(images, rest[place], speed[begin:end], busy[: degree[into]])
                encoding_s, rest_s = _with_item(
                    item, sums, into, encode_s, degree[into], speed[end - 1], crosses, rates)
            if _makespan(encoding_s, rest_s, encode_share) <= makespan:
                break
            looks += item.image_s > 0.0
            found = found - 1 if looks < LOOKS else -1
        if not fits or found < 0:
            need = num_ranks + 1
            if fits and used < num_ranks:
                need = max(item.minimum_degree, int(item.language_s / (most_rest_s * speed[used])))
                need = max(need, min(ranks.least, num_ranks - used))
            need = ranks.degrees[min(need, num_ranks + 1)]
            while used + need <= num_ranks:
                encoding_s, rest_s = _alone(
                    item, need, spans_nodes(ranks, used, need), speed[used + need - 1], rates[need])
                if _makespan(encoding_s, rest_s, encode_share) <= makespan:
                    break
                need = ranks.degrees[need + 1]
            if used + need > num_ranks:
                complete = False
                if all_or_none or place == 0:
                    break
                continue
            into = count
            degree[into], first[into] = need, used
            least_makespan = max(least_makespan, _makespan(encoding_s, rest_s, encode_share))
            if item.image_s > 0.0:
                busy[:need] = 0.0
                encode_s = deal_more(images, rest[place], speed[used : used + need], busy[:need])
                encoding_s, rest_s = _with_item(
                    item, sums, into, encode_s, need, speed[used + need - 1], spans_nodes(ranks, used, need), rates)
            used += need
            count += 1
        else:
            least_makespan = max(least_makespan, _makespan(encoding_s, rest_s, encode_share))
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
        seconds[0, into], seconds[1, into] = encoding_s, rest_s
        # The longest sequence that the pack may still take: an upper bound if it has images or attention hides
        # communication.
        rate, speed_sum, left_s = (
            rates[degree[into]],
            degree[into] * speed[first[into] + degree[into] - 1],
            most_rest_s - rest_s - (encoding_s if encode_share == 0.0 else 0.0),
        )
        transfer_s = rate.across_s if spans_nodes(ranks, first[into], degree[into]) else rate.inside_s
        if rate.overlap > 0.0:
            hidden_s = rate.overlap * sums[ATTENTION, into] * degree[into] / speed_sum
            left_s += max(0.0, transfer_s * sums[TOKENS, into] - hidden_s)
            transfer_s = 0.0
        longest = min(
            degree[into] * capacity - sums[TOKENS, into],
            _longest(left_s, ranks.quadratic_s / speed_sum, ranks.linear_s / speed_sum + transfer_s),
        )
        if found >= 0:
            shrink(rooms, state, found, longest)
        else:
            add(rooms, state, longest, into)
    return MicroBatch(
        pack,
        degree[:count],
        np.maximum(seconds[0, :count] + seconds[1, :count], ranks.gather_s),
        max(seconds[0].max() + seconds[1].max(), ranks.gather_s),
        least_makespan,
        served,
        served_tokens,
        complete,
    )
