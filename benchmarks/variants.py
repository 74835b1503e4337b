"""Variants of the planner's search: what each constant and each stage is taken away by (`benchmarks/ablation.py`)."""

from __future__ import annotations

from typing import NamedTuple


class Variant(NamedTuple):
    """A name, and edits: (a text that stands once in dhp_ray/planner, what stands there instead)."""

    name: str
    edits: tuple[tuple[str, str], ...]


def one(name: str, text: str, replacement: str) -> Variant:
    return Variant(name, ((text, replacement),))


_VARIANTS = "VARIANTS = ((1.0, 0.25), (1.0, 1.0), (0.25, 1.0), (0.0, 1.0))"
_WIDEN = "WIDEN = (1e-3, 3e-3, 1e-2, 2e-2, 4e-2, 8e-2, 0.16, 0.32, 0.64, 1.3, 2.6, 5.2, 10.0, 100.0, 1e4)"
_REUSE = "REUSE = ((3e-3, 1.0), (9e-3, 0.1), (9e-3, 0.01))"
_SIZES = "TINY, SMALL, LARGE = 2_000, 20_000, 1_000_000"
_NEAR = "NEAR, SMALL, HUGE = 1e-2, 10_000, 20_000"
_SEARCHED = "WORK, STEPS, SEEDS = 2_000_000, 2000, 9"
_MAKESPANS = "MAKESPANS, SPAN = ((256, 40), (4096, 16), (10**9, 4)), 4.5"
_BASELINES = "schedules += [*packed_to_memory(problem), paper_at(problem, memory, memory)]"
_HIGHEST = "return min(num_ranks, max((degree + node_size - 1) // node_size * node_size, more))"
_PACKED = "if rates.overhead_s.any() or rates.overlap.any():"

