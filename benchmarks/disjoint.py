"""What a share of the ranks that encodes for the others could gain at most over `planner.encoder=auto`. All modelled.

    python benchmarks/disjoint.py

`disjoint`: k of the N ranks encode all images of a batch and stream features to the others, pack by pack. Its time here
is below that of any such schedule: no exchange costs anything, no rank of either share waits, and k is the best of all:

    fixed + max(image seconds / k, lower bound of the packs without images on N - k ranks)

`with planned packs` takes the packs that the planner finds for N - k ranks in place of their bound, and whole images
dealt out at best, for LOOKS shares around the best one; exchanges still cost nothing, and nobody waits.

Ranks without images hold more tokens of a pack; what the encoder's activations took is theirs. Nothing else is freed:
shares change with every batch, so each rank has the parameters and the optimizer state of both parts as before. Mixes
and models are those of encoder_cases.py.

`auto` is planned as in a run, with the process groups that the batches before it made. The first BEFORE batches only
fill the pool.

`both once`: at best where neither `auto` nor `disjoint` computes the encoder's activations again for the backward pass.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from benchmarks.encoder_cases import MODELS, NODE_RANKS, batch, cluster_and_cost
from benchmarks.encoder_exact import least_s
from dhp_ray.planner import ClusterSpec, CostModel, Plan, Sample, checked_problem, plan_batch
from dhp_ray.planner.bound import bounded
from dhp_ray.planner.encoder.world import without_images

BUILT_FROM = 0.05
"""What a layout must gain in some row to be built."""

LOOKS = 9
"""Shares that are looked at with planned packs."""

BEFORE = 3
"""Batches that only fill the pool and are not counted."""


def tokens_without_images(cluster: ClusterSpec, cost: CostModel) -> int:
    """Tokens of a pack that a rank holds which encodes no images."""
    limit = cost.memory_bytes_per_token * cluster.tokens_per_rank
    return max(cluster.tokens_per_rank, int((limit - cost.pack_bytes) / cost.language_bytes_per_token))


def packs_s(samples: Sequence[Sample], num_ranks: int, tokens: int, cost: CostModel) -> float:
    """The lower bound of the packs, fixed costs included, their images encoded elsewhere."""
    problem = checked_problem(samples, ClusterSpec(num_ranks, NODE_RANKS, tokens), cost)
    return bounded(without_images(problem)).lower_bound_s


def disjoint_s(samples: Sequence[Sample], cluster: ClusterSpec, cost: CostModel) -> tuple[float, int]:
    """(seconds of the optimistic schedule above, ranks that encode)"""
    num_ranks, tokens = cluster.num_ranks, tokens_without_images(cluster, cost)
    roomy = checked_problem(samples, replace(cluster, tokens_per_rank=tokens), cost, encoder="world")
    images_s, least_s = float(roomy.all_image_s.sum()), bounded(roomy).lower_bound_s  # that of any layout

    def times(encoding: int) -> tuple[float, float]:
        return images_s / encoding + cost.fixed_s, packs_s(samples, num_ranks - encoding, tokens, cost)

    few, many = 1, num_ranks - 1  # with few the images take longer, with many the packs
    while many - few > 1:
        middle = (few + many) // 2
        images, packs = times(middle)
        few, many = (middle, many) if images > packs else (few, middle)
    found_s, encoding = min((max(times(each)), each) for each in (few, many))
    return max(found_s, least_s), encoding


def planned_s(samples: Sequence[Sample], cluster: ClusterSpec, cost: CostModel) -> float:
    """Seconds with the packs that the planner finds; of the shares near the best one above."""
    num_ranks, tokens = cluster.num_ranks, tokens_without_images(cluster, cost)
    texts = [replace(sample, vision_grids=()) for sample in samples]
    images_s = np.array([seconds for sample in samples for seconds in cost.image_s(sample)])
    best, near = disjoint_s(samples, cluster, cost)[1], max(3, num_ranks // 16)
    shares = np.linspace(max(1, best - near), min(num_ranks - 1, best + near), LOOKS).astype(int)
    return min(max(cost.fixed_s + least_s(images_s, encoding),
                   plan_batch(texts, ClusterSpec(num_ranks - encoding, NODE_RANKS, tokens), cost).predicted_time_s)
               for encoding in sorted(set(shares.tolist())))


def planned_in_turn(batches: Sequence[Sequence[Sample]], cluster: ClusterSpec, cost: CostModel) -> list[Plan]:
    """`auto`'s plans of the batches after the first BEFORE, each with the groups that the batches before it made."""
    pool, plans = dict[tuple[int, ...], None](), list[Plan]()
    for samples in batches:
        plans.append(plan_batch(samples, cluster, cost, encoder="auto", pool=list(pool)))
        pool |= dict.fromkeys(plans[-1].process_groups())
    return plans[BEFORE:]


