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
_SEARCHED = "WORK, STEPS, SEEDS = 2_000_000, 2000, 9"
_STARTS = "orders = np.stack([schedule.rows, largest_first, largest_first])"
_HALF = "max(1, full // 2)"
_PACKED = "if _packs_cost(problem.machine):"
_HIGHEST = "return min(num_ranks, max((degree + node_size - 1) // node_size * node_size, more))"
_UP_TO_A_NODE = "return min(num_ranks, (degree + node_size - 1) // node_size * node_size)"
_ONE_NODE = "if tiny and (machine.rates.inside_s == machine.rates.across_s).all():"
_WHOLE_NODES = "best = _whole_nodes(degree, time, extra, makespan, machine, ranks, gap_weight, best, chosen)"
_MOPPED_QUICKLY = "leftover=max(64, len(work) // 16)"
_BASELINES = "schedules += [*packed_to(problem, cap), paper_at(problem, cap, memory)]"
_NEAR = "NEAR, MANY, HUGE = 1e-2, 5_000_000, 20_000"
_DEALT = "if len(left) > 0 and makespan >= dealt_s:"
_EXCHANGED = "rebalance(loads, encoder, end_s, no_tokens, least_s * (1 + EVEN), PARTNERS)\n"
_ESTIMATED = "    if rate.again == 0.0:\n        return encode_s, rest_s"
_LEAST_WORK = "found, after_s, encode_s + rest_s, given"
_EXCHANGING = "EXCHANGING, COMPARED_S = 0.2, 1e-8"
_FACTORS = "ENCODE_FACTORS = (0.0, 0.85, 0.9, 0.95, 1.0, 1.05, 1.1)"
_SPAN = "(10**9, 4)), 4.5"
_SHORTENED = "[self.shortened(part) for part in min(ends, key=lambda state: state.time_s).parts]"
_NOT_SHORTENED = "list(min(ends, key=lambda state: state.time_s).parts)"
_CROSSES = "    if ranks.machine.uniform:\n        return degree > ranks.machine.ranks_per_node"
_CROSSES_BY_DEGREE = "    if True:\n        return degree > ranks.machine.ranks_per_node"
_NODE_AFTER_NODE = "    if crossing.any() and len(problem.items) * len(machine.speeds) <= MANY:"
_OF_SMALL_BATCHES = "    if crossing.any() and len(problem.items) * len(machine.speeds) <= TINY:"
_AS_EQUAL = "if not problem.machine.uniform and _nodes_may_matter(problem, schedules[0]):"