VARIANTS = (
    one(
        "step: no gap weight of 0.25",
        _VARIANTS,
        "VARIANTS = ((1.0, 1.0), (1.0, 1.0), (0.25, 1.0), (0.0, 1.0))",
    ),
    one(
        "step: no gap weight of 1",
        _VARIANTS,
        "VARIANTS = ((1.0, 0.25), (1.0, 0.25), (0.25, 0.25), (0.0, 0.25))",
    ),
    one("step: nothing large but what must be", _VARIANTS, "VARIANTS = ((1.0, 0.25), (1.0, 1.0))"),
    one("step: no `large` of 0.25", _VARIANTS, "VARIANTS = ((1.0, 0.25), (1.0, 1.0), (0.0, 1.0))"),
    one("step: no `large` of 0", _VARIANTS, "VARIANTS = ((1.0, 0.25), (1.0, 1.0), (0.25, 1.0))"),
    one("step: half as many widenings", _WIDEN, "WIDEN = (1e-3, 1e-2, 4e-2, 0.16, 0.64, 2.6, 10.0, 1e4)"),
    one("step: widenings by 4 from 1 %", _WIDEN, "WIDEN = (1e-2, 4e-2, 0.16, 0.64, 2.6, 10.0, 1e4)"),
    one(
        "step: no thorough pass",
        "        if self.size <= LARGE and",
        "        if False and self.size <= LARGE and",
    ),
    one("step: no thorough pass above SMALL", _SIZES, "TINY, SMALL, LARGE = 2_000, 20_000, 20_000"),
    one("step: all is as SMALL up to LARGE", _SIZES, "TINY, SMALL, LARGE = 2_000, 1_000_000, 1_000_000"),
    one("step: one order", "ORDERS = 16", "ORDERS = 1"),
    one("step: 4 orders", "ORDERS = 16", "ORDERS = 4"),
    Variant(
        "step: no mop up",
        (
            ("leftover=max(64, len(work) // 16)", "leftover=0"),
            ("leftover=len(work)", "leftover=0"),
        ),
    ),
    one("step: the quick pass mops up all", "leftover=max(64, len(work) // 16)", "leftover=len(work)"),
    one("step: no local search", "<= TINY and alike(machine)", "<= TINY and False and alike(machine)"),
    one("step: 3 seeds of the local search", _SEARCHED, "WORK, STEPS, SEEDS = 2_000_000, 2000, 3"),
    one("step: local search without a threshold", "THRESHOLD = 0.3", "THRESHOLD = 0.0"),
    one(
        "step: local search from the plan alone",
        "orders = np.stack([schedule.rows, largest_first, largest_first])",
        "orders, seeds = np.stack([schedule.rows, largest_first, largest_first]), 1",
    ),
    one("step: no packs made beforehand", _PACKED, "if False:"),
    one("step: at most 2 ranks more than needed", _HIGHEST, "return min(num_ranks, more)"),
    one("step: no rank more than needed", _HIGHEST, "return degree"),
    one(
        "step: at most a node's ranks, or as many as needed",
        _HIGHEST,
        "return min(num_ranks, (degree + node_size - 1) // node_size * node_size)",
    ),
    one("step: any number of new groups", "MAX_GROUPS_PER_RANK = 16", "MAX_GROUPS_PER_RANK = 10**9"),
    one("pool: no own groups again", "OWN_GROUPS = 256", "OWN_GROUPS = 0"),
    one("pool: no common degree", "if reuse_s > 0.0:", "if False and reuse_s > 0.0:"),
    one("pool: one slack", _REUSE, "REUSE = ((9e-3, 0.1),)"),
    one("pool: no slack", _REUSE, "REUSE = ()"),
    one("no baseline as a candidate", _BASELINES, "pass"),
    one("no pow2 or static as a candidate", _BASELINES, "schedules += [paper_at(problem, memory, memory)]"),
    one("no dhp_paper as a candidate", _BASELINES, "schedules += packed_to_memory(problem)"),
    one("baselines only above NEAR", _NEAR, "NEAR, SMALL, HUGE = 1e-2, 0, 20_000"),
    one("baselines only up to SMALL", _NEAR, "NEAR, SMALL, HUGE = 1e9, 10_000, 20_000"),
    one("baselines for any number of sequences", _NEAR, "NEAR, SMALL, HUGE = 1e-2, 10_000, 10**9"),
    one("micro_batch: 16 makespans", _MAKESPANS, "MAKESPANS, SPAN = ((4096, 16), (10**9, 4)), 4.5"),
    one("micro_batch: 16 makespans for any batch", _MAKESPANS, "MAKESPANS, SPAN = ((10**9, 16),), 4.5"),
    one(
        "micro_batch: no last makespans below the span",
        _MAKESPANS,
        "MAKESPANS, SPAN = ((256, 40), (4096, 16), (10**9, 4)), 1e9",
    ),
    one(
        "micro_batch: a span of 3",
        _MAKESPANS,
        "MAKESPANS, SPAN = ((256, 40), (4096, 16), (10**9, 4)), 3.0",
    ),
    one("micro_batch: no waste", "WASTE = 1.15", "WASTE = 1.0"),
    one("micro_batch: a waste of 1.3", "WASTE = 1.15", "WASTE = 1.3"),
    one("micro_batch: a beam of one", "* len(self.order)), 1, 8))", "* len(self.order)), 1, 1))"),
    one("micro_batch: a beam of 4 at most", "* len(self.order)), 1, 8))", "* len(self.order)), 1, 4))"),
    one("micro_batch: as many go on as the beam is wide", "[: 3 * self.width]", "[: self.width]"),
    one(
        "micro_batch: no shortening",
        "[self.shortened(part) for part in min(ends, key=lambda state: state.time_s).parts]",
        "list(min(ends, key=lambda state: state.time_s).parts)",
    ),
    one(
        "micro_batch: value without communication",
        "self.items.tokens * limits_of(problem).charge_s[self.items.minimum_degree]",
        "0.0 * self.items.tokens",
    ),
    one(
        "last resort: no baseline",
        "            schedules += packed_to_memory(problem)",
        "            pass",
    ),
    one(
        "last resort: no packs inside nodes",
        "    if not problem.machine.uniform:\n        schedules",
        "    if False:\n        schedules",
    ),
    one(
        "last resort: quick trials alone",
        "search.thorough if search.size <= TINY else search.quick",
        "search.quick",
    ),
)
