"""Megatron's dynamic context parallelism, after the ideas of its source: `--hybrid-context-parallel` of the branch
main (core/pipeline_parallel/hybrid_cp_schedule.py) and, with packing, `dynamic_context_parallel` of the branch dev.

The work of a sequence is its length squared over its degree. The degree is the least power of two with which a rank
holds at most a cap of tokens. Rounds are made one after another, each starting with all ranks free:

1. The remaining sequences, longest first, are cut into runs of about equal work, as many runs as there are degrees.
2. The first run whose next sequence has a place gives up that sequence: to free ranks, or to the group of its degree
   with the least work. A round ends when no run's next sequence has a place, or, once degrees fall, when the ranks'
   work differs by at most 5 %.
3. As long as ranks are free, the first of the smallest groups grows to twice its ranks, and the groups after it move
   on.

On dev (`packs`) a group takes at most the cap on each of its ranks, and its sequences run as one pack. On main a group
has no limit and runs its sequences one after another; the last sequence of the group with the most work moves to a
later round as long as that makes the work more even. Here main's groups run packs as large as memory allows. With
`sync=micro_batch` the first packs of a round's groups form a micro-batch, then the second ones. With `sync=step` no
rank waits between rounds. The cap is tuned, and the better of main and dev is taken. All three are more than Megatron
does.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dhp_ray.planner.baselines.pack_cap import best_cap, degrees_at, powers_of_two
from dhp_ray.planner.primitives.compiled import compiled, inner
from dhp_ray.planner.problem import Problem
from dhp_ray.planner.schedule import Schedule, by_owner, firsts_of

BALANCED, OVERFULL = 0.05, 1.1
"""Constants of Megatron's source: the share by which the ranks' work differs at most in a balanced round; and the
multiple of an equal share of the work up to which a run is filled.
"""


class MegatronRounds(NamedTuple):
    """`group` has the group of each sequence. The others have, for each group in order, its round, first rank and
    degree.
    """

    group: np.ndarray
    round: np.ndarray
    first_rank: np.ndarray
    degree: np.ndarray


def megatron(problem: Problem) -> Schedule:
    found = [(*best_cap([problem], kind), place) for place, kind in enumerate(KINDS)]
    _, cap, place = min(found)
    return KINDS[place](problem, cap)


def dev(problem: Problem, cap: int) -> Schedule:
    """A pack for each group."""
    return groups_as_packs(problem, rounds_of(problem, cap, packs=True))


def main(problem: Problem, cap: int) -> Schedule:
    """Packs that fill memory; those of a group run one after another, longest sequences first."""
    rounds, tokens = rounds_of(problem, cap, packs=False), problem.items.tokens
    rows = np.lexsort((-tokens, rounds.group))
    capacity = rounds.degree * problem.cluster.tokens_per_rank
    turn = _turns(tokens[rows], rounds.group[rows], capacity)
    order = np.lexsort((rounds.group[rows], turn, rounds.round[rounds.group[rows]]))
    rows, turn = rows[order], turn[order]
    group = rounds.group[rows]
    first_row = np.flatnonzero(np.diff(group, prepend=-1) | np.diff(turn, prepend=-1))
    group, turn = group[first_row], turn[first_row]
    return Schedule(rows, np.append(first_row, len(rows)), _ranks(rounds, group), firsts_of(rounds.degree[group]),
                    _micro_batches(problem, rounds.round[group], turn))


KINDS = (dev, main)


def groups_as_packs(problem: Problem, rounds: MegatronRounds) -> Schedule:
    """All sequences of a group in one pack, whether memory holds it or not."""
    rows, first_row = by_owner(rounds.group, len(rounds.degree))
    every = np.arange(len(rounds.degree))
    return Schedule(rows, first_row, _ranks(rounds, every), firsts_of(rounds.degree),
                    _micro_batches(problem, rounds.round, np.zeros_like(every)))


def _micro_batches(problem: Problem, round_: np.ndarray, turn: np.ndarray) -> np.ndarray:
    """The micro-batch of each pack, given the round and turn of packs in this order."""
    new = (np.diff(round_, prepend=0) != 0) | (np.diff(turn, prepend=0) != 0)
    return np.cumsum(new) * int(problem.sync == "micro_batch")


def rounds_of(problem: Problem, cap: int, packs: bool) -> MegatronRounds:
    """The rounds and groups of the sequences, with at most `cap` tokens a rank (on main: of one sequence)."""
    tokens, num_ranks = problem.items.tokens, problem.cluster.num_ranks
    degree = powers_of_two(degrees_at(tokens, cap, num_ranks), num_ranks)
    order = np.argsort(-tokens, kind="stable")
    group, of_group, count = _rounds(tokens, degree, order, cap, num_ranks, packs)
    return MegatronRounds(group, *of_group[:, :count])


def _ranks(rounds: MegatronRounds, group: np.ndarray) -> np.ndarray:
    """The ranks of these groups, one group after another."""
    degree = rounds.degree[group]
    first = firsts_of(degree)
    return np.repeat(rounds.first_rank[group] - first[:-1], degree) + np.arange(first[-1])


@compiled
def _turns(tokens: np.ndarray, group: np.ndarray, capacity: np.ndarray) -> np.ndarray:
    """The number of each sequence's pack within its group. The sequences of a group are adjacent; they fill one pack
    after another.
    """
    turn, held = np.zeros(len(tokens), dtype=np.int64), 0
    for place in range(len(tokens)):
        same = place > 0 and group[place] == group[place - 1]
        turn[place] = turn[place - 1] if same else 0
        held = held + tokens[place] if same else tokens[place]
        if held > capacity[group[place]]:
            turn[place], held = turn[place] + 1, tokens[place]
    return turn


@compiled
def _rounds(
    tokens: np.ndarray, degree: np.ndarray, order: np.ndarray, cap: int, num_ranks: int, packs: bool
) -> tuple[np.ndarray, np.ndarray, int]:
    """(the group of each sequence; the other fields of `MegatronRounds`, a column for each group; number of groups).
    O(sequences x ranks).
    """
    group, of_group = np.zeros(len(tokens), dtype=np.int64), np.zeros((3, len(tokens)), dtype=np.int64)
    count, number = 0, 0
    while len(order):
        left, groups = _round(tokens, degree, order, cap, num_ranks, packs, group, of_group[:, count:])
        _grow(of_group[:, count : count + groups], num_ranks)
        for sequence in order:
            group[sequence] += count
        of_group[0, count : count + groups] = number
        order, count, number = left, count + groups, number + 1
    return group, of_group, count


@inner
def _round(
    tokens: np.ndarray, degree: np.ndarray, order: np.ndarray, cap: int, num_ranks: int, packs: bool, group: np.ndarray,
    of_group: np.ndarray,
) -> tuple[np.ndarray, int]:
    """(the sequences left for later rounds, number of groups); groups count from 0."""
    heads, ends = _runs(tokens, degree, order)
    load, held, last = np.zeros(num_ranks), np.zeros(num_ranks), np.full(num_ranks, -1)
    before = np.full(len(tokens), -1)  # for each sequence, the one that its group took before it
    free, count, first_degree, falls = num_ranks, 0, 0, False
    while True:
        best, run, need = -1, 0, 0
        while run < len(heads):
            if heads[run] < ends[run]:
                sequence = order[heads[run]]
                need, best = degree[sequence], -1
                for place in range(count):
                    has_room = not packs or held[place] + tokens[sequence] / need <= cap
                    if of_group[2, place] == need and has_room and (best < 0 or load[place] < load[best]):
                        best = place
                if free >= need and (best < 0 or load[best] > 0.0):
                    best = count
                if best >= 0:
                    break
            run += 1
        if best < 0:
            break
        if best == count:
            of_group[1, count], of_group[2, count] = num_ranks - free, need
            free, count = free - need, count + 1
        heads[run] += 1
        first_degree = first_degree or need
        group[sequence], before[sequence], last[best] = best, last[best], sequence
        load[best] += tokens[sequence] * tokens[sequence] / need
        held[best] += tokens[sequence] / need
        falls = falls or need < first_degree
        most = load[:count].max()
        if falls and free == 0 and most - load[:count].min() <= BALANCED * most:
            break
    left, size = np.zeros(len(order), dtype=np.int64), 0
    for run in range(len(heads)):
        for place in range(heads[run], ends[run]):
            left[size] = order[place]
            size += 1
    while not packs and free == 0:
        full = int(load[:count].argmax())
        slack = load[full] - load[:count].min()
        sequence = last[full]
        if slack <= BALANCED * load[full] or before[sequence] < 0:
            break
        load[full] -= tokens[sequence] * tokens[sequence] / of_group[2, full]
        if load[:count].max() - load[:count].min() >= slack:
            break
        left[size], last[full] = sequence, before[sequence]
        size += 1
    return left[:size], count


@inner
def _runs(tokens: np.ndarray, degree: np.ndarray, order: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where each run of about equal work begins and ends in `order`."""
    seen, kinds, total = np.zeros(len(order), dtype=np.int64), 0, 0.0
    for place in range(len(order)):
        known = 0  # sequences that main has put off come last, with any degree
        while known < kinds and seen[known] != degree[order[place]]:
            known += 1
        if known == kinds:
            seen[kinds] = degree[order[place]]
            kinds += 1
        total += tokens[order[place]] * tokens[order[place]] / degree[order[place]]
    begins, ends = np.zeros(len(order), dtype=np.int64), np.zeros(len(order), dtype=np.int64)
    count, inside, work = 0, 0, 0.0
    for place in range(len(order)):
        own = tokens[order[place]] * tokens[order[place]] / degree[order[place]]
        if inside and (work + own > OVERFULL * total / kinds or len(order) - place <= kinds - count - 1):
            ends[count], begins[count + 1] = place, place
            count, inside, work = count + 1, 0, 0.0
        inside, work = inside + 1, work + own
    ends[count] = len(order)
    return begins[: count + 1], ends[: count + 1]


@inner
def _grow(of_group: np.ndarray, num_ranks: int) -> None:
    """Give free ranks to the smallest group (of several the first), as many as it has already, until none is free."""
    free = num_ranks - of_group[2].sum()
    while free > 0:
        smallest = int(of_group[2].argmin())
        more = min(of_group[2, smallest], free)
        of_group[2, smallest] += more
        of_group[1, smallest + 1 :] += more
        free -= more
