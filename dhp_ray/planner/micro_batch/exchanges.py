"""Exchanges sequences between the packs of a plan, so that micro-batches become shorter. Packs keep their ranks.

The slowest pack of a micro-batch gives a sequence to another pack, or swaps it for one with less work; if that no
longer helps, a pack of few sequences may also give two at once (`parts.py`). The other pack may be in the same
micro-batch, or in another one that has time for the difference. A micro-batch on two ranks that hold 10 tokens each; a
token takes 1 s, and 1 s more to encode in a sequence with images (i). Ranks meet after encoding:

    before   i3 i3 t4   6 s + 10 s       swap i3 and t3: 3 s move        after   i3 t3 t4   3 s + 10 s
             t4 t3 t3         10 s                                               t4 i3 t3   3 s + 10 s

The exchanges that memory allows are sorted by an estimate of how long the slowest pack then takes: the difference in
work, divided by the ranks of a pack and its slowest speed. If the other micro-batch's slowest pack becomes longer, that
is added. The first one is made that, by exact times, shortens the two micro-batches together; or, if several packs are
equally slow, after which the slowest one ends earlier and neither micro-batch later than before. Micro-batches take
turns: at most as many as there are sequences, until EFFORT is used up or a whole round brings nothing. O(turns x
sequences of a pack x sequences).
"""

from __future__ import annotations

import numpy as np

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
from dhp_ray.planner.rates import Rates
from dhp_ray.planner.schedule import Schedule

TRIES = 6
"""The most exchanges of a pack that are tried by exact times in one turn."""


def with_exchanges(problem: Problem, schedule: Schedule) -> Schedule:
    """A schedule with the same groups in the same order that takes at most as long as `schedule` with the sequences of
    each pack in the batch's order (in which images are dealt to members)."""
    batch, groups, pack_of = described(problem, schedule)
    before = in_packs(schedule, pack_of)
    exchange(batch, groups, problem.machine.rates, pack_of, times_of(problem, before), held_by(batch, before))
    return in_packs(schedule, pack_of)


@compiled
def exchange(
    batch: Batch, groups: Groups, rates: Rates, pack_of: np.ndarray, times: PackTimes, held: np.ndarray
) -> None:
    """Exchange sequences. `pack_of`: the pack of each one. `times` and `held`: seconds and tokens of each pack. All are
    updated."""
    num_packs, num_micro_batches = len(groups.slowest), groups.micro_batch.max() + 1
    longest_s = np.zeros(num_micro_batches)
    for pack in range(num_packs):
        longest_s[groups.micro_batch[pack]] = max(longest_s[groups.micro_batch[pack]], times.pack_s[pack])
    left = num_micro_batches  # turns in a row that bring nothing
    turn, compared, few = 0, 0.0, 1
    while left > 0 and turn < len(pack_of) and compared < EFFORT:
        parts = parts_of(batch, pack_of, num_packs, few)
        shortened, num_compared = _shorten(
            batch, groups, rates, pack_of, times, held, longest_s, turn % num_micro_batches, parts, EFFORT - compared)
        left = num_micro_batches if shortened else left - 1
        turn, compared = turn + 1, compared + num_compared
        if left == 0 and few < FEW:
            left, few = num_micro_batches, FEW


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
def _shorten(
    batch: Batch, groups: Groups, rates: Rates, pack_of: np.ndarray, times: PackTimes, held: np.ndarray,
    longest_s: np.ndarray, number: int, parts: Parts, most: float,
) -> tuple[bool, float]:
    """Make one exchange of the slowest pack of a micro-batch; return whether there was one, and how many were compared.
    If more than `most` would have to be compared: none, and infinitely many. `times` and `held`: the times and tokens
    of each pack. `longest_s`: seconds of the slowest pack of each micro-batch."""
    packs_s = times.pack_s
    slowest, second, second_s, third_s = -1, -1, 0.0, 0.0
    for pack in range(len(packs_s)):
        if groups.micro_batch[pack] == number:
            if slowest < 0 or packs_s[pack] > packs_s[slowest]:
                slowest, second = pack, slowest
                third_s, second_s = second_s, packs_s[second] if second >= 0 else 0.0
            elif packs_s[pack] > second_s:
                second, second_s, third_s = pack, packs_s[pack], second_s
            else:
                third_s = max(third_s, packs_s[pack])
    compared = float((parts.pack == slowest).sum() * len(parts.pack))
    if compared > most:
        return False, np.inf
    found = _candidates(
        parts, groups, batch.tokens_per_rank, packs_s, held, longest_s, slowest, (second, second_s, third_s))
    for place in range(TRIES):
        if found[0, place] == np.inf:
            return False, compared
        given, taken = int(found[2, place]), int(found[3, place])
        other = parts.pack[taken]
        move(parts, given, other, pack_of)
        move(parts, taken, slowest, pack_of)
        compared += len(pack_of)
        elsewhere = groups.micro_batch[other]
        mine = packs_s[slowest], times.encode_s[slowest], times.rest_s[slowest]
        others = packs_s[other], times.encode_s[other], times.rest_s[other]
        before_s, less_s = _micro_batch_s(groups, times, number), longest_s[number] * BETTER
        there_s = _micro_batch_s(groups, times, elsewhere)
        packs_s[slowest], times.encode_s[slowest], times.rest_s[slowest], tokens = pack_s(
            batch, groups, rates, slowest, pack_of)
        packs_s[other], times.encode_s[other], times.rest_s[other], other_tokens = pack_s(
            batch, groups, rates, other, pack_of)
        rise_s = _micro_batch_s(groups, times, number) - before_s
        rise_there_s = _micro_batch_s(groups, times, elsewhere) - there_s if elsewhere != number else 0.0
        ends_s = max(packs_s[slowest], packs_s[other]) if elsewhere == number else packs_s[slowest]
        shorter = rise_s + rise_there_s < -less_s
        if shorter or (rise_s <= 0.0 and rise_there_s <= 0.0 and ends_s < mine[0] - less_s):
            held[slowest], held[other] = tokens, other_tokens
            longest_s[number] = longest_s[elsewhere] = 0.0
            for pack in range(len(packs_s)):
                of_pack = groups.micro_batch[pack]
                if of_pack in (number, elsewhere):
                    longest_s[of_pack] = max(longest_s[of_pack], packs_s[pack])
            return True, compared
        packs_s[slowest], times.encode_s[slowest], times.rest_s[slowest] = mine
        packs_s[other], times.encode_s[other], times.rest_s[other] = others
        move(parts, given, slowest, pack_of)
        move(parts, taken, other, pack_of)
    return False, compared


