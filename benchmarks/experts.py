"""Experts shared by E neighbouring ranks, whatever packs these run (folded), beside experts that the ranks of one pack
share (tied to attention). Modelled. `python benchmarks/experts.py [qwen] [mixtral]`    (none: both)

    export DHP_RAY_TEST_DATA=FOLDER OMP_NUM_THREADS=1        FOLDER holds `lengths/wikipedia_sample.csv`

qwen      Qwen3-30B-A3B and 235B-A22B, 8 samples a rank: `dhp` with packs of any degree, and with degrees that are
          multiples of E, at the same memory and costs. There E neighbours are a unit: `dhp` plans units of E ranks
          (`UnitCost`), and the plan is priced on the ranks. Each layout, and each of the baselines (which are folded),
          recomputes all packs or each pack as far as it must, whichever is faster; images are encoded in their packs
mixtral   Mixtral 8x22B on 128 H100, 256 sequences of 4,096 tokens, all attention groups of one degree: folded; tied
          within a group of E ranks; and tied across groups of two, as Megatron did before it folded: an expert group
          has one rank of each of E attention groups. Published (arXiv 2504.14960): folding makes 458 TFLOPS a GPU 488
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.scale import BASELINES
from benchmarks.scale_cases import Case, batches_of, opened, plan_of
from dhp_ray.config import CONF
from dhp_ray.planner import ClusterSpec, CostModel, Plan, Sample, checked_problem, plan_batch, plan_uniform
from dhp_ray.planner.baselines.static import best_layout
from dhp_ray.planner.cost.derived import Device, derived_cost, expert_exchange_s
from dhp_ray.planner.cost.rates import Rates
from dhp_ray.planner.memory.model import MemoryModel, MemorySettings
from dhp_ray.planner.memory.model_shape import LayerShape, ModelShape
from dhp_ray.planner.mode import MEMORY_SHARE
from dhp_ray.planner.plan.cluster import NO_OFFLOAD, LayerShare
from dhp_ray.planner.timeline import schedule_of

SHARING, AGAIN = (1, 2, 4, 8), ("packs", "selective", "true")
SEEDS = {64: (0, 1, 2, 3), 512: (0,)}
CASES = [(model, num_ranks, workload)
         for workload, models in (("long_documents", ("qwen3_30b_a3b", "qwen3_235b_a22b")),
                                  ("caption_heavy", ("qwen3_vl_30b_a3b", "qwen3_vl_235b_a22b")))
         for model, num_ranks in zip((models[0], *models), (64, 512, 512))]
MIXTRAL = ModelShape(family="qwen3_moe", vocabulary_size=32_000, tied=False, language_rest=6_144, language=(LayerShape(
    count=56, width=6_144, mlp_width=16_384, heads=48, key_value_heads=8, head_width=128, experts=8,
    experts_per_token=2, num_parameters=2_504_060_928),))
MIXTRAL_RANKS, SEQUENCES, LENGTH, PUBLISHED = 128, 256, 4_096, (458.3, 487.7)


@dataclass(frozen=True)
class UnitCost(CostModel):
    """Costs of units of `sharing` neighbouring ranks: a pack on d of them takes what it takes on d x sharing ranks, but
    for images, which count as cut evenly among the ranks of a unit.
    """

    sharing: int = 1

    @classmethod
    def of(cls, cost: CostModel, sharing: int) -> UnitCost:
        names = ("quadratic_s", "linear_s", "vision_quadratic_s", "vision_linear_s")
        return cls(**cost.to_json() | {name: getattr(cost, name) / sharing for name in names}, sharing=sharing)

    def rates(self, max_degree: int, beyond: LayerShare = NO_OFFLOAD) -> Rates:
        found = super().rates(max_degree * self.sharing, beyond)[:: self.sharing].copy()
        found.overlap *= self.sharing  # of attention's seconds, which are those of a unit
        for name in ("from_tokens", "free_tokens"):  # `beyond` has the tokens of a unit
            found[name] /= self.sharing
        return found


def units_of(cluster: ClusterSpec, sharing: int) -> ClusterSpec:
    again, names = cluster.recomputation, ("from_tokens", "tokens_per_rank", "free_tokens")
    return ClusterSpec(
        cluster.num_ranks // sharing, cluster.ranks_per_node // sharing, cluster.tokens_per_rank * sharing,
        recomputation=replace(again, **{name: getattr(again, name) * sharing for name in names}))


def tied(batch: Sequence[Sample], cluster: ClusterSpec, cost: CostModel, sharing: int) -> Plan:
    """The plan of `dhp` whose packs have degrees that are multiples of `sharing`."""
    units = schedule_of(plan_batch(batch, units_of(cluster, sharing), UnitCost.of(cost, sharing), sync="micro_batch"))
    ranks = (units.ranks[:, None] * sharing + np.arange(sharing)).ravel()
    plan = plan_of(checked_problem(batch, cluster, cost, sync="micro_batch"),
                   units._replace(ranks=ranks, first_rank=units.first_rank * sharing))
    plan.validate()
    return plan


class Steps(NamedTuple):
    """Modelled seconds of a step, and the most tokens of a pack on a rank."""

    time_s: float
    tokens: int

    @classmethod
    def of(cls, plans: Sequence[Plan]) -> Steps:
        most = max(sum(plan.samples[row].num_tokens for row in group.sequences) / group.degree
                   for plan in plans for group in plan.groups)
        return cls(sum(plan.predicted_time_s for plan in plans) / len(plans), int(most))


class Cell(NamedTuple):
    """`dhp` folded and tied, and the best baseline folded."""

    folded: Steps
    tied: Steps
    baseline: Steps


def cell_of(case: Case) -> Cell | None:
    """None where the case does not fit."""
    batches, sharing = batches_of(case), int(case.expert_parallel)
    found = [one for again in AGAIN if (one := opened(replace(case, recomputes=again), batches))]
    if not found:
        return None
    folded, *baselines = (min(Steps.of(one.planned(name).plans) for one in found) for name in ("dhp", *BASELINES[1:]))
    ties = folded if sharing == 1 else min(
        Steps.of([tied(batch, one.cluster, one.cost, sharing) for batch in batches]) for one in found)
    return Cell(folded, ties, min(baselines))


def qwen() -> None:
    print("\nSeconds of `dhp` folded (tied over folded), the most tokens of a pack on a rank folded / tied; at the "
          "best E of each: the best baseline over `dhp`, and tied over folded\n\n"
          f"| model, ranks, workload | {' | '.join(f'E={sharing}' for sharing in SHARING)} | baseline | tied |\n"
          f"|{'---|' * (len(SHARING) + 3)}")
    for model, num_ranks, workload in CASES:
        for device in ("H100", "910B"):
            case = Case(model, device, workload, num_ranks=num_ranks, seeds=SEEDS[num_ranks])
            found = [cell_of(replace(case, expert_parallel=str(sharing))) for sharing in SHARING]
            folded, ties, baseline = (min(steps) for steps in zip(*(cell for cell in found if cell)))
            print(f"| {model}, {num_ranks} {device}, {workload} | {' | '.join(map(text_of, found))} | "
                  f"{baseline.time_s / folded.time_s:.2f} | {ties.time_s / folded.time_s:.2f} |", flush=True)


def text_of(cell: Cell | None) -> str:
    if cell is None:
        return "does not fit"
    return (f"{cell.folded.time_s:.2f} ({cell.tied.time_s / cell.folded.time_s:.2f}), "
            f"{cell.folded.tokens:,} / {cell.tied.tokens:,}")


def mixtral_s(degree: int, sharing: int, across: bool = False) -> float:
    """Seconds of a step at the best recomputation. `across`: ranks that share experts are `degree` apart."""
    device, nodes, found = Device.load(CONF / "device" / "h100.yaml"), MIXTRAL_RANKS // 8, []
    samples = [Sample(str(row), LENGTH) for row in range(SEQUENCES)]
    for again in (False, True):
        memory = MemoryModel(MIXTRAL, MemorySettings(
            sync="micro_batch", world_size=MIXTRAL_RANKS, precision="bf16", recomputes=again, keeps_attention=again,
            expert_parallel=sharing))
        cost, tokens = derived_cost(memory, device, nodes), memory.tokens_that_fit(MEMORY_SHARE * 80 * 2**30)
        if across and sharing * degree > 8:
            slow = replace(device, intra_bytes_per_s=device.inter_bytes_per_s)
            cost = replace(cost, linear_s=cost.linear_s + expert_exchange_s(memory, slow, nodes)
                           - expert_exchange_s(memory, device, nodes))
        if tokens * degree >= LENGTH:
            problem = checked_problem(samples, ClusterSpec(MIXTRAL_RANKS, 8, tokens), cost, sync="micro_batch")
            found.append(plan_uniform(problem, best_layout([problem], [degree])).predicted_time_s)
    return min(found, default=float("inf"))


def mixtral() -> None:
    layer = MIXTRAL.language[0]
    forward = layer.count * (2 * layer.parameters_used + 2 * layer.heads * layer.head_width * LENGTH
                             ) + 2 * MIXTRAL.embedding_parameters  # operations of a token; attention is causal
    work = 3e-12 * forward * SEQUENCES * LENGTH / MIXTRAL_RANKS
    print(f"\nMixtral 8x22B ({MIXTRAL.num_parameters() / 1e9:.1f} B), {MIXTRAL_RANKS} H100: TFLOPS a GPU; published: "
          f"tied {PUBLISHED[0]}, folded {PUBLISHED[1]} ({PUBLISHED[1] / PUBLISHED[0]:.3f})\n\n| E | folded, a rank a "
          "sequence | tied within E ranks | folded over that | tied across groups of 2 | folded over that |\n|"
          + "---|" * 6)
    for sharing in SHARING:
        folded_s = mixtral_s(1, sharing)
        ties = [mixtral_s(sharing, sharing), mixtral_s(2, sharing, across=True)]
        cells = " | ".join(f"{work / time_s:.0f} | {time_s / folded_s:.3f}" for time_s in ties)
        print(f"| {sharing} | {work / folded_s:.0f} | {cells} |")


TABLES = {"qwen": qwen, "mixtral": mixtral}


def main(words: Sequence[str]) -> int:
    if {"-h", "--help"} & set(words):
        print(__doc__)
        return 0
    unknown = [word for word in words if word not in TABLES]
    if unknown:
        print(f"experts.py: {unknown[0]}: no such table; allowed: {', '.join(TABLES)}", file=sys.stderr)
        return 2
    for name in words or TABLES:
        TABLES[name]()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
