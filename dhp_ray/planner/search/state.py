"""A plan while it is made and improved: packs of sequences on ranks, their seconds, and the score of the whole.

Both modes have slots. With sync=micro_batch a slot is a micro-batch, whose packs run beside each other. With sync=step
there is one slot, whose packs run in an order, each as soon as its ranks are free. An empty pack of a micro-batch holds
the ranks that are not used.

The score of a plan is (seconds, smooth seconds): what all packs (`micro_batch`), or the ends of all ranks (`step`),
take by a norm of high power. That falls if one of several longest packs gets shorter, when seconds cannot fall yet.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dhp_ray.planner.cost.rates import encoding_s, running_s
from dhp_ray.planner.encoder.members import longest_member_s
from dhp_ray.planner.primitives.compiled import compiled, inner
from dhp_ray.planner.schedule import Schedule, by_owner, firsts_of
from dhp_ray.planner.search.batch import SearchBatch

LANGUAGE, ATTENTION, HOST, VISION, TOKENS = range(5)


class State(NamedTuple):
    """Sequences are a linked list in each pack (`head`, `after`, `before`), of `size` entries. Slot k has the packs
    `first[k]` to `first[k + 1]`; `order`: those of `step`. `ranks[p, :degree[p]]`: those of pack p. `waits`, `last`,
    `end`: of the last timeline, for each pack the one it waits for, and for each rank its last pack and its end."""

    pack_of: np.ndarray
    after: np.ndarray
    before: np.ndarray
    head: np.ndarray
    size: np.ndarray
    sums: np.ndarray
    degree: np.ndarray
    ranks: np.ndarray
    slot: np.ndarray
    first: np.ndarray
    order: np.ndarray
    time: np.ndarray
    encode: np.ndarray
    rest: np.ndarray
    waits: np.ndarray
    last: np.ndarray
    end: np.ndarray
    slot_s: np.ndarray
    smooth_s: np.ndarray


def state_of(batch: SearchBatch, schedule: Schedule) -> State:
    """The packs of a schedule; in `micro_batch` one more, empty, in each slot, with the ranks that no other has."""
    num_ranks, degree_of = len(batch.speeds), np.diff(schedule.first_rank)
    spare = 1 if batch.lockstep else 0
    num_slots = int(schedule.micro_batch[-1]) + 1
    first = firsts_of(np.bincount(schedule.micro_batch, minlength=num_slots) + spare)
    new = np.arange(len(degree_of)) + spare * schedule.micro_batch
    total, count = int(first[-1]), len(schedule.rows)
    ranks, degree = np.zeros((total, num_ranks), dtype=np.int64), np.zeros(total, dtype=np.int64)
    place = np.arange(len(schedule.ranks)) - np.repeat(schedule.first_rank[:-1], degree_of)
    ranks[np.repeat(new, degree_of), place] = schedule.ranks
    degree[new] = degree_of
    slot = np.repeat(np.arange(num_slots), np.diff(first))
    if batch.lockstep:
        free = np.ones((num_slots, num_ranks), dtype=bool)
        free[np.repeat(schedule.micro_batch, degree_of), schedule.ranks] = False
        for number in range(num_slots):
            unused = np.nonzero(free[number])[0]
            ranks[first[number + 1] - 1, : len(unused)], degree[first[number + 1] - 1] = unused, len(unused)
    pack_of = np.empty(count, dtype=np.int64)
    pack_of[schedule.rows] = np.repeat(new, np.diff(schedule.first_row))
    state = State(pack_of, np.full(count, -1), np.full(count, -1), np.full(total, -1),
                  np.zeros(total, np.int64), np.zeros((total, 5)), degree, ranks, slot, first, np.arange(total),
                  np.zeros(total), np.zeros(total), np.zeros(total), np.full(total, -1), np.full(num_ranks, -1),
                  np.zeros(num_ranks), np.zeros(num_slots), np.zeros(num_slots))
    fill_state(batch, state)
    return state


def schedule_of(batch: SearchBatch, state: State) -> Schedule:
    """The packs that have sequences, in the order in which they run."""
    order = [pack for pack in state.order if state.size[pack]]
    rows, begin = by_owner(state.pack_of, len(state.size))
    rows_of = [rows[begin[pack] : begin[pack + 1]] for pack in order]
    ranks_of = [np.sort(state.ranks[pack, : state.degree[pack]]) for pack in order]
    slot = state.slot[order]
    return Schedule(np.concatenate(rows_of), firsts_of([len(rows) for rows in rows_of]), np.concatenate(ranks_of),
                    firsts_of([len(ranks) for ranks in ranks_of]), np.unique(slot, return_inverse=True)[1])


@compiled
def fill_state(batch: SearchBatch, state: State) -> None:
    """List the sequences of every pack, and time all packs and slots."""
    pack_of = state.pack_of.copy()
    state.pack_of[:], state.head[:], state.size[:], state.sums[:] = -1, -1, 0, 0.0
    for row in range(len(pack_of) - 1, -1, -1):
        put(batch, state, row, pack_of[row])
    for pack in range(len(state.size)):
        retime(batch, state, pack)
    for slot in range(len(state.slot_s)):
        rescore(batch, state, slot)


@inner
def put(batch: SearchBatch, state: State, row: int, pack: int) -> None:
    """Move a sequence to a pack (-1: to none). The packs are not timed again."""
    item, old = batch.items[row], state.pack_of[row]
    if old >= 0:
        if state.before[row] >= 0:
            state.after[state.before[row]] = state.after[row]
        else:
            state.head[old] = state.after[row]
        if state.after[row] >= 0:
            state.before[state.after[row]] = state.before[row]
        _add(state, old, item.language_s, item.attention_s, item.host_s, item.vision_s, item.tokens, -1.0)
    state.pack_of[row], state.before[row], state.after[row] = pack, -1, -1
    if pack >= 0:
        state.after[row] = state.head[pack]
        if state.head[pack] >= 0:
            state.before[state.head[pack]] = row
        state.head[pack] = row
        _add(state, pack, item.language_s, item.attention_s, item.host_s, item.vision_s, item.tokens, 1.0)


@inner
def _add(
    state: State, pack: int, language: float, attention: float, host: float, vision: float, tokens: float, sign: float
) -> None:
    state.size[pack] += int(sign)
    if state.size[pack] == 0:
        state.sums[pack, :] = 0.0
        return
    state.sums[pack, LANGUAGE] += sign * language
    state.sums[pack, ATTENTION] += sign * attention
    state.sums[pack, HOST] += sign * host
    state.sums[pack, VISION] += sign * vision
    state.sums[pack, TOKENS] += sign * tokens


@inner
def retime(batch: SearchBatch, state: State, pack: int) -> None:
    """Time a pack on its ranks."""
    state.time[pack], state.encode[pack], state.rest[pack] = 0.0, 0.0, 0.0
    degree = state.degree[pack]
    if state.size[pack] == 0 or degree == 0:
        return
    ranks, slowest, crosses = state.ranks[pack, :degree], 1.0, False
    if not batch.uniform:
        slowest = np.inf
        for rank in ranks:
            slowest = min(slowest, batch.speeds[rank])
    if batch.nodes_matter:
        for rank in ranks:
            crosses = crosses or batch.node[rank] != batch.node[ranks[0]]
    rate, encode_s = batch.rates[degree], 0.0
    if state.sums[pack, VISION] > 0.0:
        rows, row = np.zeros(state.size[pack], dtype=np.int64), state.head[pack]
        for place in range(len(rows)):
            rows[place] = row
            row = state.after[row]
        rows.sort()
        speeds = np.ones(degree)
        for place in range(degree):
            speeds[place] = batch.speeds[ranks[place]]
        encode_s = longest_member_s(rows, batch.first_image, batch.image_s, batch.patches, speeds)
        encode_s += rate.encoder_pass_s / slowest
    sums = state.sums[pack]
    seconds = running_s(sums[LANGUAGE], sums[ATTENTION], encode_s, sums[HOST], sums[TOKENS], degree, slowest,
                        rate.across_s if crosses else rate.inside_s, rate)
    encode_s = encoding_s(encode_s, sums[TOKENS], rate)
    state.time[pack], state.encode[pack], state.rest[pack] = max(rate.least_s, seconds), encode_s, seconds - encode_s


@inner
def _powered(share: float) -> float:
    """The 64th power; 0 if it is too small to matter."""
    if share < 0.7:
        return 0.0
    for _ in range(6):
        share *= share
    return share


@inner
def rescore(batch: SearchBatch, state: State, slot: int) -> None:
    """Update the score of a slot."""
    if batch.lockstep:
        _score_micro_batch(batch, state, slot)
    else:
        _score_step(state)


@inner
def _score_micro_batch(batch: SearchBatch, state: State, slot: int) -> None:
    pack_s, encode_s, rest_s = 0.0, 0.0, 0.0
    for pack in range(state.first[slot], state.first[slot + 1]):
        pack_s, encode_s = max(pack_s, state.time[pack]), max(encode_s, state.encode[pack])
        rest_s = max(rest_s, state.rest[pack])
    state.slot_s[slot], state.smooth_s[slot] = 0.0, 0.0
    if pack_s == 0.0:
        return
    encodes, rests = 0.0, 0.0
    for pack in range(state.first[slot], state.first[slot + 1]):
        rests += _powered(state.rest[pack] / rest_s)
        if encode_s > 0.0:
            encodes += _powered(state.encode[pack] / encode_s)
    state.slot_s[slot] = max(pack_s, encode_s + rest_s) + batch.fixed_s
    state.smooth_s[slot] = encode_s * encodes ** (1 / 64) + rest_s * rests ** (1 / 64) + batch.fixed_s


@inner
def _score_step(state: State) -> None:
    state.end[:], state.last[:] = 0.0, -1
    for pack in state.order:
        run(state, pack)
    end_s, ends = state.end.max(), 0.0
    for rank in range(len(state.end)):
        ends += _powered(state.end[rank] / end_s)
    state.slot_s[0], state.smooth_s[0] = end_s, end_s * ends ** (1 / 64)


@inner
def run(state: State, pack: int) -> None:
    """Run a pack as soon as its ranks are free."""
    if state.size[pack] == 0:
        return
    start, waits = 0.0, -1
    for place in range(state.degree[pack]):
        rank = state.ranks[pack, place]
        if state.end[rank] > start:
            start, waits = state.end[rank], state.last[rank]
    state.waits[pack] = waits
    for place in range(state.degree[pack]):
        rank = state.ranks[pack, place]
        state.end[rank], state.last[rank] = start + state.time[pack], pack
