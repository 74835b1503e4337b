"""Exchanges sequences between the packs of a plan, so that micro-batches become shorter. Packs keep their ranks.

A micro-batch takes the longest encoding of any pack plus the longest rest of any (`pricing.micro_batches_s`). One of
these two packs gives a sequence to another pack, or swaps it for one with less to encode, or less of the rest; if that
no longer helps, a pack of few sequences may also give two at once (`parts.py`). The other pack may be in the same
micro-batch, or in another one that has time for the difference. A micro-batch on two ranks that hold 10 tokens each; a
token takes 1 s, and 1 s more to encode in a sequence with images (i):

    before   i3 i3 t4   6 s + 10 s       swap i3 and t3: 3 s move        after   i3 t3 t4   3 s + 10 s
             t4 t3 t3         10 s                                               t4 i3 t3   3 s + 10 s

The exchanges that memory allows are sorted by an estimate of how long the micro-batch then takes, and how much longer
the other one; if these are equal, by the longest encoding plus the longest rest of the micro-batch's packs that
change. A pack's encoding and its rest change by the difference in work, divided by its ranks and their slowest speed,
and by what the pack then recomputes (waits for copies to host memory are taken not to change). The search makes the
first exchange that shortens the two micro-batches together, by exact times. If several packs are equally long, it also
makes an exchange that shortens the giver's encoding or rest and lengthens neither micro-batch. One such exchange may
undo another, so it makes at most as many as there are packs until a micro-batch gets shorter.
Micro-batches take turns, except those that wait for their layers' parameters. The search ends after a round of single
sequences and then a round with pairs, both without an exchange, or once `effort` is used up.
O(turns x sequences of a pack x sequences).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dhp_ray.planner.items import compiled_share_of
from dhp_ray.planner.parts import (
    BETTER,
    EFFORT,
    FEW,
    Batch,
    Groups,
    Parts,
    described,
    held_by,
    in_packs,
    move,
    pack_s,
    parts_of,
)
from dhp_ray.planner.pricing import PackTimes, times_of
from dhp_ray.planner.primitives.compiled import compiled, inner
from dhp_ray.planner.problem import Problem
from dhp_ray.planner.rates import Rate, Rates
from dhp_ray.planner.schedule import Schedule

TRIES = 6
"""The most exchanges of a micro-batch that are tried by exact times in one turn."""

NONE, EVENER, SHORTER = 0, 1, 2
"""What the exchange of a turn did."""


class Longest(NamedTuple):
    """By micro-batch, the three packs that take longest for something, the longest first, and their seconds (-1 and 0
    where there are fewer).
    """

    pack: np.ndarray
    seconds: np.ndarray


class Loads(NamedTuple):
    """By pack: the tokens that it holds at most, its ranks times the slowest one's speed, and the seconds of its
    encoding and of its rest without what it recomputes.
    """

    capacity: np.ndarray
    speed: np.ndarray
    encode_s: np.ndarray
    rest_s: np.ndarray


def with_exchanges(problem: Problem, schedule: Schedule, effort: float = EFFORT) -> tuple[Schedule, float]:
    """A schedule with the same groups in the same order that takes at most as long as `schedule` with the sequences of
    each pack in the batch's order (in which images are dealt to members); and the effort that took (it may be a little
    more than `effort`)."""
    batch, groups, pack_of = described(problem, schedule)
    before = in_packs(schedule, pack_of)
    compared = exchange(
        batch, groups, problem.machine.rates, pack_of, times_of(problem, before), held_by(batch, before), effort)
    return in_packs(schedule, pack_of), compared


@compiled
def exchange(
    batch: Batch, groups: Groups, rates: Rates, pack_of: np.ndarray, times: PackTimes, held: np.ndarray, effort: float,
) -> float:
    """Exchange sequences; return the effort: the exchanges that were compared, the parts that were listed, and the
    sequences of exact timings. No turn begins once `effort` is used up, and none compares more than what is left of
    it. `pack_of`: the pack of each sequence. `times` and `held`: the times and tokens of each pack. All three are
    updated."""
    num_packs, num_micro_batches = len(groups.slowest), groups.micro_batch.max() + 1
    left = num_micro_batches  # turns until a round has brought nothing
    turn, compared, few, evened = 0, 0.0, 1, 0
    while left > 0 and compared < effort:
        parts = parts_of(batch, pack_of, num_packs, few)
        found, num_compared = _exchanged(batch, groups, rates, pack_of, times, held, turn % num_micro_batches, parts,
                                         effort - compared, evened < num_packs)
        left = left - 1 if found == NONE else num_micro_batches
        evened = 0 if found == SHORTER else evened + (found == EVENER)
        turn, compared = turn + 1, compared + num_compared + len(parts.pack)
        if left == 0 and few < FEW:
            left, few = num_micro_batches, FEW
    return compared


@inner
def _longest(groups: Groups, seconds: np.ndarray) -> Longest:
    """The longest three of each micro-batch. `seconds`: those of each pack."""
    count = groups.micro_batch.max() + 1
    longest = Longest(np.full((count, 3), -1), np.zeros((count, 3)))
    for pack in range(len(seconds)):
        number, place = groups.micro_batch[pack], 3
        while place > 0 and seconds[pack] > longest.seconds[number, place - 1]:
            place -= 1
            if place < 2:
                longest.pack[number, place + 1] = longest.pack[number, place]
                longest.seconds[number, place + 1] = longest.seconds[number, place]
        if place < 3:
            longest.pack[number, place], longest.seconds[number, place] = pack, seconds[pack]
    return longest


@inner
def _without(longest: Longest, number: int, giver: int, other: int) -> float:
    """The longest seconds of a micro-batch's packs but these two."""
    for place in range(3):
        if longest.pack[number, place] != giver and longest.pack[number, place] != other:
            return float(longest.seconds[number, place])
    return 0.0


