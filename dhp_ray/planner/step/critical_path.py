"""Shortens the critical path of a `sync=step` plan by exchanges between packs. Groups keep their ranks and their order.

The critical path is the pack that ends last, the pack whose end it waited for, and so on, back to the step's start. One
of its packs gives a sequence to a pack outside the path, or swaps it for one with less work; if that no longer helps, a
pack of few sequences may also give two at once (`parts.py`). A pack outside the path has slack: the time by which it
may end later without making the plan longer. Two ranks that hold 9 tokens; a token takes 1 s:

    before   rank 0  |--5-4--|-3-3-|    15 s        swap 5 and 3:       rank 0  |-3-4-|-3-3-|    13 s
             rank 1  |-4-3-|-2-2-|      11 s        2 s move            rank 1  |-4-5-|-2-2-|    13 s

Of the exchanges that memory allows, a turn takes the one with the earliest estimated end of the plan: the difference in
work, divided by the ranks of a pack and its slowest speed, shortens the path and uses up slack. It is made if, by exact
times, it shortens the plan or lets fewer ranks end last; otherwise the search ends, or goes on with two sequences at
once. It also ends if EFFORT is used up. A plan of packs that memory fills, a few for each rank, gains most: a trial
(`trial.py`) adds up the work of a rank, and does not see which sequences fit into one pack.
O(turns x sequences of the path x sequences).
"""

from __future__ import annotations

from typing import NamedTuple

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
from dhp_ray.planner.pricing import times_of
from dhp_ray.planner.primitives.compiled import compiled, inner
from dhp_ray.planner.problem import Problem
from dhp_ray.planner.rates import Rates
from dhp_ray.planner.schedule import Schedule


class Timeline(NamedTuple):
    """By pack: when it starts, and the pack whose end it waits for (-1: none). By rank: when it ends, and its last
    pack."""

    start: np.ndarray
    waits_for: np.ndarray
    end: np.ndarray
    last: np.ndarray


def with_shorter_path(problem: Problem, schedule: Schedule) -> Schedule:
    """A schedule with the same groups in the same order that is at most as long as with each pack's sequences in the
    batch's order (in which images are dealt to members)."""
    batch, groups, pack_of = described(problem, schedule)
    before = in_packs(schedule, pack_of)
    shorten(batch, groups, problem.machine.rates, schedule.ranks, problem.cluster.num_ranks, pack_of,
            times_of(problem, before).pack_s, held_by(batch, before))
    return in_packs(schedule, pack_of)


@compiled
def shorten(
    batch: Batch, groups: Groups, rates: Rates, ranks: np.ndarray, num_ranks: int, pack_of: np.ndarray,
    times: np.ndarray, held: np.ndarray,
) -> None:
    """Exchange sequences. `pack_of`: the pack of each one. `times` and `held`: seconds and tokens of each pack. All
    three are updated."""
    compared, few = 0.0, 1
    while True:
        timeline = _timeline(groups.first, ranks, times, num_ranks)
        parts = parts_of(batch, pack_of, len(times), few)
        on_path = _on_path(timeline)
        compared += on_path[parts.pack].sum() * len(parts.pack) + len(pack_of) + len(ranks)
        if compared > EFFORT:
            return
        given, taken = _best(parts, groups, batch.tokens_per_rank, held, on_path, timeline.end.max(),
                             _slack_s(groups.first, ranks, times, timeline))
        if given < 0 or not _exchanged(
            batch, groups, rates, ranks, pack_of, times, held, timeline, parts, given, taken
        ):
            if few == FEW:
                return
            few = FEW


@inner
def _exchanged(
    batch: Batch, groups: Groups, rates: Rates, ranks: np.ndarray, pack_of: np.ndarray, times: np.ndarray,
    held: np.ndarray, timeline: Timeline, parts: Parts, given: int, taken: int,
) -> bool:
    """Make an exchange if the plan becomes shorter, or not longer with fewer ranks that end last; return whether."""
    pack, other = parts.pack[given], parts.pack[taken]
    kept = times[pack], held[pack], times[other], held[other]
    move(parts, given, other, pack_of)
    move(parts, taken, pack, pack_of)
    times[pack], _, _, held[pack] = pack_s(batch, groups, rates, pack, pack_of)
    times[other], _, _, held[other] = pack_s(batch, groups, rates, other, pack_of)
    end_s, before_s = _timeline(groups.first, ranks, times, len(timeline.end)).end, timeline.end.max()
    last_s = before_s * (1.0 - BETTER)
    if end_s.max() < last_s or (end_s.max() <= before_s and (end_s > last_s).sum() < (timeline.end > last_s).sum()):
        return True
    move(parts, given, pack, pack_of)
    move(parts, taken, other, pack_of)
    times[pack], held[pack], times[other], held[other] = kept
    return False


