"""`dhp` for sync=micro_batch: the number of micro-batches, packs and degrees together.

The time is the sum over micro-batches of the slowest pack plus fixed_s. Micro-batches are made one after the other, by a beam search. The longest sequence left
is in the next one; each time that a pack with it may take is tried as the makespan, and the micro-batch is filled (`micro_batch`), largest first, so that
sequences of like length come together: their packs, full of tokens, take alike long. A partial plan is ranked by its time so far plus what the rest needs at
least (its area over all ranks, and fixed_s for as many micro-batches as its tokens need), stretched by WASTE; the best `width` go on. Whenever all that is left
fits into one micro-batch, ending there is a candidate. At last each micro-batch is made as short as can be with its own sequences, by bisection.

O(micro-batches x width x makespans) fills.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dhp_ray.planner.bound import limits_of
from dhp_ray.planner.items import Items, Machine, items_of, machine_of
from dhp_ray.planner.micro_batch import MicroBatch, fill_micro_batch
from dhp_ray.planner.placing import ranks_of
from dhp_ray.planner.problem import Placement, Problem

MAKESPANS, SPAN = 24, 6.0
"""Makespans that are tried for one micro-batch, and the longest over the shortest of them."""

LARGE = 4096
"""Sequences beyond which a quarter of the makespans must do."""

WASTE = 1.05
"""What the rest of a partial plan is taken to need, over its lower bound."""

WORK = 30_000
"""Sequences in all fills of one micro-batch, about: sets the width of the search."""


class Part(NamedTuple):
    """A micro-batch: rows (largest first), and how they are packed."""

    rows: np.ndarray
    packed: MicroBatch

    @property
    def time_s(self) -> float:
        return float(self.packed.time.max())


class State(NamedTuple):
    """A partial plan: what is left (largest first), and the time so far."""

    rest: np.ndarray
    parts: tuple[Part, ...]
    time_s: float


class Lockstep:
    """The search for one batch."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.items: Items = items_of(problem)
        self.machine: Machine = machine_of(problem)
        self.pace = np.sort(self.machine.speeds)[::-1].copy()
        self.fixed_s = problem.cost.fixed_s
        work = self.items.language_s + self.items.vision_s
        self.order = np.argsort(-work, kind="stable")
        self.value = work + self.items.tokens * limits_of(problem).charge_s[self.items.minimum_degree]

    def run(self) -> list[Part]:
        width = int(np.clip(WORK // (MAKESPANS * len(self.order)), 1, 8))
        ends: list[State] = []
        beam = [State(self.order, (), 0.0)]
        while beam:
            for state in beam:
                shortest_s = min((end.time_s for end in ends), default=np.inf)
                if self.items.tokens[state.rest].sum() <= self.problem.cluster.max_tokens and self.least_s(state) < shortest_s:
                    ends += self.end(state)
            following = [after for state in beam[:width] for after in self.next(state)]
            ends += [state for state in following if not len(state.rest)]
            shortest_s = min((state.time_s for state in ends), default=np.inf)
            following = [state for state in following if len(state.rest) and self.least_s(state) < shortest_s]
            beam = sorted(following, key=lambda state: state.time_s + WASTE * (self.least_s(state) - state.time_s))[:3 * width]
        best = sorted(ends, key=lambda state: state.time_s)[:width]
        plans = [[self.shortened(part, 1e-3) for part in state.parts] for state in best]
        return min(plans, key=lambda parts: sum(part.time_s for part in parts) + self.fixed_s * len(parts))

    def end(self, state: State) -> list[State]:
        """All that is left in one micro-batch, if it fits."""
        part = self.together(state.rest)
        return [State(state.rest[:0], (*state.parts, part), state.time_s + part.time_s + self.fixed_s)] if part else []

    def next(self, state: State) -> list[State]:
        """A partial plan with one micro-batch more, for each makespan that holds the longest sequence left."""
        states = []
        for makespan_s in self.makespans(int(state.rest[0])):
            packed = fill_micro_batch(self.items, state.rest, self.value, makespan_s, self.machine, self.pace, False)
            inside = packed.pack >= 0
            if inside[0]:
                part = Part(state.rest[inside], packed._replace(pack=packed.pack[inside]))
                states.append(State(state.rest[~inside], (*state.parts, part), state.time_s + part.time_s + self.fixed_s))
        return states

    def least_s(self, state: State) -> float:
        """A lower bound on the time of every plan that goes on from a partial one."""
        micro_batches = -(-int(self.items.tokens[state.rest].sum()) // self.problem.cluster.max_tokens)
        return state.time_s + float(self.value[state.rest].sum() / self.pace.sum()) + self.fixed_s * micro_batches

    def makespans(self, row: int) -> list[float]:
        """Times that a pack with this sequence may take, falling: from several alike in full memory on its minimum degree, to alone on many ranks."""
        alone = self.alone(row)
        room = self.machine.tokens_per_rank * self.items.minimum_degree[row] / self.items.tokens[row]
        longest = float(alone[0]) * max(1.0, float(room))
        count = MAKESPANS if len(self.order) <= LARGE else MAKESPANS // 4
        return np.geomspace(longest, max(float(alone[-1]), longest / SPAN), count).tolist()  # type: ignore[no-any-return]

    def alone(self, row: int) -> np.ndarray:
        """Times of a sequence on the degrees that it may take, falling."""
        tables, speeds = self.machine.tables, self.pace
        degrees = np.arange(self.items.minimum_degree[row], len(speeds) + 1)
        pace = speeds[degrees - 1]
        crosses = (degrees > self.machine.ranks_per_node).astype(np.int64)
        exposed = tables.transfer_s[crosses, degrees] * self.items.tokens[row] - tables.hidden[degrees] * self.items.attention_s[row] / pace
        encode = np.maximum(self.items.vision_s[row] / degrees, self.items.image_s[row])
        times = (self.items.language_s[row] / degrees + encode) / pace + np.maximum(0.0, exposed) + tables.latency_s[degrees] + tables.pack_s
        return np.unique(times[times <= np.minimum.accumulate(times)])[::-1] * (1 + 1e-12)

    def together(self, rows: np.ndarray) -> Part | None:
        """All rows in one micro-batch, as short as can be; None if they do not fit."""
        longest = float(self.alone(int(rows[0]))[0])
        for makespan_s in (longest, 2 * longest, 4 * longest, 16 * longest):
            packed = fill_micro_batch(self.items, rows, self.value, makespan_s, self.machine, self.pace, True)
            if packed.complete:
                return self.shortened(Part(rows, packed), 1e-2)
        return None

    def shortened(self, part: Part, tolerance: float) -> Part:
        """The same rows in less time, by bisection."""
        low = max(float(self.alone(int(part.rows[0]))[-1]), float(self.value[part.rows].sum()) / float(self.pace.sum()))
        best, high = part, part.time_s
        while high - low > tolerance * high:
            middle = (low + high) / 2
            packed = fill_micro_batch(self.items, part.rows, self.value, middle, self.machine, self.pace, True)
            if packed.complete:
                best, high = Part(part.rows, packed), float(packed.time.max())
            else:
                low = middle
        return best


def dhp_micro_batch(problem: Problem) -> list[Placement]:
    """Placements in order of execution."""
    placements = []
    for index, part in enumerate(Lockstep(problem).run()):
        packed = part.packed
        rows: list[list[int]] = [[] for _ in packed.degree]
        for row, pack in zip(part.rows.tolist(), packed.pack.tolist()):
            rows[pack].append(row)
        for ranks, members in zip(ranks_of(problem, packed.degree, packed.first), rows):
            placements.append(Placement(ranks, tuple(members), index))
    return placements