@inner
def _candidates(
    parts: Parts, groups: Groups, tokens_per_rank: int, times: np.ndarray, held: np.ndarray, longest_s: np.ndarray,
    slowest: int, others: tuple[int, float, float],
) -> np.ndarray:
    """(4, TRIES): exchanges of the slowest pack of a micro-batch, the best first: estimated seconds of its slowest pack
    then, plus those that the slowest one of another takes longer (infinite: there is no such exchange); work that
    moves; the part that is given, and the one that is taken. `others`: the second slowest pack, its seconds, and those
    of the third."""
    num_packs, size = len(times), 0
    second, second_s, third_s = others
    found, capacity, speeds = np.full((4, TRIES), np.inf), np.zeros(num_packs), np.zeros(num_packs)
    for pack in range(num_packs):
        degree = groups.first[pack + 1] - groups.first[pack]
        capacity[pack], speeds[pack] = degree * tokens_per_rank, degree * groups.slowest[pack]
    for part in range(num_packs, len(parts.pack)):
        size += parts.pack[part] == slowest and parts.second[part] < 0
    for given in range(num_packs, len(parts.pack)):
        if parts.pack[given] != slowest:
            continue
        gives_all = size <= 1 + (parts.second[given] >= 0)
        for taken in range(num_packs if gives_all else 0, len(parts.pack)):  # for nothing only if a sequence stays
            other, more = parts.pack[taken], parts.work[given] - parts.work[taken]
            if other == slowest or more <= 0.0:
                continue
            other_s, longest = times[other] + more / speeds[other], longest_s[groups.micro_batch[other]]
            inside = groups.micro_batch[other] == groups.micro_batch[slowest]
            if other_s >= longest + (0.0 if inside else times[slowest]):
                continue
            tokens = parts.tokens[given] - parts.tokens[taken]
            if held[other] + tokens > capacity[other] or (tokens < 0 and held[slowest] - tokens > capacity[slowest]):
                continue
            after_s = max(times[slowest] - more / speeds[slowest], third_s if other == second else second_s)
            after_s = max(after_s, other_s) if inside else after_s + max(0.0, other_s - longest)
            if after_s > times[slowest]:
                continue
            _insert(found, after_s, more, given, taken)
    return found


@inner
def _insert(found: np.ndarray, after_s: float, more: float, given: int, taken: int) -> None:
    """Insert an exchange into `found` (4, TRIES), which is sorted by its first two rows, if it is one of the best."""
    place = TRIES
    while place > 0 and (after_s, more) < (found[0, place - 1], found[1, place - 1]):
        place -= 1
        if place + 1 < TRIES:
            found[:, place + 1] = found[:, place]
    if place < TRIES:
        found[0, place], found[1, place], found[2, place], found[3, place] = after_s, more, given, taken
