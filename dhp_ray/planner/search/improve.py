"""The improver, the same for both modes: random small changes of a plan, kept if its score (`state.py`) gets better.

A change concerns a pack that makes the plan as long as it is: of the critical path in `step`, the longest of a
micro-batch otherwise; sometimes any pack. Either

rows    it gives a sequence to another pack (perhaps an empty one), or swaps it for one with about as much work
ranks   `micro_batch`: it takes ranks from another pack of its micro-batch (or from the unused ones), or swaps one if
        ranks or nodes are unequal;
        `step`: it goes to another place in the order, on one rank more, as many, or one less: those that are free first

Random numbers have a fixed seed, and the number of trials is given, so the result is always the same.
"""

from __future__ import annotations

import numpy as np

from dhp_ray.planner.primitives.compiled import compiled, inner
from dhp_ray.planner.primitives.sorting import ascending
from dhp_ray.planner.search.batch import SearchBatch
from dhp_ray.planner.search.state import TOKENS, State, fill_state, put, rescore, retime, run

BETTER = 1e-9


@compiled
def improve(batch: SearchBatch, state: State, target_s: float, trials: int, cycles: int, threshold: float) -> int:
    """Improve a plan until it takes `target_s`, or for so many trials. Return the trials made.

    In each of the cycles, a change is kept if it makes the smooth score worse by less than a share that falls from
    `threshold` to 0 (threshold accepting, Dueck and Scheuer 1990); the best plan is kept. If that is 0, changes are
    kept only if the score gets better, and the search ends if a cycle brings nothing.
    """
    random, now = np.array([12345]), np.array([state.slot_s.sum(), state.smooth_s.sum(), 0.0])
    best_s, length, made, stale = now[0], max(trials // cycles, 1), 0, 0
    pack_of, degree, ranks, order = state.pack_of.copy(), state.degree.copy(), state.ranks.copy(), state.order.copy()
    path = _path(state)
    while made < trials and best_s > target_s:
        now[2] = threshold * (1.0 - (made % length) / length)
        made, stale = made + 1, stale + 1
        if threshold == 0.0 and stale > length:
            break
        if threshold > 0.0 and made % length == 0:
            _restore(batch, state, pack_of, degree, ranks, order)
            now[0], now[1] = state.slot_s.sum(), state.smooth_s.sum()
            path = _path(state)
        slot = _below(random, len(state.slot_s))
        if _below(random, 4) == 0:
            pack = state.first[slot] + _below(random, state.first[slot + 1] - state.first[slot])
        elif batch.lockstep:
            pack = _longest(state, slot, _below(random, 2) == 0)
        else:
            pack = path[_below(random, len(path))]
        if state.size[pack] == 0 or not _changed(batch, state, now, random, pack):
            continue
        if not batch.lockstep:
            path = _path(state)
        if now[0] < best_s * (1 - BETTER):
            best_s = now[0]
            if threshold > 0.0:
                pack_of[:], degree[:], ranks[:], order[:] = state.pack_of, state.degree, state.ranks, state.order
        stale = 0
    if threshold > 0.0:
        _restore(batch, state, pack_of, degree, ranks, order)
    return made


@inner
def _restore(
    batch: SearchBatch, state: State, pack_of: np.ndarray, degree: np.ndarray, ranks: np.ndarray, order: np.ndarray
) -> None:
    state.pack_of[:], state.degree[:], state.ranks[:], state.order[:] = pack_of, degree, ranks, order
    fill_state(batch, state)


@inner
def _changed(batch: SearchBatch, state: State, now: np.ndarray, random: np.ndarray, pack: int) -> bool:
    """Try one change of a pack."""
    kind = _below(random, 16)
    if kind < 10:
        row = state.head[pack]
        for _ in range(_below(random, state.size[pack])):
            row = state.after[row]
        if kind < 4:
            return _give(batch, state, now, random, row)
        return _swap(batch, state, now, random, row)
    if batch.lockstep and (batch.nodes_matter or not batch.uniform) and _below(random, 2) == 0:
        return _swap_ranks(batch, state, now, random, pack)
    if batch.lockstep:
        return _take_ranks(batch, state, now, random, pack)
    return _insert(batch, state, now, random, pack)


@inner
def _below(random: np.ndarray, limit: int) -> int:
    """A random number from 0 to `limit` - 1 (Park and Miller 1988)."""
    random[0] = random[0] * 48271 % 2147483647
    return int(random[0] % limit)


@inner
def _path(state: State) -> np.ndarray:
    """The packs of the critical path."""
    path, size = np.zeros(len(state.order), dtype=np.int64), 0
    pack = state.last[state.end.argmax()]
    while pack >= 0:
        path[size] = pack
        size, pack = size + 1, state.waits[pack]
    return path[: max(size, 1)]


@inner
def _longest(state: State, slot: int, encodes: bool) -> int:
    """The pack of a micro-batch with the longest encoding, if there is any, or the longest rest."""
    best = state.first[slot]
    for pack in range(state.first[slot], state.first[slot + 1]):
        longer = encodes and state.encode[pack] > state.encode[best]
        if longer or ((not encodes or state.encode[best] == 0.0) and state.rest[pack] > state.rest[best]):
            best = pack
    return best


@inner
def _judge(batch: SearchBatch, state: State, now: np.ndarray, one: int, other: int) -> bool:
    """Score the slots of two packs that have changed; whether the plan is better than `now`, which is then updated."""
    a, b = state.slot[one], state.slot[other]
    before = state.slot_s[a], state.smooth_s[a], state.slot_s[b], state.smooth_s[b]
    rescore(batch, state, a)
    seconds, smooth = now[0] + state.slot_s[a] - before[0], now[1] + state.smooth_s[a] - before[1]
    if b != a:
        rescore(batch, state, b)
        seconds, smooth = seconds + state.slot_s[b] - before[2], smooth + state.smooth_s[b] - before[3]
    better = seconds < now[0] * (1 - BETTER) or (seconds <= now[0] * (1 + 1e-12) and smooth < now[1] * (1 - BETTER))
    if better or (now[2] > 0.0 and smooth < now[1] * (1 + now[2])):
        now[0], now[1] = seconds, smooth
        return True
    state.slot_s[b], state.smooth_s[b] = before[2], before[3]
    state.slot_s[a], state.smooth_s[a] = before[0], before[1]
    return False


@inner
def _pays(batch: SearchBatch, state: State, now: np.ndarray, a: int, b: int) -> bool:
    """Time two changed packs again; if that is not better, they have their former seconds again."""
    of_a, of_b = (state.time[a], state.encode[a], state.rest[a]), (state.time[b], state.encode[b], state.rest[b])
    retime(batch, state, a)
    retime(batch, state, b)
    if _judge(batch, state, now, a, b):
        return True
    state.time[a], state.encode[a], state.rest[a] = of_a
    state.time[b], state.encode[b], state.rest[b] = of_b
    return False


@inner
def _exchange(batch: SearchBatch, state: State, now: np.ndarray, row: int, pack: int, other: int) -> bool:
    """Give a sequence to a pack, for `other` (-1: for nothing), if that is better."""
    giver = state.pack_of[row]
    tokens = batch.items[row].tokens - (batch.items[other].tokens if other >= 0 else 0)
    if state.sums[pack, TOKENS] + tokens > state.degree[pack] * batch.capacity:
        return False
    if state.sums[giver, TOKENS] - tokens > state.degree[giver] * batch.capacity:
        return False
    put(batch, state, row, pack)
    if other >= 0:
        put(batch, state, other, giver)
    if _pays(batch, state, now, giver, pack):
        return True
    put(batch, state, row, giver)
    if other >= 0:
        put(batch, state, other, pack)
    return False


@inner
def _give(batch: SearchBatch, state: State, now: np.ndarray, random: np.ndarray, row: int) -> bool:
    """Give a sequence to another pack: in `step` often to the last of a rank."""
    giver, pack = state.pack_of[row], _below(random, len(state.size))
    if not batch.lockstep and _below(random, 4) > 0:
        pack = max(state.last[_below(random, len(state.end))], 0)  # of the timeline tried last
    if pack == giver or state.degree[pack] == 0:
        return False
    return _exchange(batch, state, now, row, pack, -1)


@inner
def _swap(batch: SearchBatch, state: State, now: np.ndarray, random: np.ndarray, row: int) -> bool:
    """Swap a sequence for one with about as much work."""
    count = len(batch.by_work)
    reach = max(2, int(count ** (_below(random, 1000) / 1000.0)))
    place = batch.place[row] + 1 + _below(random, reach)
    if _below(random, 8) == 0:
        place = batch.place[row] - 1 - _below(random, reach)
    if place < 0 or place >= count:
        return False
    other = batch.by_work[place]
    if state.pack_of[other] == state.pack_of[row]:
        return False
    return _exchange(batch, state, now, row, state.pack_of[other], other)


@inner
def _take_ranks(batch: SearchBatch, state: State, now: np.ndarray, random: np.ndarray, pack: int) -> bool:
    """Take one rank or several from another pack of the micro-batch, or from the unused ones."""
    slot = state.slot[pack]
    other = state.first[slot] + _below(random, state.first[slot + 1] - state.first[slot])
    if _below(random, 4) == 0:
        for one in range(state.first[slot], state.first[slot + 1]):
            if state.size[one] == 0 and state.degree[one] > 0:
                other = one
    least = 0 if state.size[other] == 0 else 1
    if other == pack or state.degree[other] <= least:
        return False
    most = state.degree[other] - least
    number = 1 + (_below(random, most) if _below(random, 3) == 0 else 0)
    _hand_over(batch, state, random, other, pack, number)
    if state.sums[other, TOKENS] <= state.degree[other] * batch.capacity and _pays(batch, state, now, pack, other):
        return True
    for _ in range(number):  # the last ones were handed over
        state.degree[pack] -= 1
        state.ranks[other, state.degree[other]] = state.ranks[pack, state.degree[pack]]
        state.degree[other] += 1
    return False


@inner
def _swap_ranks(batch: SearchBatch, state: State, now: np.ndarray, random: np.ndarray, pack: int) -> bool:
    """Swap a rank for one of another pack of the micro-batch, or for an unused one."""
    slot = state.slot[pack]
    other = state.first[slot] + _below(random, state.first[slot + 1] - state.first[slot])
    if other == pack or state.degree[other] == 0:
        return False
    own, others = state.ranks[pack], state.ranks[other]
    place, of_other = _below(random, state.degree[pack]), _below(random, state.degree[other])
    own[place], others[of_other] = others[of_other], own[place]
    if _pays(batch, state, now, pack, other):
        return True
    own[place], others[of_other] = others[of_other], own[place]
    return False


@inner
def _hand_over(batch: SearchBatch, state: State, random: np.ndarray, giver: int, taker: int, number: int) -> None:
    """Move ranks of one pack to another, of its node if there are any."""
    for _ in range(number):
        place = _below(random, state.degree[giver])
        if batch.nodes_matter and state.degree[taker] > 0:
            for one in range(state.degree[giver]):
                if batch.node[state.ranks[giver, one]] == batch.node[state.ranks[taker, 0]]:
                    place = one
        state.degree[giver] -= 1
        rank, end = state.ranks[giver, place], state.degree[giver]
        state.ranks[giver, place] = state.ranks[giver, end]
        state.ranks[taker, state.degree[taker]] = rank
        state.degree[taker] += 1


@inner
def _insert(batch: SearchBatch, state: State, now: np.ndarray, random: np.ndarray, pack: int) -> bool:
    """Put a pack elsewhere in the order of `step`, on as many ranks, one more, or one less: those free first."""
    old, count, degree = 0, len(state.order), state.degree[pack]
    while state.order[old] != pack:
        old += 1
    place = _below(random, count)
    change = _below(random, 8)
    wanted = degree + (1 if change < 2 else -1 if change < 4 else 0)
    if wanted < 1 or wanted > len(state.end) or state.sums[pack, TOKENS] > wanted * batch.capacity:
        return False
    follows = now[2] > 0.0 and _below(random, 2) == 0  # a small batch: all packs after it, too, take ranks free first
    ranks = state.ranks.copy() if follows else state.ranks[pack : pack + 1].copy()
    times = state.time.copy(), state.encode.copy(), state.rest.copy()
    _shift(state.order, old, place)
    state.end[:], state.last[:] = 0.0, -1
    for number in range(place):
        run(state, state.order[number])
    _on_first_free(batch, state, pack, wanted)
    retime(batch, state, pack)
    if follows:
        run(state, pack)
        for number in range(place + 1, count):
            other = state.order[number]
            if state.size[other] > 0:
                _on_first_free(batch, state, other, state.degree[other])
                retime(batch, state, other)
                run(state, other)
    if _judge(batch, state, now, pack, pack):
        return True
    _shift(state.order, place, old)
    state.degree[pack] = degree
    if follows:
        state.ranks[:] = ranks
    else:
        state.ranks[pack] = ranks[0]
    state.time[:], state.encode[:], state.rest[:] = times
    return False


@inner
def _shift(order: np.ndarray, old: int, new: int) -> None:
    """Move an entry to another place."""
    moved = order[old]
    while old < new:
        order[old] = order[old + 1]
        old += 1
    while old > new:
        order[old] = order[old - 1]
        old -= 1
    order[new] = moved


@inner
def _on_first_free(batch: SearchBatch, state: State, pack: int, degree: int) -> None:
    """Give a pack the ranks on which it would end first, alone on each."""
    key = state.end.copy()
    if not batch.uniform:
        seconds = state.time[pack] if state.time[pack] > 0.0 else 0.0
        for rank in range(len(key)):
            key[rank] += seconds / batch.speeds[rank]
    state.degree[pack] = degree
    state.ranks[pack, :degree] = ascending(key)[:degree]
