"""The constructor for sync=micro_batch: micro-batches one after another, each filled under a limit of its time.

A micro-batch takes the longest encoding of any pack plus the longest rest of any. So a limit may be divided in two: a
share for encoding, and the remainder for the rest of a pack (`ENCODE_FACTORS` of encoding's share of all work).

The largest sequence that is left is in the next micro-batch. Limits are tried down to its least time; those are
followed with the least sum of the micro-batch's time and `waste` times the bound of what it leaves. A micro-batch takes
sequences largest first, each to the pack with the least time left that holds it; else on the fewest unused ranks on
which it ends by the limit. Then the limit is bisected for the same sequences. Where several least degrees of packs are
tried, each micro-batch takes the one that suits it: large sequences on many ranks in one, small ones on single ranks in
the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dhp_ray.planner.bound import limits_of
from dhp_ray.planner.cost.rates import encoding_s, running_s
from dhp_ray.planner.primitives.best_fit import OWNER, add, first_with, largest, rooms_for, shrink
from dhp_ray.planner.primitives.compiled import compiled, inner
from dhp_ray.planner.problem import Item, Machine, Problem, encode_s_of, time_s
from dhp_ray.planner.schedule import Schedule, by_owner, firsts_of
from dhp_ray.planner.search.batch import SearchBatch, batch_of
from dhp_ray.planner.search.placing import cached_groups_of, ranks_of

START_S, CALL_S, LOOK_S = 5e-4, 6e-5, 5e-8
"""Seconds of placing and timing a plan, of a call that fills micro-batches, and of a look at a sequence, on its own, in
a pack or on a degree, about."""

LONGEST, SPAN, STEPS, WASTE = 1.2, 4.5, 10, 1.15
"""The longest limit over the seconds of all that is left on its fewest ranks, and over the shortest limit; the steps of
a bisection; and what the rest is assumed to take over its bound."""

FEW = 8
"""The limits of each micro-batch of a search for sync=step."""

ENDED = 3
"""A wide search also tries to end so many times its width partial plans."""

FACTORS = (1.02, 1.1, 1.25, 1.5, 2.0, 3.0)
"""Limits for all that is left, over its least seconds."""

ENCODE_FACTORS = (0.9, 1.0, 1.1)
"""Encoding may take these multiples of its share of all work that is left."""


class Round(NamedTuple):
    """A micro-batch: its sequences, the pack of each, and the degree of each pack."""

    rows: np.ndarray
    pack: np.ndarray
    degree: np.ndarray


class Partial(NamedTuple):
    """A partial plan: its micro-batches, their seconds, and the sequences that are left (largest first)."""

    rounds: tuple[Round, ...]
    seconds: float
    left: np.ndarray


class Next(NamedTuple):
    """A limit of the micro-batch after a partial plan, encoding's share of it, the least degree of its packs, and how
    many sequences it leaves; ranked by seconds so far and those of what is left times `waste`."""

    rank_s: float
    limit_s: float
    share: float
    least: int
    number: int
    partial: Partial


class Places(NamedTuple):
    """The ranks in the order in which packs take them, the speed of each, and the first place after it on another node.
    """

    rank: np.ndarray
    speed: np.ndarray
    until: np.ndarray


def places_of(machine: Machine, by_node: bool = False) -> Places:
    """The fastest ranks first, and of these, large nodes first; `by_node`: the node with the most speed first, and its
    fastest rank. On a uniform machine, packs are put into nodes that have room afterwards (`placing.py`)."""
    num_ranks, of_node = len(machine.speeds), np.bincount(machine.node, machine.speeds)[machine.node]
    keys = (-machine.speeds, machine.node, -of_node) if by_node else (machine.node, -of_node, -machine.speeds)
    rank, until = np.lexsort(keys), np.arange(num_ranks) + machine.ranks_per_node
    if not machine.uniform or by_node:
        ends = np.append(np.nonzero(np.diff(machine.node[rank]))[0] + 1, num_ranks)
        until = ends[np.searchsorted(ends, np.arange(num_ranks), side="right")]
    return Places(rank, machine.speeds[rank], until)


class Rounds:
    """A beam search of the micro-batches of one batch. spent_s: about the seconds of the last search, by its counts.
    whole: a partial plan leaves a whole number of micro-batches; else each token of memory that it leaves unused counts
    from the start, which saves micro-batches in the end where memory is short.
    """

    def __init__(self, problem: Problem, machine: Machine, by_node: bool = False, whole: bool = True) -> None:
        self.problem, self.machine = problem, machine._replace(uniform=machine.uniform and not by_node)
        self.whole = whole
        self.batch, self.tokens = batch_of(problem), problem.items.tokens
        self.value = self.batch.work + self.tokens * limits_of(problem).charge_s[problem.items.minimum_degree]
        self.places, self.speed = places_of(machine, by_node), float(machine.speeds.sum())
        self.most, self.gather_s = problem.cluster.max_tokens, problem.cost.gather_s
        self.spent_s = 0.0

    def shortest(
        self, below_s: float, degrees: Sequence[int], width: int, limits: int, waste: float = WASTE,
        most_s: float = np.inf
    ) -> Schedule | None:
        """A plan that is shorter than `below_s`, as far as is known before packs have ranks; none if none is found, or
        in `most_s`. degrees: the least degrees that a micro-batch may have. waste: what the micro-batches that are left
        are assumed to take over their bound."""
        beam, best = [Partial((), 0.0, self.batch.by_work)], Partial((), below_s, self.batch.by_work)
        self.spent_s = 0.0
        most = ENDED * width if width > 1 else 1
        while beam:
            if self.spent_s > most_s:
                return None
            following = list[Next]()
            for place, partial in enumerate(beam):
                for least in degrees:
                    best = self._ended(partial, best, least)
                for least in degrees if place < width else ():
                    following += self._next(partial, best.seconds, least, limits, waste)
            following.sort(key=lambda each: each.rank_s)
            beam, seen = [], set[tuple[float, int]]()
            for each in following:
                mark = round(each.rank_s, 9), each.number
                if mark not in seen and len(seen) < most:
                    seen.add(mark)
                    made = self._made(each)
                    if len(made.left):
                        beam.append(made)
                    elif made.seconds < best.seconds:
                        best = made
        return self._placed(best.rounds) if best.rounds else None

    def without_barriers(self, least: int, most_s: float) -> Schedule | None:
        """The packs of a narrow search of at most `most_s` in the order of their micro-batches, for sync=step."""
        made = self.shortest(np.inf, [least], 1, FEW, most_s=most_s)
        return made._replace(micro_batch=np.zeros_like(made.micro_batch)) if made else None

    def _shares(self, rows: np.ndarray) -> list[float]:
        """The shares of a limit that encoding may have: 0, any; and about its share of all work of these sequences,
        where ranks wait for the longest encoding of a micro-batch.
        """
        if not len(self.batch.image_s) or self.problem.sync == "step":
            return [0.0]
        images = float(self.problem.items.vision_s[rows].sum() / self.batch.work[rows].sum())
        return [0.0, *(factor * images for factor in ENCODE_FACTORS if 0.0 < factor * images < 1.0)]

    def _ended(self, partial: Partial, best: Partial, least: int) -> Partial:
        """The better of `best` and this partial plan ended by one micro-batch with all that is left."""
        rows = partial.left
        if self.tokens[rows].sum() > self.most:
            return best
        longest_s, _, of_longest = _times_s(self.batch, rows[0], self.places, least)
        least_s = max(longest_s, float(self.value[rows].sum() / self.speed))
        for share in [*self._shares(rows), *([of_longest] if 0.0 < of_longest < 1.0 else [])]:
            for factor in FACTORS:
                if partial.seconds + least_s + self.batch.fixed_s >= best.seconds:
                    break
                high_s = least_s * factor
                pack, degree, seconds, looks = _tightened(self.batch, rows, least_s, high_s, self.places, least, share)
                self.spent_s += CALL_S + LOOK_S * looks
                if len(degree):
                    end_s = partial.seconds + seconds + self.batch.fixed_s
                    if end_s < best.seconds:
                        best = Partial((*partial.rounds, Round(rows, pack, degree)), end_s, rows[:0])
                    break
        return best

    def _next(self, partial: Partial, below_s: float, least: int, number: int, waste: float) -> list[Next]:
        """The limits of the next micro-batch after which a plan may be shorter than `below_s`; each without a share for
        encoding, and with one, in turns."""
        batch, left = self.batch, partial.left
        value, tokens = self.value[left], self.tokens[left].sum()
        longest_s, full_s, _ = _times_s(batch, left[0], self.places, least)
        full_s = max(longest_s, min(full_s, LONGEST * _together_s(batch, left, self.places, least)))
        limits = full_s * max(longest_s / full_s, 1 / SPAN) ** (np.arange(number) / (number - 1)) * (1 + 1e-9)
        _, *of_images = self._shares(left)
        shares = np.zeros(number)
        if of_images:
            limits, shares = np.tile(limits, 2), np.append(shares, np.resize(of_images, number))
        tried = _try(batch, left, self.value, limits, self.places, least, shares)
        self.spent_s += CALL_S + LOOK_S * float(tried[4].sum())
        micro_batches = np.maximum(tokens - tried[1], 0.0) / self.most
        micro_batches = np.ceil(micro_batches) if self.whole else micro_batches
        rest_s = np.maximum(np.maximum(value.sum() - tried[0], 0.0) / self.speed, micro_batches * self.gather_s)
        rest_s += micro_batches * batch.fixed_s
        so_far_s = partial.seconds + tried[2]
        rank_s = so_far_s + waste * rest_s
        number_left = len(left) - tried[3].astype(np.int64)
        return [Next(float(rank_s[one]), float(limits[one]), float(shares[one]), least, int(number_left[one]), partial)
                for one in np.nonzero(so_far_s + rest_s < below_s)[0]]

    def _made(self, step: Next) -> Partial:
        """A partial plan after its next micro-batch."""
        partial, args = step.partial, (self.places, step.least, step.share)
        inside = fill(self.batch, partial.left, step.limit_s, *args)[0] >= 0
        rows = partial.left[inside]
        pack, degree, seconds, looks = _tightened(self.batch, rows, step.limit_s / SPAN, step.limit_s, *args)
        self.spent_s += CALL_S + LOOK_S * looks
        return Partial((*partial.rounds, Round(rows, pack, degree)), partial.seconds + seconds + self.batch.fixed_s,
                       partial.left[~inside])

    def _placed(self, rounds: Sequence[Round]) -> Schedule:
        """The packs of all micro-batches on their ranks."""
        self.spent_s += START_S
        pool, packs = cached_groups_of(self.problem), [by_owner(each.pack, len(each.degree)) for each in rounds]
        degrees = [each.degree for each in rounds]
        return Schedule(
            np.concatenate([each.rows[members] for each, (members, _) in zip(rounds, packs)]),
            firsts_of(np.concatenate([np.diff(first) for _, first in packs])),
            np.concatenate([ranks_of(firsts_of(each), self.machine, self.places.rank, pool) for each in degrees]),
            firsts_of(np.concatenate(degrees)),
            np.repeat(np.arange(len(rounds)), [len(degree) for degree in degrees]),
        )


@compiled
def _tightened(
    batch: SearchBatch, rows: np.ndarray, low_s: float, high_s: float, places: Places, least: int, share: float
) -> tuple[np.ndarray, np.ndarray, float, int]:
    """What `fill` gives for a micro-batch of these sequences under the least limit that a bisection finds, with all
    looks; no packs if `high_s` is too short."""
    pack, degree, seconds, looks = fill(batch, rows, high_s, places, least, share)
    if pack.min() < 0:
        return pack, degree[:0], np.inf, looks
    for _ in range(STEPS):
        middle_s = (low_s + high_s) / 2
        tighter, of_tighter, tighter_s, more = fill(batch, rows, middle_s, places, least, share)
        looks += more
        if tighter.min() < 0:
            low_s = middle_s
        else:
            pack, degree, seconds, high_s = tighter, of_tighter, tighter_s, middle_s
    if share > 0.0:
        even, even_s, more = spread(batch, rows, degree, places, share)
        looks += more
        if even_s < seconds:
            pack, seconds = even, even_s
    return pack, degree, max(seconds, batch.rates[1].least_s), looks


@compiled
def _times_s(batch: SearchBatch, row: int, places: Places, least: int) -> tuple[float, float, float]:
    """Of packs of at least `least` ranks: the least seconds of a sequence alone; those of such sequences that fill the
    fewest ranks; and the share of the least seconds in which it encodes."""
    item, best, share, nothing = batch.items[row], np.inf, 0.0, np.zeros(5)
    least = max(item.minimum_degree, min(least, len(places.speed)))
    for degree in range(least, len(places.speed) + 1):
        crosses = degree > places.until[0]
        encode_s, seconds = _with(batch, nothing, 0.0, item, degree, places.speed[degree - 1], crosses)
        if max(seconds, batch.rates[degree].least_s) < best:
            best, share = max(seconds, batch.rates[degree].least_s), encode_s / seconds
    full_s = time_s(item, least, least > places.until[0], places.speed[least - 1], batch.rates[least])
    return best, full_s * max(1.0, least * batch.capacity / item.tokens), share


@compiled
def _together_s(batch: SearchBatch, rows: np.ndarray, places: Places, least: int) -> float:
    """Seconds of one micro-batch of these sequences, each on its fewest ranks, at least `least`, if any could share
    ranks."""
    area, num_ranks = 0.0, len(places.speed)
    for row in rows:
        item = batch.items[row]
        degree = max(item.minimum_degree, min(least, num_ranks))
        rate, speed = batch.rates[degree], places.speed[degree - 1]
        area += degree * speed * (time_s(item, degree, degree > places.until[0], speed, rate) - rate.overhead_s)
    return area / places.speed.sum() + batch.rates[1].overhead_s


@compiled
def _try(batch: SearchBatch, left: np.ndarray, value: np.ndarray, limits: np.ndarray, places: Places, least: int,
         shares: np.ndarray) -> np.ndarray:
    """(5, limits): value and tokens inside, seconds, and sequences of a micro-batch under each limit, and looks;
    endless seconds if the largest sequence is not inside."""
    found = np.zeros((5, len(limits)))
    for number in range(len(limits)):
        pack, _, seconds, found[4, number] = fill(batch, left, limits[number], places, least, shares[number])
        for place in range(len(left)):
            if pack[place] >= 0:
                found[0, number] += value[left[place]]
                found[1, number] += batch.items[left[place]].tokens
                found[3, number] += 1
        found[2, number] = seconds + batch.fixed_s if pack[0] >= 0 else np.inf
    return found


@compiled
def fill(
    batch: SearchBatch, left: np.ndarray, limit_s: float, places: Places, least: int, share: float
) -> tuple[np.ndarray, np.ndarray, float, int]:
    """(the pack of each sequence, -1: it waits; the degree of each pack; seconds; looks)"""
    num_ranks = len(places.speed)
    most = min(num_ranks, len(left))
    pack_of, degree, slowest = np.full(len(left), -1), np.zeros(most, dtype=np.int64), np.zeros(most)
    crosses = np.zeros(most, dtype=np.bool_)
    sums, image_s, seconds, encodes = np.zeros((most, 5)), np.zeros(most), np.zeros(most), np.zeros(most)
    rooms, state = rooms_for(most)  # the work of a sequence that an open pack has time for, roughly
    looks, used, count, widest = 0, 0, 0, np.inf
    refused = np.inf  # the work of the last sequence that waits: one alike does, too
    for place in range(len(left)):
        work = batch.work[left[place]]
        if work == refused or (used == num_ranks and work > widest):
            continue
        item, looks = batch.items[left[place]], looks + 1
        found, after_s, encode_s = first_with(rooms, state, work), 0.0, 0.0
        while found >= 0:
            pack, looks = int(rooms[OWNER, found]), looks + 1
            if sums[pack, 4] + item.tokens <= degree[pack] * batch.capacity:
                encode_s, after_s = _with(batch, sums[pack], image_s[pack], item, degree[pack], slowest[pack],
                                            crosses[pack])
                if _needs_s(encode_s, after_s, share) <= limit_s:
                    break
            found -= 1
        if found < 0:
            need, more = _degree(batch, item, limit_s, num_ranks - used, places, used, least, share)
            looks += more
            if need == 0:
                refused = work
                continue
            pack, degree[count], slowest[count] = count, need, places.speed[used + need - 1]
            crosses[count] = used + need > places.until[used]
            used, count = used + need, count + 1
            encode_s, after_s = _with(batch, sums[pack], image_s[pack], item, need, slowest[pack], crosses[pack])
        pack_of[place], seconds[pack], encodes[pack] = pack, after_s, encode_s
        _put(sums, image_s, pack, item)
        rate = batch.rates[degree[pack]]
        transfer_s = rate.across_s if crosses[pack] else rate.inside_s
        work_takes_s = 1.0 / (degree[pack] * slowest[pack]) + transfer_s * batch.least_tokens
        room = (limit_s - after_s) / work_takes_s * (1 + 1e-9)
        if rate.overlap > 0.0:
            room = np.inf if room > 0.0 else room
        low = np.searchsorted(batch.by_tokens, degree[pack] * batch.capacity - sums[pack, 4], side="right")
        room = min(room, batch.most_work[low - 1]) if low > 0 else -1.0
        if found >= 0:
            shrink(rooms, state, found, room)
        else:
            add(rooms, state, room, pack)
        widest = largest(rooms, state)
    if count == 0:
        return pack_of, degree[:0].copy(), np.inf, looks
    return pack_of, degree[:count].copy(), _slot_s(encodes[:count], seconds[:count]), looks


@compiled
def spread(
    batch: SearchBatch, rows: np.ndarray, degree: np.ndarray, places: Places, share: float
) -> tuple[np.ndarray, float, int]:
    """Sequences with images on packs of these degrees, largest first, each to the pack that needs the least limit so
    far: where both encoding and the rest count, the fullest pack that has time is no good choice. (the pack of each;
    seconds, endless if one has no place; looks)"""
    count, used = len(degree), 0
    pack_of, slowest, crosses = np.full(len(rows), -1), np.zeros(count), np.zeros(count, dtype=np.bool_)
    for pack in range(count):
        slowest[pack] = places.speed[used + degree[pack] - 1]
        crosses[pack] = used + degree[pack] > places.until[used]
        used += degree[pack]
    sums, image_s, seconds, encodes, needs_s = (
        np.zeros((count, 5)), np.zeros(count), np.zeros(count), np.zeros(count), np.zeros(count))
    for place in range(len(rows)):
        item, found = batch.items[rows[place]], -1
        for pack in range(count):
            if (degree[pack] >= item.minimum_degree and (found < 0 or needs_s[pack] < needs_s[found])
                    and sums[pack, 4] + item.tokens <= degree[pack] * batch.capacity):
                found = pack
        if found < 0:
            return pack_of, np.inf, place + 1
        encodes[found], seconds[found] = _with(batch, sums[found], image_s[found], item, degree[found], slowest[found],
                                               crosses[found])
        needs_s[found] = _needs_s(encodes[found], seconds[found], share)
        pack_of[place] = found
        _put(sums, image_s, found, item)
    return pack_of, _slot_s(encodes, seconds), len(rows)


@inner
def _put(sums: np.ndarray, image_s: np.ndarray, pack: int, item: Item) -> None:
    """Add a sequence to the sums of a pack and to its longest image."""
    sums[pack, 0] += item.language_s
    sums[pack, 1] += item.attention_s
    sums[pack, 2] += item.host_s
    sums[pack, 3] += item.vision_s
    sums[pack, 4] += item.tokens
    image_s[pack] = max(image_s[pack], item.image_s)


@inner
def _slot_s(encodes: np.ndarray, seconds: np.ndarray) -> float:
    """Seconds of a micro-batch of packs that encode for `encodes` of their seconds."""
    return max(encodes.max() + (seconds - encodes).max(), seconds.max())


@inner
def _needs_s(encode_s: float, seconds: float, share: float) -> float:
    """The least limit under which a pack may encode for `encode_s` of its seconds."""
    return seconds if share == 0.0 else max(encode_s / share, (seconds - encode_s) / (1.0 - share))


@inner
def _degree(batch: SearchBatch, item: Item, limit_s: float, most: int, places: Places, used: int,
            least: int, share: float) -> tuple[int, int]:
    """The fewest of the next ranks on which a sequence ends by the limit (0: there are too few), and looks."""
    within_s, nothing = limit_s * places.speed[0], np.zeros(5)
    if share == 0.0:
        ranks = (item.language_s + item.vision_s) / within_s
    elif item.image_s > share * within_s:
        return 0, 1
    else:
        ranks = max(item.language_s / ((1.0 - share) * within_s), item.vision_s / (share * within_s))
    degree = first = max(item.minimum_degree, int(ranks), min(least, most), 1)
    while degree <= most:
        encode_s, seconds = _with(batch, nothing, 0.0, item, degree, places.speed[used + degree - 1],
                                  used + degree > places.until[used])
        if _needs_s(encode_s, seconds, share) <= limit_s:
            return degree, degree - first + 1
        degree += 1
    return 0, max(0, most - first + 1)


@inner
def _with(batch: SearchBatch, sums: np.ndarray, image_s: float, item: Item, degree: int, slowest: float,
          crosses: bool) -> tuple[float, float]:
    """Seconds for which a pack with one more sequence encodes, its images dealt out evenly, and all of its seconds."""
    rate, encode_s = batch.rates[degree], 0.0
    if sums[4] == 0.0:
        encode_s = encode_s_of(item, degree)
    elif sums[3] + item.vision_s > 0.0:
        encode_s = max((sums[3] + item.vision_s) / degree, image_s, item.image_s)
    if sums[3] + item.vision_s > 0.0:
        encode_s += rate.encoder_pass_s
    transfer_s = rate.across_s if crosses else rate.inside_s
    tokens = sums[4] + item.tokens
    seconds = running_s(sums[0] + item.language_s, sums[1] + item.attention_s, encode_s / slowest,
                        sums[2] + item.host_s, tokens, degree, slowest, transfer_s, rate)
    return encoding_s(encode_s / slowest, tokens, rate), seconds
