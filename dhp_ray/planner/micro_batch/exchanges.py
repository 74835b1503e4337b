"""Exchanges sequences between the packs of a plan, so that micro-batches become shorter. Packs keep their ranks.

A micro-batch takes as long as its slowest pack. That pack gives a sequence to another pack, or swaps it for one with
less work. The other pack may be in the same micro-batch, or in another one that has time for the difference. A
micro-batch on two ranks that hold 10 tokens each; a token takes 1 s, and 2 s in a sequence with images (i):

    before   i3 i3 t4   16 s       swap i3 and t3: 3 s move        after   i3 t3 t4   13 s
             t4 t3 t3   10 s                                               t4 i3 t3   13 s

The exchanges that memory allows are sorted by an estimate of how long the micro-batch then takes: the difference in
work, divided by the ranks of a pack and its slowest speed. If the other micro-batch becomes longer, that is added. The
first one is made that, by exact times, shortens the two micro-batches together; or, if several packs are equally slow,
after which the slowest one ends earlier and nothing later than before. Micro-batches take turns: at most as many as
there are sequences, until EFFORT is used up or a whole round brings nothing.
O(turns x sequences of a pack x sequences).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dhp_ray.planner.encoders import longest_member_s
from dhp_ray.planner.items import Items, compiled_predicted_s
from dhp_ray.planner.pricing import times_of
from dhp_ray.planner.primitives.compiled import compiled, inner
from dhp_ray.planner.problem import Problem
from dhp_ray.planner.rates import Rates
from dhp_ray.planner.schedule import Schedule, by_owner, crosses_nodes

BETTER = 1e-6
"""The share of a micro-batch's time that counts as shorter."""

EFFORT = 1e7
"""The most pairs of sequences that turns compare, if packs are alike; some 20 ms. Ten times as much shortens plans of
thousands of sequences by 0.02 % at most."""

TRIES = 6
"""The most exchanges of a pack that are tried by exact times in one turn."""


class Batch(NamedTuple):
    """The sequences, the work of each (seconds of one rank), their images (seconds, those of sequence i from
    first_image[i] on), and the tokens of a pack that a rank holds."""

    items: Items
    work: np.ndarray
    first_image: np.ndarray
    image_s: np.ndarray
    tokens_per_rank: int


class Groups(NamedTuple):
    """Pack p runs on the members first[p] to first[p + 1], which have `speeds`. By pack: its micro-batch, its slowest
    speed, and the seconds of communication for each token."""

    first: np.ndarray
    speeds: np.ndarray
    micro_batch: np.ndarray
    slowest: np.ndarray
    transfer_s: np.ndarray


def with_exchanges(problem: Problem, schedule: Schedule) -> Schedule:
    """A schedule with the same groups in the same order, whose packs are at most as long as with their sequences in the
    batch's order (in which images are dealt to members)."""
    degree = np.diff(schedule.first_rank)
    rates, speeds = problem.machine.rates, problem.speeds[schedule.ranks]
    crosses = crosses_nodes(schedule, np.array(problem.cluster.nodes))
    groups = Groups(schedule.first_rank, speeds, schedule.micro_batch,
                    np.minimum.reduceat(speeds, schedule.first_rank[:-1]),
                    np.where(crosses, rates[degree].across_s, rates[degree].inside_s))
    work = problem.items.language_s + problem.items.vision_s
    batch = Batch(problem.items, work, problem.first_image, problem.all_image_s, problem.machine.tokens_per_rank)
    pack_of = np.empty(len(problem.items), dtype=np.int64)
    pack_of[schedule.rows] = np.repeat(np.arange(len(degree)), np.diff(schedule.first_row))
    before = _in_packs(schedule, pack_of)
    held = np.add.reduceat(problem.items.tokens[before.rows], before.first_row[:-1]).astype(np.float64)
    exchange(batch, groups, rates, pack_of, times_of(problem, before), held)
    return _in_packs(schedule, pack_of)


def _in_packs(schedule: Schedule, pack_of: np.ndarray) -> Schedule:
    """The sequences in these packs, each pack in the order of the batch: so `_pack_s` deals images to members."""
    rows, first_row = by_owner(pack_of, len(schedule.first_row) - 1)
    return schedule._replace(rows=rows, first_row=first_row)


@compiled
def exchange(
    batch: Batch, groups: Groups, rates: Rates, pack_of: np.ndarray, times: np.ndarray, held: np.ndarray
) -> None:
    """Exchange sequences. `pack_of`: the pack of each one. `times` and `held`: seconds and tokens of each pack. All are
    updated."""
    num_packs, num_micro_batches = len(groups.slowest), groups.micro_batch.max() + 1
    longest_s = np.zeros(num_micro_batches)
    for pack in range(num_packs):
        longest_s[groups.micro_batch[pack]] = max(longest_s[groups.micro_batch[pack]], times[pack])
    left = num_micro_batches  # turns in a row that bring nothing
    of_a_turn = len(pack_of) * (len(pack_of) / num_packs + 2 * TRIES)
    for turn in range(min(len(pack_of), int(EFFORT / of_a_turn))):
        number = turn % num_micro_batches
        shortened = _shorten(batch, groups, rates, pack_of, times, held, longest_s, number)
        left = num_micro_batches if shortened else left - 1
        if left == 0:
            break


