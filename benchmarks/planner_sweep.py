"""The planner on random odd batches: plans are valid, never behind a baseline, and soon there.

    python benchmarks/planner_sweep.py [cases=0-199]

A case follows from its number: 1 to 600 ranks, on nodes of unequal size or not, at unequal speeds or not; 1 to 20,000
sequences, equal, long-tailed or one giant among small ones, some with dozens of images; memory for little more than the
longest; both modes; with or without a pool of groups. Behind: more than 0.5 % above the best baseline, with a pool
1.4 % (a plan may be 0.9 % longer to use its groups). Late: planned in more than a second and 30 % of the step.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.planner_cases import IMAGES, RING, SMALL_COST
from dhp_ray.planner import ClusterSpec, CostModel, Sample, plan_batch, warm_up

BASELINES = ("static", "static_best", "pow2", "dhp_paper", "megatron")
COMPARED = 20_000
"""The most sequences x ranks of a case that is compared with baselines, which take long on larger ones."""
FULL = 200
"""The most times that a batch fills the memory of all ranks."""
CONF = Path(__file__).resolve().parent.parent / "conf" / "cost"
COSTS = (RING, IMAGES, SMALL_COST, *(CostModel.load(CONF / f"{kind}.yaml") for kind in ("cpu", "cuda", "npu")))


def main(cases: range) -> int:
    warm_up()
    found: dict[str, list[str]] = {"behind": [], "late": []}
    for number in cases:
        case = case_of(number)
        num_ranks, count = case["cluster"].num_ranks, len(case["samples"])
        words = f"case {number}: {num_ranks} ranks, {count} sequences, {case['sync']}"
        begin = time.thread_time()
        plan = plan_batch(**case)
        planned_s = time.thread_time() - begin
        plan.validate()
        if planned_s > max(1.0, 0.3 * plan.predicted_time_s):
            found["late"].append(f"{words}: planned in {planned_s:.1f} s for a step of {plan.predicted_time_s:.2f} s")
        if num_ranks * count <= COMPARED:
            best_s, name = min((plan_batch(**case, planner=name).predicted_time_s, name) for name in BASELINES)
            if plan.predicted_time_s > best_s * (1.014 if case["pool"] else 1.005):
                found["behind"].append(f"{words}: {plan.predicted_time_s / best_s:.4f} of {name}")
        if sys.stderr.isatty():
            print(f"\r{number - cases.start + 1} of {len(cases)}", end="", file=sys.stderr)
    for kind, lines in found.items():
        print(f"{kind}: {len(lines)} of {len(cases)} cases", *lines, sep="\n    ")
    return int(bool(found["behind"]))


def case_of(number: int) -> dict[str, Any]:
    """Arguments of `plan_batch`."""
    random = np.random.default_rng(number)
    num_ranks = int(np.exp(random.uniform(0, np.log(600)))) or 1
    nodes = [node for node, size in enumerate(random.choice([1, 3, 4, 5, 7, 8, 12], num_ranks)) for _ in range(size)]
    if random.random() < 0.25:
        random.shuffle(nodes)
    spread = random.normal(1.0, 0.05, num_ranks).clip(0.5, 1.5)
    speeds = (np.ones(num_ranks), random.uniform(0.1, 1.0, num_ranks), spread)[int(random.choice((0, 0, 1, 2)))]
    tokens = int(random.choice([512, 2048, 8192, 40_000]))
    cluster = ClusterSpec(num_ranks, int(random.choice([1, 4, 8])), tokens,
                          tuple(speeds.tolist()),
                          tuple(map(int, nodes[:num_ranks])) if random.random() < 0.75 else ())
    lengths = lengths_of(random, tokens, num_ranks)
    lengths = np.clip(lengths * min(1.0, FULL * tokens * num_ranks / lengths.sum()), 1, cluster.max_tokens).astype(int)
    has_images = random.random() < 0.2
    pool = [tuple(sorted(random.permutation(num_ranks)[: random.integers(2, 6)].tolist()))
            for _ in range(8 * (num_ranks > 1 and random.random() < 0.4))]
    return {"samples": list(samples_of(random, lengths, has_images)), "cluster": cluster, "pool": pool,
            "cost": replace(COSTS[random.integers(len(COSTS))], group_s=0.0),
            "sync": str(random.choice(["step", "micro_batch"])),
            "encoder": str(random.choice(["group", "auto"])) if has_images else "group"}


def lengths_of(random: np.random.Generator, tokens: int, num_ranks: int) -> np.ndarray:
    """Tokens of the sequences of a batch, where a rank holds `tokens`."""
    count = int(np.exp(random.uniform(0, np.log(min(20_000, 60_000 / num_ranks + 50)))))
    middle = tokens * random.choice([0.02, 0.2, 0.6, 1.0])
    kind = random.integers(5)
    if kind == 0:
        return np.asarray(np.exp(random.normal(np.log(middle), random.uniform(0.1, 1.6), count)))
    if kind == 1:
        return np.full(count, middle)
    if kind == 2:
        return np.where(random.random(count) < 0.05, tokens * num_ranks * random.uniform(0.1, 1.0), middle)
    return random.uniform(1, 2 * middle, count) if kind == 3 else middle / 2 * (1 + random.pareto(1.1, count))


def samples_of(random: np.random.Generator, lengths: np.ndarray, has_images: bool) -> Iterator[Sample]:
    """A tenth with up to forty images, where they fit."""
    for row, length in enumerate(lengths):
        heights = random.integers(2, 60, random.integers(1, 41)) if has_images and random.random() < 0.1 else ()
        grids, vision = tuple((1, int(height), 16) for height in heights), 4 * int(sum(heights))
        if vision >= length:
            grids, vision = (), 0
        yield Sample(str(row), int(length) - vision, vision, grids)


if __name__ == "__main__":
    word = sys.argv[1] if len(sys.argv) > 1 else "cases=0-199"
    asked = re.fullmatch(r"cases=(\d+)-(\d+)", word)
    if word in ("-h", "--help"):
        print(__doc__)
    elif asked and int(asked[1]) <= int(asked[2]):
        sys.exit(main(range(int(asked[1]), int(asked[2]) + 1)))
    else:
        sys.exit(f"planner_sweep.py: {word}: allowed: cases=FIRST-LAST")