@inner
def _timeline(first: np.ndarray, ranks: np.ndarray, times: np.ndarray, num_ranks: int) -> Timeline:
    """Each pack starts as soon as its ranks are free, ranks[first[p]:first[p + 1]] for pack p."""
    timeline = Timeline(
        np.zeros(len(times)), np.full(len(times), -1), np.zeros(num_ranks), np.full(num_ranks, -1))
    for pack in range(len(times)):
        for rank in ranks[first[pack] : first[pack + 1]]:
            if timeline.end[rank] > timeline.start[pack]:
                timeline.start[pack], timeline.waits_for[pack] = timeline.end[rank], timeline.last[rank]
        for rank in ranks[first[pack] : first[pack + 1]]:
            timeline.end[rank], timeline.last[rank] = timeline.start[pack] + times[pack], pack
    return timeline


@inner
def _on_path(timeline: Timeline) -> np.ndarray:
    """Whether each pack is on the critical path of the rank that ends last."""
    on_path, pack = np.zeros(len(timeline.start), np.bool_), timeline.last[timeline.end.argmax()]
    while pack >= 0:
        on_path[pack], pack = True, timeline.waits_for[pack]
    return on_path


@inner
def _slack_s(first: np.ndarray, ranks: np.ndarray, times: np.ndarray, timeline: Timeline) -> np.ndarray:
    """By how many seconds each pack may end later without making the plan longer."""
    slack_s, latest_s = np.zeros(len(times)), np.full(len(timeline.end), timeline.end.max())
    for pack in range(len(times) - 1, -1, -1):
        of_pack = ranks[first[pack] : first[pack + 1]]
        end_s = latest_s[of_pack].min()
        slack_s[pack] = end_s - timeline.start[pack] - times[pack]
        for rank in of_pack:
            latest_s[rank] = end_s - times[pack]
    return slack_s


@inner
def _best(
    parts: Parts, groups: Groups, tokens_per_rank: int, held: np.ndarray, on_path: np.ndarray, end_s: float,
    slack_s: np.ndarray,
) -> tuple[int, int]:
    """The part that a pack of the critical path gives, and the one that it takes from a pack outside it, so that the
    plan is estimated to end first, with the least work that moves; -1 and -1 if no exchange may help."""
    num_packs = len(slack_s)
    speeds, capacity, size = np.zeros(num_packs), np.zeros(num_packs), np.zeros(num_packs, np.int64)
    best, best_s, least = (-1, -1), np.inf, np.inf
    for pack in range(num_packs):
        degree = groups.first[pack + 1] - groups.first[pack]
        capacity[pack], speeds[pack] = degree * tokens_per_rank, degree * groups.slowest[pack]
    for part in range(num_packs, len(parts.pack)):
        size[parts.pack[part]] += parts.second[part] < 0
    for given in range(num_packs, len(parts.pack)):
        pack = parts.pack[given]
        if not on_path[pack]:
            continue
        gives_all = size[pack] <= 1 + (parts.second[given] >= 0)
        for taken in range(num_packs if gives_all else 0, len(parts.pack)):  # for nothing only if a sequence stays
            other, more = parts.pack[taken], parts.work[given] - parts.work[taken]
            if on_path[other] or more <= 0.0 or more >= slack_s[other] * speeds[other]:
                continue
            tokens = parts.tokens[given] - parts.tokens[taken]
            if held[other] + tokens > capacity[other] or (tokens < 0 and held[pack] - tokens > capacity[pack]):
                continue
            after_s = end_s - min(more / speeds[pack], slack_s[other] - more / speeds[other])
            if (after_s, more) < (best_s, least):
                best, best_s, least = (given, taken), after_s, more
    return best
