"""Two ranks, one core each: all images of a batch in one sample, which one rank runs. Steps with images apart from the
packs beside steps with images in them, in turns; measured and predicted.

    OMP_NUM_THREADS=1 python benchmarks/encoder_ranks.py
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from dhp_ray.comm.device import CPU
from dhp_ray.config import CONF, Config, load
from dhp_ray.planner import ClusterSpec, CostModel, Plan, plan_batch
from dhp_ray.runtime.messages import Membership
from dhp_ray.runtime.worker.rank import Rank
from dhp_ray.train.collate import Payload
from dhp_ray.train.step_inputs import collated
from tests.packs import make_sample
from tests.ranks import run_processes

NUM_PAIRS, UNCOUNTED = 12, 2
MADE = [make_sample("images", [20, *[(1, 48, 48)] * 6, 20]),
        *(make_sample(f"text {index}", [900]) for index in range(4))]


def plans() -> dict[str, Plan]:
    cost = CostModel.load(CONF / "cost" / "cpu.yaml")
    samples = [sample for sample, _ in MADE]
    return {layout: plan_batch(samples, ClusterSpec(2, 2, 8192), cost, planner="static", encoder=layout)
            for layout in ("group", "world")}


def measured(rank: int, port: int, config: Config, planned: dict[str, Plan]) -> list[tuple[float, float]]:
    """Seconds of the steps of each pair."""
    torch.set_num_threads(1)
    member = Rank(config, Membership(rank, 2, 1, "127.0.0.1", port), CPU)
    payloads: dict[str, Payload] = {sample.id: payload for sample, payload in MADE}
    inputs = {layout: collated(plan.rank_plan(1, rank), payloads, member.adapter) for layout, plan in planned.items()}
    pairs = []
    for number in range(UNCOUNTED + NUM_PAIRS):
        seconds = {}
        for layout in sorted(inputs, reverse=bool(number % 2)):
            seconds[layout] = member.stepper.run(inputs[layout], 0.0).step_time_s
        pairs.append((seconds["group"], seconds["world"]))
    member.close()
    return pairs[UNCOUNTED:]


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    planned = plans()
    assert set(planned["group"].degrees()) == {1}
    config = load(["model.preset=tiny", "run.dir=unused", "comm.timeout_s=120"])
    # a step ends on both ranks with the update: the longer of the two counts
    both = list(zip(*run_processes(measured, 2, config, planned, timeout_s=500)))
    found = [[max(seconds) for seconds in zip(*pair)] for pair in both]
    ratios = sorted(world / group for group, world in found)
    print("| layout | predicted s | measured s, median |\n|---|---|---|")
    for place, (layout, plan) in enumerate(planned.items()):
        print(f"| {layout} | {plan.predicted_time_s:.3f} | {statistics.median(pair[place] for pair in found):.3f} |")
    predicted = planned["world"].predicted_time_s / planned["group"].predicted_time_s
    print(f"world over group: measured {statistics.median(ratios):.3f} (of {len(ratios)} pairs, {ratios[0]:.3f} to "
          f"{ratios[-1]:.3f}), predicted {predicted:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
