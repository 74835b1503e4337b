"""`dhp` for sync=micro_batch: decides the number of micro-batches, packs and degrees together.

The time is the sum over micro-batches of fixed_s and, at least gather_s, the longest encoding of any pack plus the
longest rest of any. Micro-batches are made one after another, by a beam search. The longest remaining sequence is in
the next micro-batch. Each time that a pack with it may take is tried as the makespan of all packs, and the micro-batch
is filled (`filling`) largest first, so that sequences of similar length are together: their packs, full of tokens, take
about the same time. The micro-batch itself takes longer where one pack has many images and another has none, so each
makespan is also tried with a separate limit for encoding. A partial plan is ranked by its time so far plus a lower
bound for the rest (its area over all ranks, and fixed_s for as many micro-batches as its tokens need) times WASTE; the
best `width` continue. Whenever all remaining sequences fit into one micro-batch, ending there is a candidate. Finally
each micro-batch is made as short as possible with its own sequences, by bisection.

O(micro-batches x width x makespans) fills.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from dhp_ray.planner.encoders import longest_first
from dhp_ray.planner.items import Machine
from dhp_ray.planner.limits import limits_of
from dhp_ray.planner.micro_batch.filling import Fastest, MicroBatch, fill_micro_batch
from dhp_ray.planner.micro_batch.makespans import encode_shares_of, extremes_s, shortest_micro_batch, trials
from dhp_ray.planner.micro_batch.placing import ranks_of
from dhp_ray.planner.pricing import time_of
from dhp_ray.planner.problem import Problem
from dhp_ray.planner.schedule import Schedule, by_owner, crosses_nodes, firsts_of
from dhp_ray.planner.step.cached_groups import cached_groups_of

MAKESPANS, SPAN = ((256, 40), (1024, 32), (4096, 16), (10**9, 4)), 4.5
"""(Number of sequences, makespans tried for one micro-batch with up to that many); and the ratio of the longest
makespan to the shortest.
"""

WASTE = 1.15
"""The rest of a partial plan is assumed to need its lower bound times this."""

WORK = 60_000
"""Approximate number of sequences in all fills of one micro-batch (with images twice as many), which determines the
width of the search.
"""

TINY, LONGEST = 2_000, 2.0
"""Sequences x ranks of a small batch; and the longest makespan tried for its micro-batches, as a multiple of the least
time for all remaining sequences. From longer makespans, SPAN would not reach the short micro-batches of few sequences.
"""


MANY = 2_500_000
"""Sequences x ranks up to which further plans are made: as if all ranks were equal (above, only if that plan may be
shorter), with few degrees, and node after node.
"""

HELD_UP = 0.4
"""If ranks are unequal, a plan that treats them as equal is longer by about this share or more of (mean speed / slowest
speed - 1): by 0.41 to 0.97 of it on 64 to 4,096 ranks with costs that hardly depend on nodes, if mean and slowest
speed differ by 1 % or more.
"""


class Part(NamedTuple):
    """A micro-batch: its rows (largest first), how they are packed, the share of the makespan that encoding may take
    (`fill_micro_batch`), and a makespan that is too short for them.
    """

    rows: np.ndarray
    packed: MicroBatch
    encode_share: float
    low_s: float

    @property
    def time_s(self) -> float:
        return float(self.packed.seconds)


class State(NamedTuple):
    """A partial plan: the remaining rows (largest first), their value and tokens, and the time so far."""

    rest: np.ndarray
    value: float
    tokens: int
    parts: tuple[Part, ...]
    time_s: float


class Step(NamedTuple):
    """A possible next micro-batch after a partial plan, not made yet."""

    rank_s: float
    state: State
    makespan_s: float
    encode_share: float


class MicroBatchSearch:
    """The search for one batch. `degrees`, `least`: see `Fastest`."""

    def __init__(self, problem: Problem, machine: Machine, degrees: np.ndarray, least: int = 1) -> None:
        self.items, self.images = problem.items, longest_first(problem.first_image, problem.all_image_s)
        fastest_first = np.argsort(-machine.speeds, kind="stable")
        rates = replace(problem.cost, gather_s=0.0).rates(len(machine.speeds), problem.cluster.layer_share)
        self.ranks = Fastest(
            machine._replace(rates=rates),
            machine.speeds[fastest_first],
            machine.node[fastest_first],
            problem.cost.linear_s,
            problem.cost.quadratic_s,
            problem.cost.gather_s,
            degrees,
            least,
        )
        self.fixed_s, self.max_tokens, self.total_speed = (
            problem.cost.fixed_s,
            problem.cluster.max_tokens,
            float(machine.speeds.sum()),
        )
        work = self.items.language_s + self.items.vision_s
        self.order = np.argsort(-work, kind="stable")
        self.value = work + self.items.tokens * limits_of(problem).charge_s[self.items.minimum_degree]
        self.makespans = next(makespans for most, makespans in MAKESPANS if len(self.order) <= most)
        self.longest = LONGEST if len(self.order) * len(machine.speeds) <= TINY else np.inf
        self.width = int(np.clip(WORK // (self.makespans * len(self.order)), 1, 8))

    def run(self) -> list[Part]:
        ends: list[State] = []
        beam = [State(self.order, float(self.value.sum()), int(self.items.tokens.sum()), (), 0.0)]
        while beam:
            for state in beam:
                ends += self.end(state, shortest_s(ends))
            steps = [step for state in beam[: self.width] for step in self.steps(state, shortest_s(ends))]
            following = [self.after(step) for step in sorted(steps, key=lambda step: step.rank_s)[: 3 * self.width]]
            ends += [state for state in following if not len(state.rest)]
            beam = [state for state in following if len(state.rest)]
        return [self.shortened(part) for part in min(ends, key=lambda state: state.time_s).parts] if ends else []

    def least_s(self, value: float, tokens: float) -> float:
        """A lower bound on the time of the rest of a plan."""
        micro_batches = -(-tokens // self.max_tokens)
        return max(value / self.total_speed, micro_batches * self.ranks.gather_s) + micro_batches * self.fixed_s

    def end(self, state: State, limit_s: float) -> list[State]:
        """All remaining rows in one micro-batch, if they fit and its packs end before `limit_s`; what is found last is
        the shortest.
        """
        longest_s, low_s = extremes_s(self.items, state.rest[0], self.ranks)
        low_s, room_s = max(low_s, state.value / self.total_speed), limit_s - state.time_s - self.fixed_s
        if state.tokens > self.max_tokens or low_s >= room_s:
            return []
        high_s = room_s if room_s < np.inf else 2 * longest_s
        found = []
        for encode_share in encode_shares_of(self.items, state.rest).tolist():
            packed, too_short_s = shortest_micro_batch(
                self.items, self.images, state.rest, self.value, low_s, high_s, 1e-2, encode_share, self.ranks
            )
            if packed.complete:
                high_s = min(room_s, packed.seconds)
                part = Part(state.rest, packed, encode_share, too_short_s)
                time_s = state.time_s + part.time_s + self.fixed_s
                found.append(State(state.rest[:0], 0.0, 0, (*state.parts, part), time_s))
            elif not found:  # with a limit for encoding they hardly fit where they do not without
                break
        return found

    def steps(self, state: State, limit_s: float) -> list[Step]:
        """The possible next micro-batches (`trials`), if the plan may then end before `limit_s`. Those with the same
        result count once.
        """
        steps = {}
        longest_s = self.longest * state.value / self.total_speed
        encode_shares = encode_shares_of(self.items, state.rest)
        for makespan_s, encode_share, seconds, value, tokens in trials(
            self.items, self.images, state.rest, self.value, self.makespans, SPAN, longest_s, encode_shares, self.ranks
        ).tolist():
            so_far_s, rest_s = (
                state.time_s + seconds + self.fixed_s,
                self.least_s(state.value - value, state.tokens - tokens),
            )
            if so_far_s + rest_s < limit_s:
                steps[seconds, value] = Step(so_far_s + WASTE * rest_s, state, makespan_s, encode_share)
        return list(steps.values())

    def after(self, step: Step) -> State:
        """The partial plan after a step."""
        state = step.state
        packed = fill_micro_batch(
            self.items, self.images, state.rest, self.value, step.makespan_s, step.encode_share, self.ranks, False
        )
        inside = packed.pack >= 0
        least_s = extremes_s(self.items, state.rest[0], self.ranks)[1]
        part = Part(
            state.rest[inside],
            packed._replace(pack=packed.pack[inside]),
            step.encode_share,
            max(least_s, packed.value / self.total_speed),
        )
        return State(
            state.rest[~inside],
            state.value - packed.value,
            state.tokens - packed.tokens,
            (*state.parts, part),
            state.time_s + part.time_s + self.fixed_s,
        )

    def shortened(self, part: Part) -> Part:
        """The same rows in less time."""
        packed, low_s = shortest_micro_batch(
            self.items, self.images, part.rows, self.value, part.low_s, part.packed.makespan, 1e-3, part.encode_share,
            self.ranks,
        )
        return part._replace(packed=packed, low_s=low_s) if packed.complete and packed.seconds < part.time_s else part


def shortest_s(ends: list[State]) -> float:
    return min((end.time_s for end in ends), default=np.inf)


def dhp_micro_batch(problem: Problem) -> list[Schedule]:
    """Candidate schedules. If ranks are unequal, the first one assigns them to packs by speed, regardless of nodes. A
    second one treats them as equal, so that packs stay inside nodes; it is left out for a huge batch if it is hardly
    shorter (`_nodes_may_matter`). If making a process group takes time, two more use only few degrees, which need
    the same groups batch after batch: powers of two; and powers of two up to half a node, and whole nodes.
    """
    num_ranks, node_size = problem.cluster.num_ranks, problem.cluster.ranks_per_node
    any_number = least_degrees(range(1, num_ranks + 1), num_ranks)
    schedules = [micro_batch_schedule(problem, problem.machine, any_number)]
    if not problem.machine.uniform and _nodes_may_matter(problem, schedules[0]):
        schedules.append(micro_batch_schedule(problem, problem.nominal_machine, any_number))
    if problem.cost.group_s > 0.0 and len(problem.items) * num_ranks <= MANY:
        powers = [2**power for power in range(num_ranks.bit_length())]
        inside_or_whole = [power for power in powers if power <= node_size // 2]
        inside_or_whole += range(node_size, num_ranks + 1, node_size)
        schedules += [micro_batch_schedule(problem, problem.nominal_machine, least_degrees(few, num_ranks))
                      for few in (powers, inside_or_whole)]
    return schedules


def micro_batch_of_least_degree(problem: Problem, least: int) -> list[Schedule]:
    """A plan whose packs have at least so many ranks; none if no such packs fit."""
    num_ranks = problem.cluster.num_ranks
    schedule = micro_batch_schedule(problem, problem.machine, least_degrees(range(1, num_ranks + 1), num_ranks), least)
    return [schedule] if len(schedule.micro_batch) else []


def _nodes_may_matter(problem: Problem, schedule: Schedule) -> bool:
    """Return whether a plan whose packs stay inside nodes may be shorter than this one, whose packs follow speeds. That
    plan saves at most what crossing nodes costs this one, but slow ranks make it longer (HELD_UP).

    Example: this plan takes 8 s, and would take 7.9 s if all ranks were in one node, so at most 1.25 % can be saved. If
    the mean speed is 10 % above the slowest, the other plan is some 4 % longer: it need not be made.
    """
    if len(problem.items) * problem.cluster.num_ranks <= MANY:
        return True
    one_node = replace(problem.cluster, ranks_per_node=problem.cluster.num_ranks, nodes=())
    inside_s = time_of(replace(problem, cluster=one_node), schedule)
    unequal = problem.speeds.mean() / problem.speeds.min() - 1.0
    return inside_s * (1.0 + HELD_UP * unequal) < time_of(problem, schedule)


def least_degrees(degrees: Sequence[int], num_ranks: int) -> np.ndarray:
    """`Fastest.degrees` if packs may have only these degrees (ascending), or all ranks."""
    allowed = np.array([*(degree for degree in degrees if degree < num_ranks), num_ranks])
    return np.append(allowed[np.searchsorted(allowed, np.arange(num_ranks + 1))], num_ranks + 1)


def node_after_node(problem: Problem, schedule: Schedule) -> list[Schedule]:
    """A plan that assigns ranks node after node. It is made if `schedule` has groups that cross nodes although one node
    would hold them, because other groups leave too little of each node.
    """
    machine, degree = problem.machine, np.diff(schedule.first_rank)
    crossing = crosses_nodes(schedule, machine.node) & (degree <= machine.ranks_per_node)
    if crossing.any() and len(problem.items) * len(machine.speeds) <= MANY:
        num_ranks = problem.cluster.num_ranks
        return [micro_batch_schedule(problem, machine._replace(uniform=False),
                                     least_degrees(range(1, num_ranks + 1), num_ranks))]
    return []


def micro_batch_schedule(problem: Problem, machine: Machine, degrees: np.ndarray, least: int = 1) -> Schedule:
    """The result of the search for the ranks of this machine, with packs of these degrees; without groups if there is
    none.
    """
    search = MicroBatchSearch(problem, machine, degrees, least)
    parts, pool = search.run(), cached_groups_of(problem)
    if not parts:
        return Schedule(*(np.zeros(0, dtype=np.int64) for _ in range(5)))
    packs = [by_owner(part.packed.pack, len(part.packed.degree)) for part in parts]
    of_packs = [part.packed.degree for part in parts]
    return Schedule(
        np.concatenate([part.rows[members] for part, (members, _) in zip(parts, packs)]),
        firsts_of(np.concatenate([np.diff(first) for _, first in packs])),
        np.concatenate([ranks_of(firsts_of(degree), machine, pool) for degree in of_packs]),
        firsts_of(np.concatenate(of_packs)),
        np.repeat(np.arange(len(parts)), [len(degree) for degree in of_packs]),
    )
