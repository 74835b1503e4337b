"""The batches by which a change of the planner is judged, in tables; and a process that plans them.

    DHP_RAY_TEST_DATA=FOLDER python benchmarks/planner_cases.py

The process plans with the package that its path names: it reads the number of a row a line, and answers with the row's
figures as JSON. `benchmarks/beside.py` runs it on copies of the package, so nothing here knows more of the planner
than `plan_batch`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.append(str(Path(__file__).resolve().parent.parent))

import dhp_ray.planner
from benchmarks.planner import PEERS, TOKENS_PER_RANK, bimodal, published_cost
from dhp_ray.planner import ClusterSpec, CostModel, Sample, plan_batch, warm_up
from dhp_ray.planner.plan.cluster import Recomputation

MEMORIES = (8192, 32768, 131072)
SLOW = (1.0,) * 5 + (1 / 3,) + (1.0,) * 2
"""One of eight ranks at a third."""
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

FAMILIES = ("bimodal", "video", "heavy", "uniform", "equal", "one giant")
CLIPS = np.array([(0, 2, 250), (2, 5, 317), (5, 10, 174), (10, 20, 132), (20, 30, 49), (30, 60, 52), (60, 300, 26)],
                 dtype=float)
"""Clips of video: seconds from, to, and how many of a thousand there are."""

MIXES: tuple[Callable[[np.random.Generator, float, int], np.ndarray], ...] = (
    lambda draw, median, count: np.exp(draw.normal(np.log(median), draw.uniform(0.3, 1.6), count)),
    lambda draw, median, count: draw.uniform(64, 3 * median, count),
    lambda draw, median, count: np.full(count, median),
    lambda draw, median, count: np.where(draw.random(count) < 0.1, 12 * median, median / 2),
    lambda draw, median, count: median / 2 * (1 + draw.pareto(1.1, count)),
)
"""Lengths of mixes: lognormal, uniform, all alike, of two kinds, with a heavy tail."""

Batch = dict[str, Any]
"""The arguments of `plan_batch`."""


class Row(NamedTuple):
    """A row of a table, and what makes its batch."""

    table: str
    name: str
    batch: Callable[[], Batch]


class Figures(NamedTuple):
    """Of a row: modelled seconds of its plan and of its bound, CPU seconds of planning, process groups that are not in
    the pool."""

    makespan_s: float
    bound_s: float
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


def mix(seed: int, sync: str) -> Batch:
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
    return {"samples": samples, "cluster": cluster, "cost": cost, "pool": pool, "sync": sync}


def recomputing_mix(seed: int, sync: str) -> Batch:
    """The same where ranks hold that memory's tokens if packs recompute all layers, and 4, 12 or 30 times fewer with
    all activations."""
    found = mix(seed, sync)
    most = found["cluster"].tokens_per_rank
    held = most // (4, 12, 30)[seed % 3]
    cluster = replace(found["cluster"], tokens_per_rank=held, recomputation=Recomputation(1.0, held, most, held))
    return found | {"cluster": cluster, "cost": replace(found["cost"], pack_s=0.02)}


def small(seed: int, sync: str) -> Batch:
    samples, cluster = small_case(seed)
    return {"samples": samples, "cluster": cluster, "cost": SMALL_COST, "sync": sync}


def middle(seed: int, sync: str) -> Batch:
    """3 to 60 sequences on 2 to 16 ranks."""
    draw = np.random.default_rng(500 + seed)
    num_ranks, count, median = int(draw.integers(2, 17)), int(draw.integers(3, 61)), draw.choice([1e3, 4e3, 1e4])
    lengths = np.exp(draw.normal(np.log(median), draw.uniform(0.3, 1.5), count))
    cost = SMALL_COST if seed % 2 else published_cost()
    return of(np.clip(lengths, 64, 8192 * num_ranks * 0.95), num_ranks, cost=cost, sync=sync)


def drawn_from(family: str, count: int, num_ranks: int, seed: int) -> np.ndarray:
    """Lengths of a family, at most 131,072 tokens and what the ranks hold."""
    draw, most = np.random.default_rng(10_000 + seed), min(131_072, TOKENS_PER_RANK * num_ranks)
    if family == "bimodal":
        is_long = draw.random(count) < 0.05
        lengths = np.where(is_long, np.exp(draw.normal(10.6, 0.6, count)), np.exp(draw.normal(6.6, 0.7, count)))
    elif family == "heavy":  # a Pareto tail: a few percent of the sequences hold most tokens
        lengths = 300 * (1 + draw.pareto(1.05, count))
    elif family == "uniform":
        lengths = draw.integers(64, 20_000, count)
    elif family == "equal":
        lengths = np.full(count, 6000)
    elif family == "video":  # clips of so many seconds, 256 tokens a second, and a question
        chosen = CLIPS[draw.choice(len(CLIPS), count, p=CLIPS[:, 2] / CLIPS[:, 2].sum())]
        lengths = np.ceil(np.array([draw.uniform(low, high) for low, high, _ in chosen])) * 256 + 60
    else:  # one giant
        lengths = draw.integers(64, 2048, count)
        lengths[0] = most
    return np.clip(lengths, 64, most).astype(int)


def of(
    lengths: np.ndarray, num_ranks: int, *, tokens: int = TOKENS_PER_RANK, speeds: tuple[float, ...] = (),
    cost: CostModel | None = None, sync: str = "step",
) -> Batch:
    """On nodes of 8 ranks, under the published cost file if none is given."""
    return {"samples": samples_of(lengths), "cluster": ClusterSpec(num_ranks, 8, tokens, speeds),
            "cost": cost or published_cost(), "sync": sync}


def spread(num_ranks: int) -> tuple[float, ...]:
    """Speeds that differ by 5 %."""
    return tuple(np.clip(np.random.default_rng(1).normal(1, 0.05, num_ranks), 0.7, 1.3).tolist())


def with_images(count: int, num_ranks: int, sync: str) -> Batch:
    """Text, and in one sample of five up to twenty images."""
    draw, samples = np.random.default_rng(0), []
    for row in range(count):
        grids = tuple((1, int(side), 16) for side in draw.integers(4, 256, draw.integers(1, 21)))
        grids = grids if draw.random() < 0.2 else ()
        tokens = int(np.clip(draw.lognormal(5.7, 1.2), 16, 20_000))
        samples.append(Sample(str(row), tokens, sum(4 * side for _, side, _ in grids), grids))
    return {"samples": samples, "cluster": ClusterSpec(num_ranks, 8, 32768), "cost": IMAGES, "sync": sync}


def captions(speed: float) -> Batch:
    """512 captioned pictures on 64 ranks, a few to a pack: steps of 2 s, or less on devices of this speed."""
    cost = replace(IMAGES, fixed_s=0.0, pack_s=0.15 / speed, **{
        name: getattr(IMAGES, name) / speed for name in ("quadratic_s", "linear_s", "vision_linear_s", "latency_s")})
    draw, samples = np.random.default_rng(0), []
    for row in range(512):
        side, text = int(draw.integers(16, 129)), int(np.clip(draw.lognormal(4.5, 0.8), 16, 1000))
        samples.append(Sample(str(row), text, 4 * side, ((1, side, 16),)))
    return {"samples": samples, "cluster": ClusterSpec(64, 8, 1024), "cost": cost, "sync": "micro_batch"}


@cache
def rows() -> tuple[Row, ...]:
    """Every table; its name ends with the mode."""
    return tuple(row for sync in ("step", "micro_batch") for row in _rows(sync))


def _rows(sync: str) -> Iterator[Row]:
    def row(family: str, name: str, make: Callable[..., Batch], *args: Any, **options: Any) -> Row:
        return Row(f"{family}: {sync}", name, partial(make, *args, sync=sync, **options))

    for tokens, (count, ranks) in product((8192, 32768), PEERS):
        if tokens == 8192 or count * ranks <= 300_000:
            yield row("published", f"{count}/{ranks} {tokens}", of, bimodal(count, ranks), ranks, tokens=tokens)
    for family, ranks, each in product(FAMILIES, (16, 64, 256, 1024), (2, 8)):
        if ranks < 1024 or each == 2:
            lengths = drawn_from(family, each * ranks, ranks, 1)
            yield row(family, f"{each * ranks}/{ranks}", of, lengths, ranks)
    for seed in range(24):
        yield row("small", f"tiny {seed}", small, seed)
        yield row("small", f"mid {seed}", middle, seed)
    for seed in range(32):
        yield row("mix", f"{seed}", mix, seed)
    for family, each, ranks in (("bimodal", 4, 8), ("bimodal", 16, 8), ("uniform", 4, 8), ("bimodal", 8, 64),
                                ("heavy", 4, 64), ("uniform", 8, 64)):
        lengths, speeds = drawn_from(family, each * ranks, ranks, 3), SLOW if ranks == 8 else spread(ranks)
        yield row("speeds", f"{family} {each * ranks}/{ranks}", of, lengths, ranks, speeds=speeds)
    dear = replace(published_cost(), pack_s=0.05, fixed_s=0.2)
    linked = replace(published_cost(), bandwidth_bytes_per_s={"intra": 1e11, "inter": 1e10})
    for family, each, ranks in (("bimodal", 4, 16), ("uniform", 3, 64), ("heavy", 8, 64), ("video", 4, 32)):
        name = f"{family} {each * ranks}/{ranks}"
        yield row("packcost", name, of, drawn_from(family, each * ranks, ranks, 4), ranks, cost=dear)
        yield row("nodes", name, of, drawn_from(family, each * ranks, ranks, 5), ranks, cost=linked)
    for each, ranks in ((2, 8), (8, 8), (1, 64), (4, 64), (8, 64)):
        yield row("images", f"{each * ranks}/{ranks}", with_images, each * ranks, ranks)
    for seed in range(0, 24, 3):
        yield row("recompute", f"{seed}", recomputing_mix, seed)
    for speed in (1, 16) if sync == "micro_batch" else ():
        yield Row(f"images: {sync}", f"captions {speed}", partial(captions, speed))


def figures_of(row: Row, planner: str = "dhp") -> Figures:
    """Plan a row."""
    arguments = row.batch()
    begin = time.thread_time()
    plan = plan_batch(**arguments, planner=planner)
    planning_s = time.thread_time() - begin
    new_groups = len(set(plan.process_groups()) - set(arguments.get("pool", ())))
    return Figures(plan.predicted_time_s, plan.lower_bound_s, planning_s, new_groups)


def main() -> None:
    warm_up()
    print(Path(dhp_ray.planner.__file__).parent.parent, flush=True)
    for line in sys.stdin:
        print(json.dumps(figures_of(rows()[int(line)])), flush=True)


if __name__ == "__main__":
    main()
