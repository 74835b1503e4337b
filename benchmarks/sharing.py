"""A step of ranks that share the memory of their node beside one of ranks that have everything: `train.sharding=node`
over `whole`, in time.

    DHP_RAY_TEST_DATA=FOLDER OMP_NUM_THREADS=1 python benchmarks/sharing.py

Two ranks, one core each, train the preset `small` in fp32 by the plans of `dhp`, each batch in both ways, in turns,
from the same weights. Prints the ratio of the same step and where the ranks' time goes. Exit status 1: a step takes
over 1.10 of `whole`'s in the median, or the losses of the same step differ by more than 1e-4.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.stopwatch import Stopwatch  # noqa: E402
from benchmarks.worlds import Corpus, corpus_of, data_overrides, plans_of  # noqa: E402
from dhp_ray.comm.device import CPU  # noqa: E402
from dhp_ray.config import Config, load  # noqa: E402
from dhp_ray.planner import Plan  # noqa: E402
from dhp_ray.runtime.messages import Membership  # noqa: E402
from dhp_ray.runtime.worker.rank import Rank  # noqa: E402
from dhp_ray.train.flat_engine import FlatEngine  # noqa: E402
from dhp_ray.train.node_engine import NodeEngine  # noqa: E402
from dhp_ray.train.state.node_state import NodeState  # noqa: E402
from dhp_ray.train.step_inputs import collated  # noqa: E402
from tests.ranks import run_processes  # noqa: E402

NUM_RANKS, MOST, LOSS_ERROR = 2, 1.10, 1e-4
SHARDINGS = ("whole", "node")
PARTS = {"reading units": (NodeState, "read"), "adding gradients": (NodeState, "add"),
         "reading rows": (NodeState, "read_rows"), "adding rows": (NodeState, "add_rows"),
         "update, whole": (FlatEngine, "update"), "update, node": (NodeEngine, "update")}


class Ran(NamedTuple):
    """One step of a rank: how its parameters lay, which block and step, its seconds, and the loss of all ranks."""

    sharding: str
    block: int
    step: int
    seconds: float
    loss: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=3, help="blocks of steps, each way")
    parser.add_argument("--steps", type=int, default=3, help="steps of a block that count; a first one does not")
    parser.add_argument("--samples", type=int, default=24, help="samples of a step")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="dhp_ray_sharing_") as folder:
        common = [*data_overrides(os.environ.get("DHP_RAY_TEST_DATA", ""), Path(folder)), "model=small",
                  "cluster.device=cpu", "elastic.mirror_every_steps=0", f"run.dir={folder}/run"]
        configs = [load([*common, f"train.sharding={sharding}"]) for sharding in SHARDINGS]
        corpus = corpus_of(configs[0], (options.steps + 1) * options.samples)
        plans = plans_of(corpus.batches(options.steps + 1, options.samples), NUM_RANKS, "dhp", "step")
        print(f"{options.samples} samples a step, {NUM_RANKS} ranks, {options.blocks} blocks", flush=True)
        found = run_processes(run_blocks, NUM_RANKS, configs, plans, corpus.shared(), options.blocks,
                              timeout_s=3600.0)
    ran, parts = found[0]
    seconds = {sharding: {(one.block, one.step): one for one in ran if one.sharding == sharding}
               for sharding in SHARDINGS}
    pairs = [(seconds["node"][key], whole) for key, whole in seconds["whole"].items()]
    ratio = statistics.median(node.seconds / whole.seconds for node, whole in pairs if node.step)
    error = max(abs(node.loss / whole.loss - 1.0) for node, whole in pairs)
    print("of the same step, node/whole [s]: " + ", ".join(
        f"{node.seconds:.2f}/{whole.seconds:.2f}" for node, whole in pairs if node.step))
    steps = sum(one.sharding == "node" for one in ran)
    print("ms a step of rank 0, where units are read in a thread beside it: "
          + ", ".join(f"{part} {spent / steps:.0f}" for part, spent in parts.items()))
    print(f"ratio {ratio:.3f} (median), at most {MOST}; losses differ by {error:.0e}")
    passed = ratio <= MOST and error <= LOSS_ERROR
    print("ok  " if passed else "FAIL", "sharing")
    return int(not passed)


def run_blocks(
    rank: int, port: int, configs: Sequence[Config], plans: Sequence[Plan], corpus: Corpus, blocks: int
) -> tuple[list[Ran], dict[str, float]]:
    """Every step of a rank, and the milliseconds that it spent in each part."""
    watch, found, generation = Stopwatch(), [], 0
    for part, (owner, name) in PARTS.items():
        watch.time(owner, name, part)
    for block in range(blocks):
        # the way that begins changes, so that a drift of the machine falls on both
        for config in configs if block % 2 else reversed(configs):
            generation += 1
            member = Rank(config, Membership(rank, NUM_RANKS, generation, "127.0.0.1", port), CPU)
            for step, plan in enumerate(plans):
                rank_plan = plan.rank_plan(step + 1, rank)
                inputs = collated(rank_plan, corpus.rank_payloads(rank_plan), member.adapter, config.train.precision)
                begun = perf_counter()
                result = member.stepper.run(inputs, member.learning_rate_factor(step + 1, len(plans)))
                found.append(Ran(config.train.sharding, block, step, perf_counter() - begun,
                                 result.loss_sum / result.num_valid_tokens))
            member.close()
    return found, {part: sum(spent for (_, of_part), spent in watch.wall_ms.items() if of_part == part)
                   for part in PARTS}


if __name__ == "__main__":
    sys.exit(main())