@inner
def _shorten(
    batch: Batch, groups: Groups, rates: Rates, pack_of: np.ndarray, times: np.ndarray, held: np.ndarray,
    longest_s: np.ndarray, number: int,
) -> bool:
    """Make one exchange of the slowest pack of a micro-batch; return whether there was one. `times` and `held`: seconds
    and tokens of each pack. `longest_s`: seconds of each micro-batch."""
    slowest, second, second_s, third_s = -1, -1, 0.0, 0.0
    for pack in range(len(times)):
        if groups.micro_batch[pack] == number:
            if slowest < 0 or times[pack] > times[slowest]:
                slowest, second = pack, slowest
                third_s, second_s = second_s, times[second] if second >= 0 else 0.0
            elif times[pack] > second_s:
                second, second_s, third_s = pack, times[pack], second_s
            else:
                third_s = max(third_s, times[pack])
    found = _candidates(batch, groups, pack_of, times, held, longest_s, slowest, (second, second_s, third_s))
    for place in range(TRIES):
        if found[0, place] == np.inf:
            return False
        given, taken, other = int(found[2, place]), int(found[3, place]), int(found[4, place])
        pack_of[given] = other
        if taken >= 0:
            pack_of[taken] = slowest
        seconds, tokens = _pack_s(batch, groups, rates, slowest, pack_of)
        other_s, other_tokens = _pack_s(batch, groups, rates, other, pack_of)
        elsewhere, limit_s = groups.micro_batch[other], longest_s[number] * (1.0 - BETTER)
        if elsewhere == number:
            better = max(seconds, other_s) < limit_s
        else:
            rise_s = max(0.0, other_s - longest_s[elsewhere])
            after_s = max(seconds, third_s if other == second else second_s)
            better = seconds < limit_s if rise_s == 0.0 else after_s + rise_s < limit_s
        if better:
            times[slowest], held[slowest], times[other], held[other] = seconds, tokens, other_s, other_tokens
            longest_s[number] = longest_s[elsewhere] = 0.0
            for pack in range(len(times)):
                of_pack = groups.micro_batch[pack]
                if of_pack in (number, elsewhere):
                    longest_s[of_pack] = max(longest_s[of_pack], times[pack])
            return True
        pack_of[given] = slowest
        if taken >= 0:
            pack_of[taken] = other
    return False


@inner
def _candidates(
    batch: Batch, groups: Groups, pack_of: np.ndarray, times: np.ndarray, held: np.ndarray, longest_s: np.ndarray,
    slowest: int, others: tuple[int, float, float],
) -> np.ndarray:
    """(5, TRIES): exchanges of the slowest pack of a micro-batch, the best first: estimated seconds of the micro-batch,
    plus those that another one takes longer (infinite: there is no such exchange); work that moves; the sequence that
    is given, the one that is taken (-1: none), and the other pack. `others`: the second slowest pack, its seconds, and
    those of the third."""
    items, num_packs = batch.items, len(times)
    second, second_s, third_s = others
    found, capacity, speeds = np.full((5, TRIES), np.inf), np.zeros(num_packs), np.zeros(num_packs)
    for pack in range(num_packs):
        degree = groups.first[pack + 1] - groups.first[pack]
        capacity[pack], speeds[pack] = degree * batch.tokens_per_rank, degree * groups.slowest[pack]
    count = 0
    for row in range(len(items)):
        count += pack_of[row] == slowest
    for given in range(len(items)):
        if pack_of[given] != slowest:
            continue
        for taken in range(-num_packs if count > 1 else 0, len(items)):  # below 0: none of pack -1 - taken
            more, tokens, other = batch.work[given], items[given].tokens, -1 - taken
            if taken >= 0:
                more, tokens, other = more - batch.work[taken], tokens - items[taken].tokens, pack_of[taken]
            if other == slowest or more <= 0.0:
                continue
            other_s, longest = times[other] + more / speeds[other], longest_s[groups.micro_batch[other]]
            inside = groups.micro_batch[other] == groups.micro_batch[slowest]
            if other_s >= longest + (0.0 if inside else times[slowest]):
                continue
            if held[other] + tokens > capacity[other] or (tokens < 0 and held[slowest] - tokens > capacity[slowest]):
                continue
            after_s = max(times[slowest] - more / speeds[slowest], third_s if other == second else second_s)
            after_s = max(after_s, other_s) if inside else after_s + max(0.0, other_s - longest)
            if after_s > times[slowest]:
                continue
            place = TRIES
            while place > 0 and (after_s, more) < (found[0, place - 1], found[1, place - 1]):
                place -= 1
                if place + 1 < TRIES:
                    found[:, place + 1] = found[:, place]
            if place < TRIES:
                found[0, place], found[1, place], found[2, place] = after_s, more, given
                found[3, place], found[4, place] = max(taken, -1), other
    return found


@inner
def _pack_s(batch: Batch, groups: Groups, rates: Rates, pack: int, pack_of: np.ndarray) -> tuple[float, float]:
    """(seconds, tokens) of a pack."""
    language_s, attention_s, host_s, tokens, count, num_images = 0.0, 0.0, 0.0, 0.0, 0, 0
    for row in range(len(pack_of)):
        if pack_of[row] == pack:
            item = batch.items[row]
            language_s += item.language_s
            attention_s += item.attention_s
            host_s += item.host_s
            tokens += item.tokens
            num_images += item.image_s > 0.0
            count += 1
    degree, encode_s = groups.first[pack + 1] - groups.first[pack], 0.0
    rate = rates[degree]
    if num_images > 0:
        rows, count = np.zeros(count, dtype=np.int64), 0
        for row in range(len(pack_of)):
            if pack_of[row] == pack:
                rows[count] = row
                count += 1
        encode_s = longest_member_s(
            rows, batch.first_image, batch.image_s, groups.speeds[groups.first[pack] : groups.first[pack + 1]])
        encode_s += rate.encoder_pass_s / groups.slowest[pack]
    seconds = compiled_predicted_s(language_s, attention_s, encode_s, host_s, tokens, degree, groups.slowest[pack],
                                   groups.transfer_s[pack], rate)
    return seconds, tokens
