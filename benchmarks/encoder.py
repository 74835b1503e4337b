"""Images encoded in their packs or apart from them: balance, times, what `auto` costs and gains. All modelled.

    python benchmarks/encoder.py balance     the fullest rank over the least that there can be
    python benchmarks/encoder.py timeline    predicted makespans beside a plain-Python timeline
    python benchmarks/encoder.py regret      auto's plan where executed costs differ from planned ones by up to 20 %
    python benchmarks/encoder.py planning    milliseconds of a plan
    python benchmarks/encoder.py gains       step times over those with images in their packs, from models' shapes

Mixes of text, images and videos are those of encoder_cases.py; costs are derived from the models and the devices.
"""

from __future__ import annotations

import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.encoder_cases import KINDS, MODELS, batch, cluster_and_cost, four_images_each
from dhp_ray.planner import ClusterSpec, CostModel, Plan, Sample, plan_batch, warm_up
from tests.planner.reference_encoder import timeline

LAYOUTS = ("group", "world")
VARIATION = 0.2


def fullest(plan: Plan, cost: CostModel) -> float:
    """Seconds of encoding of the fullest rank, over the mean or the largest image, whichever is more."""
    loads, largest = np.zeros(plan.cluster.num_ranks), 0.0
    for group in plan.groups:
        seconds = [image_s for row in group.pack.sequences for image_s in cost.image_s(plan.samples[row])]
        np.add.at(loads, list(group.encoders), seconds)
        largest = max([largest, *seconds])
    return float(loads.max() / max(loads.mean(), largest)) if largest else 1.0


def balance(rank_counts: Sequence[int] = (8, 64, 512)) -> Iterator[list[str]]:
    """Largest of three batches of 16 samples a rank, of a 3B on H100."""
    yield ["mix", "ranks", "group", "world"]
    for kind in KINDS:
        for num_ranks in rank_counts:
            cluster, cost = cluster_and_cost("3B", num_ranks, recomputes=True)
            found = {layout: max(fullest(plan_batch(batch(kind, 16 * num_ranks, seed), cluster, cost, encoder=layout),
                                         cost) for seed in range(3)) for layout in LAYOUTS}
            yield [kind, str(num_ranks), *(f"{found[layout]:.3f}" for layout in LAYOUTS)]


def timelines(rank_counts: Sequence[int] = (8, 64)) -> Iterator[list[str]]:
    """Largest relative difference over three batches, speeds of 0.5 to 1 on every fourth rank."""
    yield ["mix", "ranks", "group", "world"]
    for kind in KINDS:
        for num_ranks in rank_counts:
            cluster, cost = cluster_and_cost("3B", num_ranks, recomputes=True)
            speeds = tuple(0.5 + 0.25 * (rank % 3) if rank % 4 == 0 else 1.0 for rank in range(num_ranks))
            slowed = ClusterSpec(num_ranks, cluster.ranks_per_node, cluster.tokens_per_rank, speeds)
            found = {layout: max(difference(plan_batch(batch(kind, 8 * num_ranks, seed), slowed, cost, encoder=layout),
                                            cost) for seed in range(3)) for layout in LAYOUTS}
            yield [kind, str(num_ranks), *(f"{found[layout]:.1e}" for layout in LAYOUTS)]


def difference(plan: Plan, cost: CostModel) -> float:
    return abs(timeline(plan, cost) / plan.predicted_time_s - 1)


def regret(num_ranks: int = 64, num_batches: int = 3, num_draws: int = 5) -> Iterator[list[str]]:
    """auto's time over the shorter of both plans, each executed with the same random costs."""
    yield ["mix", "mean", "most", "apart"]
    cluster, cost = cluster_and_cost("3B", num_ranks, recomputes=True)
    for kind in KINDS:
        found, apart = [], 0
        for seed in range(num_batches):
            samples = batch(kind, 8 * num_ranks, seed)
            plans = [plan_batch(samples, cluster, cost, encoder=layout) for layout in (*LAYOUTS, "auto")]
            apart += plans[2].vision.apart
            for draw in range(num_draws):
                *times, auto = (executed(plan, cost, draw) for plan in plans)
                found.append(auto / min(times) - 1)
        yield [kind, f"{100 * statistics.fmean(found):.2f} %", f"{100 * max(found):.2f} %", f"{apart}/{num_batches}"]


def executed(plan: Plan, cost: CostModel, seed: int) -> float:
    """Seconds of a plan whose costs differ from the planned ones: of an image by its sample, of a pack by its place."""
    def varied(kind: str, number: int) -> float:
        return 1 + VARIATION * (2 * random.Random(f"{kind} {number} {seed}").random() - 1)

    return timeline(plan, cost, varied)


def planning(num_plans: int = 20) -> Iterator[list[str]]:
    """Median milliseconds; compiled."""
    yield ["batch", *LAYOUTS, "auto"]
    warm_up()
    for num_ranks, num_samples, repeats in ((64, 512, num_plans), (4096, 16384, 3)):
        cluster, cost = cluster_and_cost("3B", num_ranks, recomputes=True)
        samples, cells = four_images_each(num_samples), []
        for layout in (*LAYOUTS, "auto"):
            times = [plan_batch(samples, cluster, cost, encoder=layout).planning_time_s for _ in range(repeats)]
            cells.append(f"{1e3 * statistics.median(times):.1f}")
        yield [f"{num_samples} sequences with 4 images on {num_ranks} ranks", *cells]


def gains(rank_counts: Sequence[int] = (64, 512), num_batches: int = 3) -> Iterator[list[str]]:
    """Of the sum over the batches, 8 samples a rank; recomputation as a run with long sequences needs it."""
    yield ["model", "mix", "ranks", "world", "auto", "auto over the bound", "activations kept"]
    for model in MODELS:
        for num_ranks in rank_counts:
            device, gibibytes = ("h200", 141) if "6B" in model else ("h100", 80)
            cluster, cost = cluster_and_cost(model, num_ranks, device, gibibytes=gibibytes, recomputes=True)
            for kind in ("image", "video", "text"):
                batches = [batch(kind, 8 * num_ranks, seed) for seed in range(num_batches)]
                yield [model, kind, str(num_ranks), *gain(batches, cluster, cost)]


def gain(batches: Sequence[Sequence[Sample]], cluster: ClusterSpec, cost: CostModel) -> list[str]:
    plans = {layout: [plan_batch(samples, cluster, cost, encoder=layout) for samples in batches]
             for layout in (*LAYOUTS, "auto")}
    total = {layout: sum(plan.predicted_time_s for plan in found) for layout, found in plans.items()}
    bound = sum(plan.lower_bound_s for plan in plans["auto"])
    apart = [plan.vision.keeps for plan in plans["world"] if plan.vision.apart]
    kept = f"{sum(apart)}/{len(apart)}" if apart else "no memory apart"
    return [f"{100 * (1 - total['world'] / total['group']):+.1f} %",
            f"{100 * (1 - total['auto'] / total['group']):+.1f} %",
            f"{100 * (total['auto'] / bound - 1):.1f} %", kept]


TABLES = {"balance": balance, "timeline": timelines, "regret": regret, "planning": planning, "gains": gains}


def main(argv: Sequence[str]) -> int:
    if len(argv) != 1 or argv[0] not in TABLES:
        print(__doc__)
        return 2
    for number, row in enumerate(TABLES[argv[0]]()):  # type: ignore[operator]
        print(f"| {' | '.join(row)} |", flush=True)
        if number == 0:
            print(f"|{'---|' * len(row)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
