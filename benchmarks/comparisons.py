"""The planner beside its baselines, each at its best pack cap: modelled seconds, one mode and one memory a table.

    export DHP_RAY_TEST_DATA=FOLDER OMP_NUM_THREADS=1
    python benchmarks/comparisons.py [step] [micro_batch] [8192] [32768] [131072]    (none: all)

FOLDER holds `cost/flexsp_gpt7b_a800.yaml`. A row is the sum over three batches of a mix (`bimodal`, seeds 0 to 2), on
nodes of 8 ranks.

    static         one degree and one pack cap for the three batches, the best for their sum
    static_best    the best degree and pack cap of each batch
    pow2           powers of two; dhp_paper: the published method; both at the best pack cap of each batch
    last resort    what runs when a plan is late
    mode           dhp with sync=step over dhp with sync=micro_batch on devices of the same memory:
                   `resident_bytes` plus `memory_bytes_per_token` of
                   conf/cost/cuda.yaml, as the cost file here has neither
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.planner import PEERS, bimodal, published_cost
from benchmarks.planner_cases import MEMORIES
from dhp_ray.config import CONF
from dhp_ray.planner import LAST_RESORT, ClusterSpec, CostModel, Sample, checked_problem, plan_batch, plan_data_set
from dhp_ray.planner.cost.model import SYNCS

BATCHES = 3
TUNED = ("static_best", "pow2", "dhp_paper")


@dataclass(frozen=True)
class Row:
    """Modelled seconds of a mix, all batches together. other_mode_s: dhp's in the other mode with the same device
    memory.
    """

    static_s: float
    tuned_s: tuple[float, ...]
    last_resort_s: float
    dhp_s: float
    bound_s: float
    other_mode_s: float

    @property
    def over_dhp(self) -> float:
        """The best baseline over dhp."""
        return min(self.static_s, *self.tuned_s) / self.dhp_s


def micro_batch_tokens(tokens_per_rank: int) -> int:
    """Tokens a rank in `micro_batch` on a device that holds `tokens_per_rank` in `step`."""
    cost = CostModel.load(CONF / "cost" / "cuda.yaml")
    device_bytes = cost.memory_bytes(tokens_per_rank, 1, "step")
    return int((device_bytes - cost.resident("micro_batch")) / cost.memory_bytes_per_token)


def row_of(count: int, num_ranks: int, tokens_per_rank: int, sync: str, cost: CostModel) -> Row:
    batches = [[Sample(str(row), int(length)) for row, length in enumerate(bimodal(count, num_ranks, seed))]
               for seed in range(BATCHES)]

    def total_s(planner: str, mode: str, tokens: int) -> float:
        return sum(plan_batch(batch, ClusterSpec(num_ranks, 8, tokens), cost, planner=planner,
                              sync=mode).predicted_time_s for batch in batches)

    problems = [checked_problem(batch, ClusterSpec(num_ranks, 8, tokens_per_rank), cost, sync=sync)
                for batch in batches]
    static = plan_data_set(problems)
    return Row(sum(plan.predicted_time_s for plan in static),
               tuple(total_s(planner, sync, tokens_per_rank) for planner in TUNED),
               total_s(LAST_RESORT, sync, tokens_per_rank), total_s("dhp", sync, tokens_per_rank),
               sum(plan.lower_bound_s for plan in static),
               total_s("dhp", "micro_batch", micro_batch_tokens(tokens_per_rank)) if sync == "step" else 0.0)


def table(
    sync: str, tokens_per_rank: int, cost: CostModel, mixes: Sequence[tuple[int, int]] = tuple(PEERS)
) -> list[Row]:
    """Print one table, as in benchmarks/README.md."""
    stepping = sync == "step"
    print(f"\nsync={sync}, {tokens_per_rank:,} tokens a rank:\n")
    mode = f" mode ({micro_batch_tokens(tokens_per_rank):,} tokens in micro_batch) |" if stepping else ""
    print(
        f"| sequences/ranks | static | {' | '.join(TUNED)} | last resort | dhp (bound) | best baseline over dhp | last "
        f"resort over dhp |{mode}"
    )
    print("|" + "---|" * (len(TUNED) + 6 + stepping))
    rows = []
    for count, num_ranks in mixes:
        row = row_of(count, num_ranks, tokens_per_rank, sync, cost)
        rows.append(row)
        gained = f" {row.dhp_s / row.other_mode_s:.2f} |" if stepping else ""
        print(
            f"| {count}/{num_ranks} | {row.static_s:.2f} | {' | '.join(f'{seconds:.2f}' for seconds in row.tuned_s)} | "
            f"{row.last_resort_s:.2f} "
            f"| {row.dhp_s:.2f} ({row.bound_s:.2f}) | {row.over_dhp:.2f} | {row.last_resort_s / row.dhp_s:.2f} "
            f"|{gained}",
            flush=True,
        )
    return rows


def main(words: list[str]) -> int:
    if {"-h", "--help"} & set(words):
        print(__doc__)
        return 0
    allowed = (*SYNCS, *map(str, MEMORIES))
    unknown = [word for word in words if word not in allowed]
    if unknown:
        print(f"comparisons.py: {unknown[0]}: allowed: {', '.join(allowed)}", file=sys.stderr)
        return 2
    begin, cost, summary = time.perf_counter(), published_cost(), []
    for sync in [sync for sync in SYNCS if sync in words] or SYNCS:
        for tokens in [tokens for tokens in MEMORIES if str(tokens) in words] or MEMORIES:
            rows = table(sync, tokens, cost)
            ranges = [[row.over_dhp for row in rows], [row.last_resort_s / row.dhp_s for row in rows]]
            cells = [f"{min(values):.2f} to {max(values):.2f}" for values in ranges]
            summary.append(f"| {sync} | {tokens:,} | {' | '.join(cells)} |")
    print("\n| mode | tokens a rank | best baseline over dhp | last resort over dhp |\n|---|---|---|---|\n"
          + "\n".join(summary))
    print(f"\n{time.perf_counter() - begin:.0f} s in all")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