def row(batches: Sequence[Sequence[Sample]], cluster: ClusterSpec, cost: CostModel) -> list[str]:
    """auto's seconds, its distance from the bound, what disjoint could gain, its ranks; and the gain where neither
    computes the encoder again."""
    once = replace(cost, vision_linear_s=(1 - cost.vision_forward) * cost.vision_linear_s,
                   vision_quadratic_s=(1 - cost.vision_forward) * cost.vision_quadratic_s)
    plans = planned_in_turn(batches, cluster, cost)
    auto_s, bound_s = sum(plan.predicted_time_s for plan in plans), sum(plan.lower_bound_s for plan in plans)
    once_s = sum(plan.predicted_time_s for plan in planned_in_turn(batches, cluster, once))
    batches = batches[BEFORE:]
    seconds, encoding = zip(*(disjoint_s(samples, cluster, cost) for samples in batches))
    packed_s = sum(planned_s(samples, cluster, cost) for samples in batches)
    both_once_s = sum(disjoint_s(samples, cluster, once)[0] for samples in batches)
    return [f"{auto_s:.2f}", f"{100 * (auto_s / bound_s - 1):.1f} %", f"{100 * (1 - sum(seconds) / auto_s):+.1f} %",
            f"{min(encoding)} to {max(encoding)}", f"{100 * (1 - both_once_s / once_s):+.1f} %",
            f"{100 * (1 - packed_s / auto_s):+.1f} %"]


def table(
    models: Sequence[str] = tuple(MODELS), rank_counts: Sequence[int] = (64, 512), num_batches: int = 3
) -> Iterator[list[str]]:
    """8 samples a rank."""
    yield ["model", "mix", "ranks", "auto s", "over the bound", "disjoint at best", "ranks that encode", "both once",
           "with planned packs"]
    for model in models:
        for num_ranks in rank_counts:
            device, gibibytes = ("h200", 141) if "6B" in model else ("h100", 80)
            cluster, cost = cluster_and_cost(model, num_ranks, device, gibibytes=gibibytes, recomputes=True)
            for kind in ("image", "video", "text"):
                batches = [batch(kind, 8 * num_ranks, seed) for seed in range(-BEFORE, num_batches)]
                yield [model, kind, str(num_ranks), *row(batches, cluster, cost)]


def main(argv: Sequence[str]) -> int:
    if {"-h", "--help"} & set(argv):
        print(__doc__)
        return 0
    if argv:
        print(f"disjoint.py: {argv[0]}: allowed: no argument", file=sys.stderr)
        return 2
    gains = []
    for number, cells in enumerate(table()):
        print(f"| {' | '.join(cells)} |", flush=True)
        if number == 0:
            print("|---" * len(cells) + "|")
        else:
            gains.append(float(cells[8].split()[0]) / 100)
    above = sum(gain >= BUILT_FROM for gain in gains)
    print(f"with planned packs {above} of {len(gains)} gains are {100 * BUILT_FROM:g} % or more; the most is "
          f"{100 * max(gains):.1f} %")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
