"""The batches by which a change of the planner is judged, in tables; and a process that plans them.

    DHP_RAY_TEST_DATA=FOLDER python benchmarks/planner_cases.py SEEDS

The process plans with the package that its path names: it reads the number of a row a line, and answers with the row's
figures as JSON. SEEDS: batches of a row, at most. `benchmarks/ablation.py` runs it on copies of the package, so nothing
here knows more of the planner than `plan_batch`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.append(str(Path(__file__).resolve().parent.parent))

import dhp_ray.planner
from benchmarks.planner import PEERS, bimodal, drawn, published_cost
from dhp_ray.planner import LAST_RESORT, ClusterSpec, CostModel, Sample, plan_batch, warm_up

MEMORIES = (8192, 32768, 131072)
LENGTHS = ("bimodal", "wikipedia", "internvl", "internvid")
SMALL_CASES, HIDDEN_MIXES = 60, 48
UNEQUAL = "large, unequal speeds"
RECOMPUTES = find_spec("dhp_ray.planner.layer_share") is not None
"""Whether this package plans recomputation by pack."""
SMALL_COST = CostModel(
    quadratic_s=5.128e-9,
    linear_s=1.839576e-4,
    comm_bytes_per_token=2097152,
    fixed_s=0.0,
    bandwidth_bytes_per_s={2: 1.2535e11, 4: 1.0913e11, 8: 1.0119e11, 16: 1.0832e10},
)
RING = CostModel(
    quadratic_s=5e-9,
    linear_s=2e-4,
    comm_bytes_per_token=2e5,
    fixed_s=0.1,
    bandwidth_bytes_per_s={"intra": 1e10, "inter": 2e9},
    communication="ring",
    latency_s=1e-3,
    pack_s=0.01,
    overlap=0.8,
    vision_linear_s=1e-5,
)
IMAGES = replace(RING, vision_linear_s=1e-4, feature_bytes=4096.0)

MIXES: tuple[Callable[[np.random.Generator, float, int], np.ndarray], ...] = (
    lambda draw, median, count: np.exp(draw.normal(np.log(median), draw.uniform(0.3, 1.6), count)),
    lambda draw, median, count: draw.uniform(64, 3 * median, count),
    lambda draw, median, count: np.full(count, median),
    lambda draw, median, count: np.where(draw.random(count) < 0.1, 12 * median, median / 2),
    lambda draw, median, count: median / 2 * (1 + draw.pareto(1.1, count)),
)
"""Lengths of hidden mixes: lognormal, uniform, all alike, of two kinds, with a heavy tail."""

Batch = dict[str, Any]
"""The arguments of `plan_batch`."""


class Row(NamedTuple):
    """A row of a table: batches that are planned one after the other and counted together."""

    table: str
    name: str
    batches: Callable[[], list[Batch]]


class Figures(NamedTuple):
    """Of a row: modelled seconds of its plans, CPU seconds of planning, process groups that are not in the pool."""

    makespan_s: float
    planning_s: float
    new_groups: int


def samples_of(lengths: np.ndarray, images: int = 0) -> list[Sample]:
    return [Sample(str(row), int(length), 0, ((1, 16, 16),) * images) for row, length in enumerate(lengths)]


def small_case(seed: int) -> tuple[list[Sample], ClusterSpec]:
    """2 to 6 ranks, 2 to 8 sequences, lognormal lengths up to what the ranks hold."""
    generator = np.random.default_rng(seed)
    num_ranks, count = int(generator.integers(2, 7)), int(generator.integers(2, 9))
    median = generator.choice([1000.0, 4000.0, 10000.0])
    lengths = np.clip(
        np.exp(generator.normal(np.log(median), generator.uniform(0.3, 1.5), count)), 64, 8192 * num_ranks
    ).astype(int)
    return samples_of(lengths), ClusterSpec(num_ranks, 8, 8192)


def hidden_mix(seed: int, sync: str, planner: str) -> list[Batch]:
    """A batch with lengths, ranks, nodes, memory and costs drawn. Odd seeds have unequal ranks, every third a pool."""
    generator = np.random.default_rng(1000 + seed)
    num_ranks, node = int(generator.choice([3, 5, 6, 8, 12, 16, 24, 40, 64, 96])), int(generator.choice([4, 8]))
    count, tokens = (
        max(2, int(num_ranks * generator.choice([0.7, 2, 4, 8, 12]))),
        int(generator.choice([2048, 8192, 40000])),
    )
    median = tokens * generator.choice([0.05, 0.2, 0.6])
    lengths = MIXES[int(generator.integers(len(MIXES)))](generator, median, count)
    speeds = tuple(np.clip(generator.normal(1, 0.08, num_ranks), 0.4, 1.2).tolist()) if seed % 2 else ()
    nodes = (
        tuple(sorted(generator.integers(0, -(-num_ranks // node), num_ranks).tolist()))
        if generator.random() < 0.3
        else ()
    )
    cost = RING if generator.random() < 0.5 else published_cost()
    pool = (
        tuple(tuple(range(first, min(first + 2, num_ranks))) for first in range(0, num_ranks - 1, 2))
        if seed % 3 == 0
        else ()
    )
    cluster = ClusterSpec(num_ranks, node, tokens, speeds, nodes)
    samples = samples_of(np.clip(lengths, 16, 0.9 * cluster.max_tokens).astype(int), int(generator.integers(0, 3)))
    return [{"samples": samples, "cluster": cluster, "cost": cost, "pool": pool, "sync": sync, "planner": planner}]


def recomputing_mix(seed: int, sync: str) -> list[Batch]:
    """The same where ranks hold that memory's tokens if packs recompute all layers, and 4, 12 or 30 times fewer with
    all activations. (Checkouts of before packs did so have no such batches.)
    """
    from dhp_ray.planner.layer_share import Recomputation

    [found] = hidden_mix(seed, sync, "dhp")
    most = found["cluster"].tokens_per_rank
    held = most // (4, 12, 30)[seed % 3]
    cluster = replace(found["cluster"], tokens_per_rank=held, recomputation=Recomputation(1.0, held, most, held))
    return [found | {"cluster": cluster, "cost": replace(found["cost"], pack_s=0.02)}]


@cache
def rows(seeds: int) -> tuple[Row, ...]:
    """Every table, with so many batches of each mix."""
    return tuple(_rows(seeds))


def _rows(seeds: int) -> Iterator[Row]:
    for sync, planner, tokens in product(("step", "micro_batch"), ("dhp", LAST_RESORT), MEMORIES):
        table = f"tuned: {sync}" if planner == "dhp" else "tuned: last resort"
        for count, ranks in PEERS:
            yield Row(
                table,
                f"{sync} {count}/{ranks} {tokens}",
                partial(tuned, count, ranks, seeds, tokens=tokens, planner=planner, sync=sync),
            )
    for name, each, ranks in product(LENGTHS, (2, 4, 8, 16), (8, 64, 512)):
        yield Row("gap", f"{name} {each} {ranks}", partial(of_lengths, name, each * ranks, ranks, min(seeds, 2)))
    for name, each in product(LENGTHS, (4, 8, 16)):
        yield Row(
            "speeds",
            f"{name} {each} a third",
            partial(of_lengths, name, 8 * each, 8, min(seeds, 2), speeds=(1.0,) * 5 + (1 / 3,) + (1.0,) * 2),
        )
        yield Row("speeds", f"{name} {each} spread", partial(of_lengths, name, 64 * each, 64, 1, speeds=spread(64)))
    for sync in ("step", "micro_batch"):
        for seed in range(SMALL_CASES):
            yield Row(f"small: {sync}", f"case {seed}", partial(small, seed, sync, "dhp"))
            yield Row("small: last resort", f"{sync} case {seed}", partial(small, seed, sync, LAST_RESORT))
        for seed in range(HIDDEN_MIXES):
            yield Row(f"hidden: {sync}", f"mix {seed}", partial(hidden_mix, seed, sync, "dhp"))
            if RECOMPUTES:
                yield Row(f"recomputed: {sync}", f"mix {seed}", partial(recomputing_mix, seed, sync))
            if seed % 3 == 1:
                yield Row("hidden: last resort", f"{sync} mix {seed}", partial(hidden_mix, seed, sync, LAST_RESORT))
    for each, ranks in product((1, 4, 8), (8, 64, 512)):
        some_images = partial(of_images, each * ranks, ranks, min(seeds, 2))
        yield Row("apart", f"{each} {ranks}", partial(some_images, encoder="world"))
        yield Row("images: micro_batch", f"{each} {ranks}", partial(some_images, sync="micro_batch"))
    for speed, recomputes in product((1, 4, 16), (False, True) if RECOMPUTES else (False,)):
        again = ", packs recompute" * recomputes
        yield Row("captions: micro_batch", f"speed {speed}{again}", partial(captions, speed, recomputes, min(seeds, 2)))
    for count in (128, 512):
        yield Row("pool", f"{count}/64", partial(with_pool, count))
    for count, ranks in ((2048, 512), (2048, 1024), (16384, 4096)):
        for sync in ("step", "micro_batch"):
            yield Row("large", f"{sync} {count}/{ranks}", partial(tuned, count, ranks, 1, sync=sync))
        yield Row(UNEQUAL, f"{count}/{ranks}", partial(tuned, count, ranks, 1, speeds=spread(ranks)))


def tuned(count: int, num_ranks: int, seeds: int, **options: Any) -> list[Batch]:
    """Batches of 5 % long sequences beside short ones."""
    return [batch(bimodal(count, num_ranks, seed), num_ranks, **options) for seed in range(seeds)]


def of_lengths(name: str, count: int, num_ranks: int, seeds: int, **options: Any) -> list[Batch]:
    """Batches of a set of lengths."""
    return [batch(drawn(name, count, num_ranks, seed), num_ranks, **options) for seed in range(seeds)]


def small(seed: int, sync: str, planner: str) -> list[Batch]:
    samples, cluster = small_case(seed)
    return [{"samples": samples, "cluster": cluster, "cost": SMALL_COST, "sync": sync, "planner": planner}]


def batch(
    lengths: np.ndarray, num_ranks: int, *, tokens: int = 8192, speeds: tuple[float, ...] = (), **options: Any
) -> Batch:
    """Under the published cost file, on nodes of 8 ranks."""
    return {
        "samples": samples_of(lengths),
        "cluster": ClusterSpec(num_ranks, 8, tokens, speeds),
        "cost": published_cost(),
        **options,
    }


def spread(num_ranks: int) -> tuple[float, ...]:
    """Speeds that differ by 5 %."""
    return tuple(np.clip(np.random.default_rng(1).normal(1, 0.05, num_ranks), 0.7, 1.3).tolist())


def of_images(count: int, num_ranks: int, seeds: int, **options: Any) -> list[Batch]:
    """Text, and in one sample of five up to twenty images."""
    batches = []
    for seed in range(seeds):
        draw, samples = np.random.default_rng(seed), []
        for row in range(count):
            grids = tuple((1, int(side), 16) for side in draw.integers(4, 256, draw.integers(1, 21)))
            grids = grids if draw.random() < 0.2 else ()
            tokens = int(np.clip(draw.lognormal(5.7, 1.2), 16, 20_000))
            samples.append(Sample(str(row), tokens, sum(4 * side for _, side, _ in grids), grids))
        batches.append({"samples": samples, "cluster": ClusterSpec(num_ranks, 8, 32768), "cost": IMAGES, **options})
    return batches


def captions(speed: float, recomputes: bool, seeds: int) -> list[Batch]:
    """512 captioned pictures on 64 ranks, a few to a pack: steps of 2 s, or less on devices of this speed.
    `recomputes`: a rank holds four times as many tokens if it recomputes all layers."""
    cost = replace(IMAGES, fixed_s=0.0, pack_s=0.15 / speed, **{
        name: getattr(IMAGES, name) / speed for name in ("quadratic_s", "linear_s", "vision_linear_s", "latency_s")})
    cluster = ClusterSpec(64, 8, 1024)
    if recomputes:
        from dhp_ray.planner.layer_share import Recomputation

        cluster = replace(cluster, recomputation=Recomputation(1.0, 1024, 4096, 1024))
    batches = []
    for seed in range(seeds):
        draw, samples = np.random.default_rng(seed), []
        for row in range(512):
            side = int(draw.integers(16, 129))
            text = int(np.clip(draw.lognormal(4.5, 0.8), 16, 1000))
            samples.append(Sample(str(row), text, 4 * side, ((1, side, 16),)))
        batches.append({"samples": samples, "cluster": cluster, "cost": cost, "sync": "micro_batch"})
    return batches


def with_pool(count: int) -> list[Batch]:
    """Batches of Wikipedia lengths, with the groups that an earlier one makes as the pool of the others."""
    groups = plan_batch(**batch(drawn("wikipedia", count, 64, 0), 64)).process_groups()[-32:]
    return [batch(drawn("wikipedia", count, 64, seed), 64, pool=groups) for seed in range(1, 5)]


def figures_of(row: Row) -> Figures:
    """Plan a row."""
    makespan_s, planning_s, new_groups = 0.0, 0.0, 0
    for arguments in row.batches():
        begin = time.thread_time()
        plan = plan_batch(**arguments)
        planning_s += time.thread_time() - begin
        makespan_s += plan.predicted_time_s
        new_groups += len(set(plan.process_groups()) - set(arguments.get("pool", ())))
    return Figures(makespan_s, planning_s, new_groups)


def main() -> None:
    warm_up()
    print(Path(dhp_ray.planner.__file__).parent.parent, flush=True)
    for line in sys.stdin:
        print(json.dumps(figures_of(rows(int(sys.argv[1]))[int(line)])), flush=True)


if __name__ == "__main__":
    main()
