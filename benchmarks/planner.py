"""The planner's figures: modelled step times beside its peers' and the baselines', planning on many ranks, reuse of
groups.

    export DHP_RAY_TEST_DATA=FOLDER OMP_NUM_THREADS=1 NUMBA_NUM_THREADS=1
    python benchmarks/planner.py [peers] [cases] [ranks] [pool]    (none: all)

FOLDER holds `cost/flexsp_gpt7b_a800.yaml` and `lengths/`. Times are seconds of the cost model, tokens_per_rank 8192, 8
ranks a node, unless said otherwise. The baselines are in benchmarks/comparisons.py.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections import defaultdict
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dhp_ray.planner import LAST_RESORT, ClusterSpec, CostModel, Plan, Sample, plan_batch, warm_up

if TYPE_CHECKING:
    from benchmarks.planner_cases import Row

FOLDER = Path(os.environ.get("DHP_RAY_TEST_DATA", "data"))
TOKENS_PER_RANK = 8192
BASELINES = ("static", "static_best", "pow2", "dhp_paper", "megatron")

# Modelled seconds of one run of each peer under the same cost file: Megatron main, Megatron dev, the DHP reference,
# FlexSP (5 s of MILP). Megatron main's plans hold up to 4.8 times the token cap.
PEERS = {(128, 8): (20.39, 21.42, 21.84, 22.13), (128, 64): (4.86, 4.86, 5.01, 5.20),
         (512, 64): (8.91, 8.62, 9.26, 9.77),
         (2048, 64): (63.86, 73.63, 73.77, 86.03), (512, 512): (4.00, 4.00, 1.84, 2.39),
         (2048, 512): (15.86, 12.88, 11.94, 12.16),
         (512, 1024): (4.00, 2.91, 1.30, 1.60), (2048, 1024): (9.23, 9.23, 6.13, 7.26)}


SKETCH = {(128, 8): 17.92, (128, 64): 4.23, (512, 64): 6.34, (2048, 64): 60.14, (512, 512): 1.72, (2048, 512): 8.31,
          (2048, 1024): 4.70}
"""Modelled seconds of the first sketch of a planner for sync=step."""


def published_cost() -> CostModel:
    return CostModel.load(FOLDER / "cost" / "flexsp_gpt7b_a800.yaml")


def bimodal(count: int, num_ranks: int, seed: int = 0) -> np.ndarray:
    """5 % long (median 40,000), 95 % short (median 735) lognormal lengths."""
    generator = np.random.default_rng(seed)
    is_long = generator.random(count) < 0.05
    lengths = np.where(is_long, np.exp(generator.normal(10.6, 0.6, count)), np.exp(generator.normal(6.6, 0.7, count)))
    return np.clip(lengths, 64, min(131072, TOKENS_PER_RANK * num_ranks)).astype(int)


def drawn(name: str, count: int, num_ranks: int, seed: int) -> np.ndarray:
    """`count` lengths of a set, at most what the ranks hold."""
    if name == "bimodal":
        return bimodal(count, num_ranks, seed)
    generator, folder = np.random.default_rng(seed), FOLDER / "lengths"
    if name == "internvid":
        bins = np.array(json.loads((folder / "internvid_clip_seconds.json").read_text())["bins_s"], dtype=float)
        chosen = bins[generator.choice(len(bins), count, p=bins[:, 2] / bins[:, 2].sum())]
        lengths = np.maximum(4, np.ceil(generator.uniform(chosen[:, 0], chosen[:, 1]))).astype(int) * 256 + 60
    else:
        files = {"wikipedia": ["wikipedia_sample"], "internvl": ["internvl_ai2d", "internvl_chartqa"]}[name]
        known = np.concatenate([
            np.loadtxt(folder / f"{file}.csv", skiprows=1, delimiter=",", dtype=int, usecols=0) for file in files])
        lengths = generator.choice(known, count)
    return np.minimum(lengths, TOKENS_PER_RANK * num_ranks)


def planned(
    lengths: np.ndarray,
    num_ranks: int,
    cost: CostModel,
    *,
    tokens_per_rank: int = TOKENS_PER_RANK,
    speeds: tuple[float, ...] = (),
    pool: tuple[tuple[int, ...], ...] = (),
    planner: str = "dhp",
    sync: str = "step",
) -> Plan:
    samples = [Sample(str(row), int(length)) for row, length in enumerate(lengths)]
    return plan_batch(samples, ClusterSpec(num_ranks, 8, tokens_per_rank, speeds), cost, planner=planner, sync=sync,
                      pool=pool)


def gap_of(plan: Plan, cost: CostModel) -> float:
    """How far a plan of one micro-batch or step is above its bound, fixed costs left out on both sides."""
    return (plan.predicted_time_s - cost.fixed_s) / (plan.lower_bound_s - cost.fixed_s) - 1


def peers(cost: CostModel) -> None:
    print("\n## Beside the peers' own planners: sync=micro_batch, 8,192 tokens a rank\n")
    print(
        "The peers' packs are as their planners make them. Megatron main's hold up to 4.8 times the tokens, so it is "
        "no part of the ratio.\n"
    )
    print(
        "| sequences/ranks | Megatron main | Megatron dev | DHP reference | FlexSP | dhp (bound) | dhp over the best "
        "of the last three |"
    )
    print("|---|---|---|---|---|---|---|")
    for (count, num_ranks), others in PEERS.items():
        plan = planned(bimodal(count, num_ranks), num_ranks, cost, sync="micro_batch")
        print(
            f"| {count}/{num_ranks} | {' | '.join(f'{other:.2f}' for other in others)} | {plan.predicted_time_s:.2f} "
            f"({plan.lower_bound_s:.2f}) "
            f"| {plan.predicted_time_s / min(others[1:]):.2f} |"
        )


def cases(cost: CostModel) -> None:
    from benchmarks.planner_cases import figures_of, rows  # here: its batches are made of this module's

    print("\n## dhp over the best baseline and the bound, by family (benchmarks/planner_cases.py)\n")
    print(f"Baselines: {', '.join(BASELINES)}, each at its best cap. Planning in thread seconds; its share of the step "
          "is that of the worst row.\n")
    print("| family | rows | over the best baseline, mean | worst (row) | over the bound, mean | planning, median | "
          "share of the step | constructor alone over dhp, mean | worst |\n" + "|---" * 9 + "|")
    by_family: dict[str, list[Row]] = defaultdict(list)
    for row in rows():
        by_family[row.table].append(row)
    for family, members in by_family.items():
        figures_of(members[0])  # the batch's arrays of this size, and what is still to be compiled
        found = [figures_of(row) for row in members]
        best_s = [min(figures_of(row, name).makespan_s for name in BASELINES) for row in members]
        over = [figures.makespan_s / baseline_s for figures, baseline_s in zip(found, best_s)]
        alone = [figures_of(row, LAST_RESORT).makespan_s / figures.makespan_s for row, figures in zip(members, found)]
        above = statistics.mean(figures.makespan_s / figures.bound_s for figures in found)
        planning_s = statistics.median(figures.planning_s for figures in found)
        share = max(figures.planning_s / figures.makespan_s for figures in found)
        worst = max(over)
        print(f"| {family} | {len(members)} | {statistics.mean(over):.4f} | {worst:.4f} "
              f"({members[over.index(worst)].name}) | {above:.4f} | {1e3 * planning_s:.0f} ms | {share:.3f} | "
              f"{statistics.mean(alone):.4f} | {max(alone):.4f} |", flush=True)


def ranks(_: CostModel) -> None:
    cost = CostModel.load(Path(__file__).resolve().parent.parent / "conf" / "cost" / "cuda.yaml")
    print("\n## Planning on many ranks: thread seconds, and the step planned (bound), bimodal lengths, two a rank\n")
    print("| ranks | sync | equal speeds | 5 % spread of speeds |\n|---|---|---|---|")
    for num_ranks, sync in product((64, 512, 1024, 4096), ("step", "micro_batch")):
        lengths, cells = bimodal(2 * num_ranks, num_ranks, 1), []
        for speeds in ((), tuple(np.clip(np.random.default_rng(1).normal(1, 0.05, num_ranks), 0.7, 1.3))):
            begin = time.thread_time()
            plan = planned(lengths, num_ranks, cost, sync=sync, speeds=speeds)
            cells.append(f"{time.thread_time() - begin:.2f} s, {plan.predicted_time_s:.3f} ({plan.lower_bound_s:.3f})")
        print(f"| {num_ranks} | {sync} | {' | '.join(cells)} |", flush=True)


def pool(cost: CostModel) -> None:
    print("\n## Reuse of groups: 200 batches of Wikipedia lengths, 64 ranks, a pool of 32 (least recently used goes)\n")
    print(
        "| sequences a batch | uses after 20 batches | hits | makespan over placement without reuse "
        "|\n|---|---|---|---|"
    )
    for count in (128, 256, 512, 1024):
        uses, hits, longer = reused(count, 200, cost)
        print(f"| {count} | {uses} | {100 * hits / uses:.1f} % | {100 * longer:+.2f} % |")
    print("\nWith `group_s`, making a group is weighed against longer plans. Seconds are means a batch.\n")
    print(
        "| mode, lengths | sequences a batch | making a group | new groups, not weighed | weighed | makespan and "
        "making, not weighed | weighed | |\n|---|---|---|---|---|---|---|---|"
    )
    rows = [("step", "wikipedia", *row) for row in product((128, 256, 512), (0.03, 0.3))]
    for sync, kind, count, group_s in (*rows, ("micro_batch", "bimodal", 512, 0.3)):
        before, after = (weighed(kind, count, 100, cost, group_s, known, sync) for known in (False, True))
        print(f"| {sync}, {kind} | {count} | {group_s} s | {before[0]:.1f} | {after[0]:.1f} | {before[1]:.3f} "
              f"| {after[1]:.3f} | {100 * (after[1] / before[1] - 1):+.1f} % |")


def reused(count: int, batches: int, cost: CostModel) -> tuple[int, int, float]:
    """Uses of groups of two ranks and more after the first 20 batches, how many of them hit the pool, and by what share
    all batches got longer.
    """
    known: list[tuple[int, ...]] = []
    uses, hits, time_s, alone_s = 0, 0, 0.0, 0.0
    for batch in range(batches):
        lengths = drawn("wikipedia", count, 64, batch)
        plan = planned(lengths, 64, cost, pool=tuple(known))
        time_s += plan.predicted_time_s - cost.fixed_s
        alone_s += planned(lengths, 64, cost).predicted_time_s - cost.fixed_s
        for group in plan.groups:
            if group.degree > 1:
                uses += batch >= 20
                hits += batch >= 20 and group.ranks in known
                known = [*(ranks for ranks in known if ranks != group.ranks), group.ranks][-32:]
    return uses, hits, time_s / alone_s - 1


def weighed(
    kind: str, count: int, batches: int, cost: CostModel, group_s: float, known: bool, sync: str, held: int = 32
) -> tuple[float, float]:
    """New groups a batch, and seconds of packs and of making those groups, over batches that share a pool of 32;
    `known`: whether the planner knows what making a group takes."""
    # here: benchmarks/beside.py plans with older checkouts, too, which have no such modules
    from dhp_ray.planner.primitives.list_schedule import list_schedule
    from dhp_ray.planner.schedule import firsts_of, flat

    pool: list[tuple[int, ...]] = []
    new_groups, time_s, priced = 0, 0.0, replace(cost, group_s=group_s)
    for batch in range(batches):
        plan = planned(drawn(kind, count, 64, batch), 64, priced if known else cost, sync=sync,
                       pool=tuple(pool))
        made = [ranks for ranks in plan.process_groups() if ranks not in pool]
        new_groups += len(made)
        members, degrees = flat(made)
        group_creation_s = list_schedule(members, firsts_of(degrees), np.full(len(made), group_s), 64)[1].max()
        time_s += plan.predicted_time_s - cost.fixed_s + group_creation_s
        pool = [*(ranks for ranks in pool if ranks not in plan.process_groups()), *plan.process_groups()][-held:]
    return new_groups / batches, time_s / batches


TABLES = {"peers": peers, "cases": cases, "ranks": ranks, "pool": pool}


def main(names: list[str]) -> int:
    if {"-h", "--help"} & set(names):
        print(__doc__)
        return 0
    unknown = [name for name in names if name not in TABLES]
    if unknown:
        print(f"planner.py: {unknown[0]}: no such table; allowed: {', '.join(TABLES)}", file=sys.stderr)
        return 2
    begin = time.perf_counter()
    print(f"compiled in {warm_up():.1f} s", end="")
    first = time.perf_counter()
    planned(bimodal(512, 64), 64, published_cost())
    print(f"; first call after that {time.perf_counter() - first:.3f} s")
    for name in names or TABLES:
        TABLES[name](published_cost())
    print(f"\n{time.perf_counter() - begin:.0f} s in all")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