@inner
def _micro_batch_s(groups: Groups, times: PackTimes, number: int) -> float:
    """Seconds of a micro-batch (`pricing.micro_batches_s`)."""
    pack_s, encode_s, rest_s = 0.0, 0.0, 0.0
    for pack in range(len(times.pack_s)):
        if groups.micro_batch[pack] == number:
            pack_s = max(pack_s, times.pack_s[pack])
            encode_s, rest_s = max(encode_s, times.encode_s[pack]), max(rest_s, times.rest_s[pack])
    return max(pack_s, encode_s + rest_s)


@inner
def _exchanged(
    batch: Batch, groups: Groups, rates: Rates, pack_of: np.ndarray, times: PackTimes, held: np.ndarray, number: int,
    parts: Parts, most: float, evens: bool,
) -> tuple[int, float]:
    """Make one exchange of the packs of a micro-batch with the longest rest and the longest encoding. Return SHORTER if
    the micro-batches got shorter, EVENER if only packs got more even (allowed if `evens`), or NONE; and the effort. If
    there are more than `most` to compare, there is none. `times` and `held`: the times and tokens of each pack."""
    encode, rest = _longest(groups, times.encode_s), _longest(groups, times.rest_s)
    if _micro_batch_s(groups, times, number) > (encode.seconds[number, 0] + rest.seconds[number, 0]) * (1.0 + 1e-9):
        return NONE, 0.0  # it waits for its layers' parameters
    found, compared, loads = np.full((4, TRIES), np.inf), 0.0, _loads(groups, batch.tokens_per_rank, rates, times, held)
    givers = rest.pack[number, 0], encode.pack[number, 0] if encode.pack[number, 0] != rest.pack[number, 0] else -1
    for giver in givers:
        compared += float((parts.pack == giver).sum() * len(parts.pack))
    if compared > most:
        return NONE, 0.0
    for giver in givers:
        if giver >= 0:
            _add_candidates(found, parts, groups, rates, loads, held, (encode, rest), giver)
    for place in range(TRIES):
        if found[0, place] == np.inf:
            return NONE, compared
        given, taken = int(found[2, place]), int(found[3, place])
        giver, other = parts.pack[given], parts.pack[taken]
        elsewhere, inside = groups.micro_batch[other], groups.micro_batch[other] == number
        move(parts, given, other, pack_of)
        move(parts, taken, giver, pack_of)
        compared += len(pack_of)
        mine = times.pack_s[giver], times.encode_s[giver], times.rest_s[giver]
        others = times.pack_s[other], times.encode_s[other], times.rest_s[other]
        before_s, there_s = _micro_batch_s(groups, times, number), _micro_batch_s(groups, times, elsewhere)
        times.pack_s[giver], times.encode_s[giver], times.rest_s[giver], tokens = pack_s(
            batch, groups, rates, giver, pack_of)
        times.pack_s[other], times.encode_s[other], times.rest_s[other], other_tokens = pack_s(
            batch, groups, rates, other, pack_of)
        rise_s = _micro_batch_s(groups, times, number) - before_s
        rise_there_s = 0.0 if inside else _micro_batch_s(groups, times, elsewhere) - there_s
        encode_s = max(times.encode_s[giver], times.encode_s[other] if inside else 0.0)
        rest_s = max(times.rest_s[giver], times.rest_s[other] if inside else 0.0)
        less_s = before_s * BETTER
        closer = (giver == rest.pack[number, 0] and rest_s < mine[2] - less_s) or (
            giver == encode.pack[number, 0] and encode_s < mine[1] - less_s)
        if rise_s + rise_there_s < -less_s or (evens and rise_s <= 0.0 and rise_there_s <= 0.0 and closer):
            held[giver], held[other] = tokens, other_tokens
            return SHORTER if rise_s + rise_there_s < -less_s else EVENER, compared
        times.pack_s[giver], times.encode_s[giver], times.rest_s[giver] = mine
        times.pack_s[other], times.encode_s[other], times.rest_s[other] = others
        move(parts, given, giver, pack_of)
        move(parts, taken, other, pack_of)
    return NONE, compared


