"""What the Ray driver costs a step: a run of `jobs/train.py` against the same plans run by plain torch.distributed.

    python benchmarks/overhead.py               5 blocks of 6 steps each way, on 2 workers, preset small
    python benchmarks/overhead.py --steps 3 --blocks 10
    python benchmarks/overhead.py --mirroring   a run that mirrors its state by `auto` against one that does not

Blocks take turns. Each way's step is timed from its end to the end of the one before, so all that the driver does
between two steps counts; a block's first steps do not, in which processes still start. The plain ranks are the worker's
own `Rank` object and their plans the run's files; a thread of each makes its inputs a step ahead, as the worker's
does. Neither side mirrors its state, but with --mirroring.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from time import perf_counter, process_time
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.processes import between, table, used  # noqa: E402

if TYPE_CHECKING:
    from dhp_ray.config import Config
    from dhp_ray.planner.plan.types import Plan, RankPlan
    from dhp_ray.train.step_inputs import StepInputs

NUM_RANKS = 2
NUM_SAMPLES = {"real": 480, "synthetic": 256}
"""Of an epoch: it begins once or twice, so that starting to read anew counts for no more than in a run on real data."""
SETTINGS = ("model=small", "train.min_learning_rate_ratio=1", "checkpoint.every_steps=0",
            "elastic.mirror_every_steps=0",
            f"cluster.num_workers={NUM_RANKS}", "cluster.cpus_per_worker=0.5")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=5, help="blocks each way")
    parser.add_argument("--steps", type=int, default=6, help="steps of a block that count")
    parser.add_argument("--warm-up", type=int, default=2, help="steps of a block before them")
    parser.add_argument("--samples", type=int, default=12,
                        help="samples of a step; a step should take a second or more")
    parser.add_argument("--mirroring", action="store_true")
    arguments = parser.parse_args(argv)

    from benchmarks.worlds import data_overrides, rows_of
    from dhp_ray.config import load

    with tempfile.TemporaryDirectory(prefix="dhp_ray_overhead_") as folder:
        run_dir = Path(folder) / "run"
        test_data = os.environ.get("DHP_RAY_TEST_DATA", "")
        num_samples = NUM_SAMPLES["real" if test_data else "synthetic"]
        overrides = [*data_overrides(test_data, Path(folder), num_samples), *SETTINGS,
                     f"run.dir={run_dir}", f"batch.global_samples={arguments.samples}", "planner.tokens_per_rank=1200"]
        if arguments.mirroring:
            return mirroring(Path(folder), overrides, arguments)
        config = load(overrides)
        rows = {row["id"]: row for row in rows_of(config, num_samples)}
        ray_s: list[float] = []
        plain_s: list[float] = []
        ray_cpu_s: dict[str, float] = {}
        plain_cpu_s = 0.0
        per_block = arguments.steps + arguments.warm_up
        print(
            f"{NUM_RANKS} ranks, {arguments.samples} samples a step, blocks of {arguments.steps} steps; seconds of a "
            "step",
            flush=True,
        )
        for block in range(arguments.blocks):
            first, last = block * per_block + 1, (block + 1) * per_block
            times, cpu_s = ray_block(overrides, last, arguments.steps)
            ray_s += times[-arguments.steps :]
            for kind, seconds in cpu_s.items():
                ray_cpu_s[kind] = ray_cpu_s.get(kind, 0.0) + seconds
            plans = [plan_of(run_dir, step) for step in range(first, last + 1)]
            times, seconds = plain_block(config, rows, plans, arguments.steps)
            plain_s += times[-arguments.steps :]
            plain_cpu_s += seconds
            recent = list(zip(ray_s, plain_s))[-arguments.steps :]
            print(f"block {block + 1}: ray/plain", " ".join(f"{ray:.2f}/{plain:.2f}" for ray, plain in recent),
                  flush=True)
    ratio = statistics.median(ray / plain for ray, plain in zip(ray_s, plain_s))
    difference_s = statistics.median(ray - plain for ray, plain in zip(ray_s, plain_s))
    print(
        f"{len(ray_s)} steps each way: ray {sum(ray_s):.1f} s, plain {sum(plain_s):.1f} s; of the same step: ratio "
        f"{ratio:.3f}, difference "
        f"{1e3 * difference_s:.0f} ms (medians)"
    )
    print(table(ray_cpu_s | {"plain ranks": plain_cpu_s}, len(ray_s)))
    print(
        f"CPU beside what plain ranks use: {1e3 * (sum(ray_cpu_s.values()) - plain_cpu_s) / len(ray_s):.0f} ms a step"
    )
    return 0


def mirroring(folder: Path, overrides: list[str], arguments: argparse.Namespace) -> int:
    """Blocks of a run with `elastic.mirror_every_steps=auto` and of one with 0 take turns, on the same batches."""
    times: dict[str, list[float]] = {"auto": [], "0": []}
    cpu_s = dict.fromkeys(times, 0.0)
    for block in range(arguments.blocks):
        # who begins a block changes, so that a drift of the machine falls on both
        for setting in ("auto", "0") if block % 2 else ("0", "auto"):
            last = (block + 1) * (arguments.steps + arguments.warm_up)
            found, used_s = ray_block([*overrides, f"run.dir={folder / setting}",
                                       f"elastic.mirror_every_steps={setting}"], last, arguments.steps)
            times[setting] += found[-arguments.steps :]
            cpu_s[setting] += sum(used_s.values())
        recent = list(zip(times["auto"], times["0"]))[-arguments.steps :]
        print(f"block {block + 1}: auto/0", " ".join(f"{auto:.2f}/{off:.2f}" for auto, off in recent), flush=True)
    told = [json.loads(line) for line in (folder / "auto" / "events.jsonl").read_text().splitlines()]
    every = [event["every_steps"] for event in told if event["kind"] == "mirroring"]
    ratio = statistics.median(auto / off for auto, off in zip(times["auto"], times["0"]))
    print(
        f"{len(times['0'])} steps each way: auto {sum(times['auto']):.1f} s, 0 {sum(times['0']):.1f} s; of the same "
        f"step: ratio {ratio:.3f} (median), at most 1.02; CPU seconds {cpu_s['auto'] / cpu_s['0']:.3f} of those "
        f"without; mirrored every step{f', then every {every}' if every else ''}"
    )
    print("ok  " if ratio <= 1.02 else "FAIL", "mirroring")
    return int(ratio > 1.02)


def ray_block(overrides: list[str], last_step: int, counted: int) -> tuple[list[float], dict[str, float]]:
    """Go on with the run to `last_step`; seconds between the lines of its steps, and CPU seconds of the last `counted`
    by kind of process.
    """
    command = [sys.executable, str(ROOT / "jobs" / "train.py"), *overrides, f"run.steps={last_step}"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True,
                               env=os.environ | {"RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1"})
    assert process.stdout is not None
    ends: list[float] = []
    moments = {}
    for line in process.stdout:
        if line.startswith("step "):
            ends.append(perf_counter())
            step = int(line.split()[1].partition("/")[0])
            if step in (last_step - counted, last_step):
                moments[step] = used(process.pid)
    if process.wait():
        raise RuntimeError(f"jobs/train.py ended with status {process.returncode}")
    return [end - begin for begin, end in pairwise(ends)], between(moments[last_step - counted], moments[last_step])


def plan_of(run_dir: Path, step: int) -> Plan:
    """The plan that the run has written for a step."""
    from dhp_ray.planner.plan.types import Plan

    return Plan.from_json(json.loads((run_dir / "plans" / f"step_{step:06d}.json").read_text()))


def plain_block(config: Config, rows: dict[str, Any], plans: list[Plan], counted: int) -> tuple[list[float], float]:
    """Run the plans on ranks without Ray; seconds between the ends of their steps, and CPU seconds of the last
    `counted`.
    """
    from tests.ranks import run_processes

    found: list[list[tuple[float, float]]] = run_processes(_run, NUM_RANKS, config, plans, rows, timeout_s=600)
    used_s = sum(ends[-1][1] - ends[-1 - counted][1] for ends in found)
    return [end - begin for (begin, _), (end, _) in pairwise(found[0])], used_s


def _run(rank: int, port: int, config: Config, plans: list[Plan], rows: dict[str, Any]) -> list[tuple[float, float]]:
    """The clock and this process's CPU seconds at the end of each step."""
    from dhp_ray.comm.device import CPU
    from dhp_ray.data.processor import ProcessorSpec
    from dhp_ray.runtime.messages import Membership
    from dhp_ray.runtime.worker.prefetch import load_inputs
    from dhp_ray.runtime.worker.rank import Rank

    processor = ProcessorSpec.of(config.model, config.data).load()
    member = Rank(config, Membership(rank, NUM_RANKS, 1, "127.0.0.1", port), CPU)

    def inputs_of(plan: RankPlan) -> StepInputs:
        own = [rows[sample.id] for pack in plan.packs for sample in pack.samples]
        return load_inputs(plan, own, processor, member.adapter, precision=config.train.precision)[0]

    rank_plans = [plan.rank_plan(step, rank) for step, plan in enumerate(plans, 1)]
    ends = []
    with ThreadPoolExecutor(1) as thread:
        following = thread.submit(inputs_of, rank_plans[0])
        for later in [*rank_plans[1:], None]:
            inputs = following.result()
            if later is not None:
                following = thread.submit(inputs_of, later)
            member.stepper.run(inputs, 1.0)
            ends.append((perf_counter(), process_time()))
    member.close()
    return ends


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