VARIANTS = (
    one("step: no gap weight of 0.25", _VARIANTS, "VARIANTS = ((1.0, 1.0), (1.0, 1.0), (0.25, 1.0), (0.0, 1.0))"),
    one("step: no gap weight of 1", _VARIANTS, "VARIANTS = ((1.0, 0.25), (1.0, 0.25), (0.25, 0.25), (0.0, 0.25))"),
    one("step: nothing large but what must be", _VARIANTS, "VARIANTS = ((1.0, 0.25), (1.0, 1.0))"),
    one("step: no `large` of 0.25", _VARIANTS, "VARIANTS = ((1.0, 0.25), (1.0, 1.0), (0.0, 1.0))"),
    one("step: no `large` of 0", _VARIANTS, "VARIANTS = ((1.0, 0.25), (1.0, 1.0), (0.25, 1.0))"),
    one("step: half as many widenings", _WIDEN, "WIDEN = (1e-3, 1e-2, 4e-2, 0.16, 0.64, 2.6, 10.0, 1e4)"),
    one("step: widenings from 1 %", _WIDEN, "WIDEN = (1e-2, 4e-2, 0.16, 0.64, 2.6, 10.0, 1e4)"),
    one("step: halved where the expected makespan is close to the feasible one",
        "max(span[2], min(self.expected_s, close_s))", "span[2]"),
    Variant("step: makespans of the table, halved", (
        ("max(self.bound_s * (1 + share), self._ahead_s(tolerance * self.bound_s))", "self.bound_s * (1 + share)"),
        ("if span[0] < self.expected_s < span[1]:", "if False:"))),
    one("step: groups without their list's head too", "np.where(alone, orders[start], -1)", "np.full_like(start, -1)"),
    one("step: no thorough pass", "if self.size <= LARGE and best", "if False and best"),
    one("step: no thorough pass above SMALL", _SIZES, "TINY, SMALL, LARGE = 2_000, 20_000, 20_000"),
    one("step: one tolerance", "FINE if self.size <= SMALL else TOLERANCE", "TOLERANCE"),
    one("step: one round of the thorough pass", "rounds=4", "rounds=1"),
    one("step: two rounds of the thorough pass", "rounds=4", "rounds=2"),
    one("step: one order", "ORDERS = 16", "ORDERS = 1"),
    one("step: 4 orders", "ORDERS = 16", "ORDERS = 4"),
    one("step: nothing is dealt out anew", _DEALT, "if False and makespan >= dealt_s:"),
    one("step: dealt out, without exchanges", "    rebalance(loads, rank_of, ends_s, held, makespan, PARTNERS)\n", ""),
    one("step: exchanges with 128 ranks", "PARTNERS = 8\n", "PARTNERS = 128\n"),
    one("step: dealt out in every trial", _DEALT, "if len(left) > 0:"),
    one("step: packs made beforehand at the bound too", "at_bound = _packs_cost(machine) and _at_bound(",
        "at_bound = False and _at_bound("),
    one("step: packs of large batches in any case", "if found and search.size > LARGE and", "if False and"),
    Variant("step: no mop up", ((_MOPPED_QUICKLY, "leftover=0"), ("leftover=len(work)", "leftover=0"))),
    one("step: the quick pass mops up all", _MOPPED_QUICKLY, "leftover=len(work)"),
    one("step: nodes matter even where links are alike", _ONE_NODE, "if False:"),
    one("step: no local search", "if local and best", "if False and best"),
    one("step: 3 seeds of the local search", _SEARCHED, "WORK, STEPS, SEEDS = 2_000_000, 2000, 3"),
    one("step: local search without a threshold", "THRESHOLD = 0.3", "THRESHOLD = 0.0"),
    one("step: local search from the plan alone", _STARTS, f"seeds = 1\n    {_STARTS}"),
    one("step: no packs made beforehand", _PACKED, "if False:"),
    one("step: of packs and sequences the better after the quick search", "elif not tiny:", "else:"),
    one("step: packs made beforehand with images as if dealt out evenly",
        "made = packed(problem, packs)", "made = packed(problem, packs, deals_images=False)"),
    one("step: packs made beforehand of whole memory", _HALF, "full"),
    one("step: at most 2 ranks more than needed", _HIGHEST, "return min(num_ranks, more)"),
    one("step: no rank more than needed", _HIGHEST, "return degree"),
    one("step: at most a node's ranks, or as many as needed", _HIGHEST, _UP_TO_A_NODE),
    one("step: any number of new groups", "MAX_GROUPS_PER_RANK = 16", "MAX_GROUPS_PER_RANK = 10**9"),
    one("step: whole nodes are not looked for", _WHOLE_NODES, "continue"),
    one("step: 4 runs of ranks of like speed", "RUN, RUNS = 64, 16", "RUN, RUNS = 64, 4"),
    one("pool: no own groups again", "OWN_GROUPS = 256", "OWN_GROUPS = 0"),
    one("pool: no common degree", "if reuse_s > 0.0:", "if False and reuse_s > 0.0:"),
    one("pool: one slack", _REUSE, "REUSE = ((9e-3, 0.1),)"),
    one("pool: no slack", _REUSE, "REUSE = ()"),
    one("no baseline as a candidate", _BASELINES, "pass"),
    one("no pow2 or static as a candidate", _BASELINES, "schedules += [paper_at(problem, cap, memory)]"),
    one("no dhp_paper as a candidate", _BASELINES, "schedules += packed_to(problem, cap)"),
    one("baselines only above NEAR", "SMALL = 10_000", "SMALL = 0"),
    one("baselines only up to SMALL", _NEAR, "NEAR, MANY, HUGE = 1e9, 5_000_000, 20_000"),
    one("baselines with packs of whole memory only", _NEAR, "NEAR, MANY, HUGE = 1e-2, 0, 20_000"),
    one("static of the least degree only", "for factor in (1, 2, 4)", "for factor in (1,)"),
    one("micro_batch: at most 16 makespans", "(256, 40), (1024, 32), (4096, 16)", "(4096, 16)"),
    one("micro_batch: no span", _SPAN, "(10**9, 4)), 1e9"),
    one("micro_batch: a span of 3", _SPAN, "(10**9, 4)), 3.0"),
    one("micro_batch: no limit of encoding", _FACTORS, "ENCODE_FACTORS = (0.0,)"),
    one("micro_batch: one limit of encoding", _FACTORS, "ENCODE_FACTORS = (0.0, 1.0)"),
    one("micro_batch: 16 packs are tried", "LOOKS = 64", "LOOKS = 16"),
    one("micro_batch: all packs are tried", "LOOKS = 64", "LOOKS = 10**9"),
    one("micro_batch: no waste", "WASTE = 1.15", "WASTE = 1.0"),
    one("micro_batch: a waste of 1.3", "WASTE = 1.15", "WASTE = 1.3"),
    one("micro_batch: a third of the work", "WORK = 60_000", "WORK = 20_000"),
    one("micro_batch: node after node, of small batches alone", _NODE_AFTER_NODE, _OF_SMALL_BATCHES),
    one("micro_batch: no plans with few degrees", "if problem.cost.group_s > 0.0 and len(problem.items)",
        "if False and len(problem.items)"),
    one("micro_batch: a beam of one", "* len(self.order)), 1, 8))", "* len(self.order)), 1, 1))"),
    one("micro_batch: a beam of 4 at most", "* len(self.order)), 1, 8))", "* len(self.order)), 1, 4))"),
    one("micro_batch: as many go on as the beam is wide", "[: 3 * self.width]", "[: self.width]"),
    one("micro_batch: ends up to 16 times the longest alone", "else 2 * longest_s", "else 16 * longest_s"),
    one("micro_batch: no shortening", _SHORTENED, _NOT_SHORTENED),
    one("micro_batch: groups that cross nodes by their degree", _CROSSES, _CROSSES_BY_DEGREE),
    one(
        "micro_batch: value without communication",
        "self.items.tokens * limits_of(problem).charge_s[self.items.minimum_degree]",
        "0.0 * self.items.tokens",
    ),
    one("micro_batch: no exchanges between packs", "elif left > 0.0:", "elif False:"),
    one("step: no exchanges between packs", "if not _is_near(problem, timed.seconds):", "if False:"),
    one("micro_batch: exchanges take half as much of a step", _EXCHANGING, "EXCHANGING, COMPARED_S = 0.1, 1e-8"),
    one("micro_batch: exchanges, however short the step", _EXCHANGING, "EXCHANGING, COMPARED_S = 1e9, 1e-8"),
    one("micro_batch: of like exchanges the one with the least work", _LEAST_WORK,
        "found, after_s, abs(more) + abs(encoding), given"),
    Variant("micro_batch: exchanges as if nothing were recomputed", (
        (_ESTIMATED, _ESTIMATED.replace("rate.again == 0.0", "True")),
        ("rate) if rate.again > 0.0 else 0.0", "rate) * 0.0"))),
    one("micro_batch: any number of exchanges in a row that shorten nothing", "evened < num_packs)", "True)"),
    one("no least degrees", "LEAST_DEGREES = (2, 3, 4, 6, 8)", "LEAST_DEGREES = ()"),
    one("exchanges in the shortest schedule alone", "EXCHANGED = 3", "EXCHANGED = 1"),
    one("exchanges: ten times as many are compared", "EFFORT = 1e7", "EFFORT = 1e8"),
    one("exchanges of single sequences", "FEW = 6", "FEW = 1"),
    Variant("recomputation: no fuller packs", (
        ("FULLER = (2, 4)", "FULLER = ()"), (", most] if recomputation.share", "] if recomputation.share"))),
    one("recomputation: only the fullest packs beside", "FULLER = (2, 4)", "FULLER = ()"),
    one("recomputation: packs of twice and four times the tokens alone", ", most] if recomputation.share",
        "] if recomputation.share"),
    one("recomputation: packs of eight times the tokens too", "FULLER = (2, 4)", "FULLER = (2, 4, 8)"),
    one("recomputation: no pack joins more than is cheap", "yield Way(replace(problem, joins_most=True), problem)",
        "yield from ()"),
    one("recomputation: packs join the most in a large batch too", "* cluster.num_ranks <= SMALL", "* 0 <= SMALL"),
    one("micro_batch: one exchange tried a turn", "TRIES = 6", "TRIES = 1"),
    one("micro_batch: unequal ranks are not taken for equal ones", _AS_EQUAL, "if False:"),
    one("apart: no exchanges", _EXCHANGED, "pass\n"),
    one("apart: one start", "for start in (AT_HOME, ANYWHERE, BEST_FIT):", "for start in (AT_HOME,):"),
    one("apart: of few images, too, only the longest are cut", "if best and len(least) <= FEW and", "if False and"),
    one("images of a pack longest first alone", "2 if len(rows) > 1 else 1", "1"),
    one("apart: no best fit", "for start in (AT_HOME, ANYWHERE, BEST_FIT):", "for start in (AT_HOME, ANYWHERE):"),
    one("apart: exchanges with 16 ranks", "PARTNERS = 128", "PARTNERS = 16"),
    one("apart: even within 1 %", "EVEN, FAR = 1e-3, 1e-2", "EVEN, FAR = 1e-2, 1e-2"),
    one("last resort: the quick search of small batches too", "len(problem.items) * problem.cluster.num_ranks <= TINY",
        "False"),
)