@inner
def _loads(groups: Groups, tokens_per_rank: int, rates: Rates, times: PackTimes, held: np.ndarray) -> Loads:
    num_packs = len(held)
    loads = Loads(np.zeros(num_packs), np.zeros(num_packs), np.zeros(num_packs), np.zeros(num_packs))
    for pack in range(num_packs):
        degree = groups.first[pack + 1] - groups.first[pack]
        rate = rates[degree]
        share = compiled_share_of(held[pack], rate) if rate.again > 0.0 else 0.0
        loads.capacity[pack], loads.speed[pack] = degree * tokens_per_rank, degree * groups.slowest[pack]
        loads.encode_s[pack] = times.encode_s[pack] / (1.0 + share * rate.encoded_again)
        loads.rest_s[pack] = times.rest_s[pack] / (1.0 + share * rate.again)
    return loads


@inner
def _estimated(loads: Loads, pack: int, encoding: float, more: float, tokens: float, rate: Rate) -> tuple[float, float]:
    """Seconds of a pack's encoding and of its rest after it gets `encoding` and `more` seconds of work (of one nominal
    rank; negative: less) and holds `tokens` tokens."""
    encode_s = loads.encode_s[pack] + encoding / loads.speed[pack]
    rest_s = loads.rest_s[pack] + more / loads.speed[pack]
    if rate.again == 0.0:
        return encode_s, rest_s
    share = compiled_share_of(tokens, rate)
    return encode_s * (1.0 + share * rate.encoded_again), rest_s * (1.0 + share * rate.again)


@inner
def _add_candidates(
    found: np.ndarray, parts: Parts, groups: Groups, rates: Rates, loads: Loads, held: np.ndarray,
    longest: tuple[Longest, Longest], giver: int,
) -> None:
    """Add the exchanges of a pack to `found` (4, TRIES), the best first: estimated seconds of its micro-batch then,
    plus those that another one takes longer (infinite: there is no such exchange); the longest encoding plus the
    longest rest of the two packs, or of the giver if the other pack is in another micro-batch; the part that is given,
    and the one that is taken. `longest`: encodings and rests."""
    encode, rest = longest
    num_packs, number, size = len(held), groups.micro_batch[giver], 0
    before_s = encode.seconds[number, 0] + rest.seconds[number, 0]
    rate = rates[groups.first[giver + 1] - groups.first[giver]]
    for part in range(num_packs, len(parts.pack)):
        size += parts.pack[part] == giver and parts.second[part] < 0
    for given in range(num_packs, len(parts.pack)):
        if parts.pack[given] != giver:
            continue
        gives_all = size <= 1 + (parts.second[given] >= 0)
        for taken in range(num_packs if gives_all else 0, len(parts.pack)):  # for nothing only if a sequence stays
            other, encoding = parts.pack[taken], parts.encoding[given] - parts.encoding[taken]
            more = parts.work[given] - parts.work[taken] - encoding
            if other == giver or not ((more > 0.0 and giver == rest.pack[number, 0])
                                      or (encoding > 0.0 and giver == encode.pack[number, 0])):
                continue
            tokens = parts.tokens[given] - parts.tokens[taken]
            if held[other] + tokens > loads.capacity[other] or (
                tokens < 0 and held[giver] - tokens > loads.capacity[giver]
            ):
                continue
            encode_s, rest_s = _estimated(loads, giver, -encoding, -more, held[giver] - tokens, rate)
            other_rate = rates[groups.first[other + 1] - groups.first[other]]
            other_encode_s, other_rest_s = _estimated(loads, other, encoding, more, held[other] + tokens, other_rate)
            elsewhere, after_s = groups.micro_batch[other], 0.0
            if elsewhere == number:
                encode_s, rest_s = max(encode_s, other_encode_s), max(rest_s, other_rest_s)
            else:
                after_s = max(_without(encode, elsewhere, other, other), other_encode_s) - encode.seconds[elsewhere, 0]
                after_s += max(_without(rest, elsewhere, other, other), other_rest_s) - rest.seconds[elsewhere, 0]
            after_s += max(_without(encode, number, giver, other), encode_s)
            after_s += max(_without(rest, number, giver, other), rest_s)
            if after_s > before_s:
                continue
            _insert(found, after_s, encode_s + rest_s, given, taken)


@inner
def _insert(found: np.ndarray, after_s: float, pair_s: float, given: int, taken: int) -> None:
    """Insert an exchange into `found` (4, TRIES), which is sorted by its first two rows, if it is one of the best."""
    place = TRIES
    while place > 0 and (after_s, pair_s) < (found[0, place - 1], found[1, place - 1]):
        place -= 1
        if place + 1 < TRIES:
            found[:, place + 1] = found[:, place]
    if place < TRIES:
        found[0, place], found[1, place], found[2, place], found[3, place] = after_s, pair_s, given, taken
