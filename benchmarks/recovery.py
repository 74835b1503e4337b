"""What a lost worker and a lost node cost: dhp_ray beside Ray Train's elastic TorchTrainer, on one cluster and with one
model.

    python benchmarks/recovery.py                       3 workers killed and 3 nodes lost each way
    python benchmarks/recovery.py --repeats 1 --only dhp_ray
    python benchmarks/recovery.py --mirroring           what copies of the state in other workers' memory cost a step,
                                                        and what memory

Two nodes (raylets of this machine) with two workers each. After each loss the run gets all four workers back before the
next. `goes on` is the time from the loss to the end of the first step that the new group has run; Ray Train says
nothing of when it notices.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.outages import NODE_CPUS, NUM_RANKS, losses_of, report  # noqa: E402

WORKER_CPUS = 1.3
SETTINGS = ["data.max_pixels=40000", "planner.tokens_per_rank=512", "planner.max_sequence_tokens=512",
            "train.min_learning_rate_ratio=1", "batch.global_samples=6",
            f"cluster.cpus_per_worker={WORKER_CPUS}", "cluster.start_timeout_s=60", f"cluster.num_workers={NUM_RANKS}",
            "run.steps=1000000"]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="losses of each kind")
    parser.add_argument("--only", choices=("dhp_ray", "ray_train"), default="", help="one way alone")
    parser.add_argument("--sync", choices=("step", "micro_batch"), default="step")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--mirroring", action="store_true")
    parser.add_argument("--steps", type=int, default=160, help="steps with --mirroring")
    parser.add_argument("--samples", type=int, default=24, help="samples of a step with --mirroring")
    parser.add_argument("--preset", default="tiny", help="model")
    parser.add_argument("--train-function", default="", help=argparse.SUPPRESS)  # the process of Ray Train's job
    arguments = parser.parse_args(argv)
    if arguments.train_function:
        return fit(Path(arguments.train_function), arguments.preset)

    from benchmarks.worlds import data_overrides
    from tests.integration.nodes import Nodes

    with tempfile.TemporaryDirectory(prefix="dhp_ray_recovery_") as folder, Nodes(head_cpus=1) as nodes:
        os.environ["RAY_ADDRESS"] = nodes.address
        for _ in range(2):
            nodes.add(NODE_CPUS)
        common = [*data_overrides(os.environ.get("DHP_RAY_TEST_DATA", ""), Path(folder)), *SETTINGS,
                  f"planner.sync={arguments.sync}",
                  f"model.preset={arguments.preset}"]
        if arguments.mirroring:
            return mirroring(Path(folder), common, arguments)
        draw, found = random.Random(arguments.seed), {}
        if arguments.only != "ray_train":
            found["dhp_ray"] = losses_of(DhpRay(Path(folder) / "run", common), nodes, arguments.repeats, draw)
        if arguments.only != "dhp_ray":
            found["Ray Train"] = losses_of(RayTrain(Path(folder) / "ray_train", arguments.preset), nodes,
                                           arguments.repeats, draw)
    return report(found)


class DhpRay:
    """A run of jobs/train.py."""

    def __init__(self, folder: Path, common: list[str]) -> None:
        from tests.integration.faults import Run

        self.run = Run(folder, *common, "checkpoint.every_steps=20")
        self.end = self.run.end

    def check(self) -> None:
        assert self.run.process.poll() is None, self.run.said()

    @property
    def pids(self) -> list[int]:
        return self.run.pids if (self.run.folder / "cluster.json").exists() else []

    @property
    def step(self) -> tuple[int, int]:
        """(generation, step) of the last committed step."""
        generations = self.run.generations
        return (generations[-1], len(generations)) if generations else (0, 0)

    def times(self, moment: float) -> tuple[float | None, float | None]:
        """When the loss was seen and when the next generation stood, after `moment`."""
        from tests.integration.faults import seconds_since

        seen, formed = (self.run.events_after(moment, kind) for kind in ("broken", "generation"))
        return seconds_since(seen[0], moment) if seen else None, seconds_since(formed[0], moment) if formed else None

    def parts(self, moment: float) -> dict[str, float]:
        """What forming the first generation after `moment` took its time for."""
        event = next(iter(self.run.events_after(moment, "generation")), {})
        return {name: seconds for name, seconds in event.items() if name.endswith("_s")}


class RayTrain:
    """A TorchTrainer with elastic workers; each group writes down its processes, and rank 0 each step."""

    def __init__(self, folder: Path, preset: str) -> None:
        folder.mkdir()
        self.folder = folder
        with (folder / "log").open("w") as log:
            self.process = subprocess.Popen([sys.executable, str(Path(__file__).resolve()), "--train-function",
                                             str(folder), "--preset", preset],
                                            cwd=ROOT, stdout=log, stderr=log,
                                            env=os.environ | {"RAY_TRAIN_V2_ENABLED": "1"})

    def check(self) -> None:
        assert self.process.poll() is None, (self.folder / "log").read_text()[-3000:]

    @property
    def pids(self) -> list[int]:
        lines = read_lines(self.folder / "steps")
        return lines[-1][2:] if lines else []

    @property
    def step(self) -> tuple[int, int]:
        """(start of the group, step) of the last step."""
        lines = read_lines(self.folder / "steps")
        return (lines[-1][0], lines[-1][1]) if lines else (0, 0)

    def times(self, moment: float) -> tuple[None, None]:
        return None, None

    def parts(self, moment: float) -> dict[str, float]:
        return {}

    def end(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def read_lines(path: Path) -> list[list[int]]:
    """Lines of numbers; the last one may be half-written."""
    if not path.exists():
        return []
    return [[int(word) for word in line.split()] for line in path.read_text().split("\n")[:-1]]


def fit(folder: Path, preset: str) -> int:
    """Ray Train's job: the same model under DistributedDataParallel, a checkpoint every 20 steps."""
    import ray
    from ray.train import FailureConfig, RunConfig
    from ray.train.torch import TorchTrainer
    from ray.train.v2.api.config import ScalingConfig

    ray.init(log_to_driver=False)
    trainer = TorchTrainer(
        train_function, train_loop_config={"folder": str(folder), "preset": preset},
        scaling_config=ScalingConfig(num_workers=(1, NUM_RANKS), resources_per_worker={"CPU": WORKER_CPUS},
                                     elastic_resize_monitor_interval_s=5.0),
        run_config=RunConfig(name="elastic", storage_path=str(folder / "storage"),
                             failure_config=FailureConfig(max_failures=40)))
    trainer.fit()
    return 0


def train_function(settings: dict[str, Any]) -> None:
    import os
    import tempfile
    import time
    from pathlib import Path

    import ray.train
    import ray.train.torch
    import torch
    import torch.distributed as dist

    from dhp_ray.data.families import preset_token_ids
    from dhp_ray.model.build import build_model

    torch.set_num_threads(1)
    context = ray.train.get_context()
    module = build_model(settings["preset"], "", preset_token_ids(settings["preset"]), 0).module
    module.set_attn_implementation("sdpa")  # transformers' own: a rank has whole sequences here
    step, checkpoint = 0, ray.train.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as place:
            state = torch.load(Path(place) / "state.pt")
            step = state["step"]
            module.load_state_dict(state["module"])
    model = ray.train.torch.prepare_model(module, parallel_strategy_kwargs={"find_unused_parameters": True})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    pids = [torch.zeros(1, dtype=torch.int64) for _ in range(context.get_world_size())]
    dist.all_gather(pids, torch.tensor([os.getpid()]))
    start = torch.tensor([int(time.time() * 1000)])
    dist.broadcast(start, 0)
    while True:
        tokens = torch.randint(0, 256, (1, 480),
                               generator=torch.Generator().manual_seed(step * 100 + context.get_world_rank()))
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if context.get_world_rank() == 0:
            with (Path(settings["folder"]) / "steps").open("a") as steps:
                steps.write(" ".join(str(int(number)) for number in (start, step, *pids)) + "\n")
        if step % 20 == 0:
            with tempfile.TemporaryDirectory() as place:
                if context.get_world_rank() == 0:
                    torch.save({"step": step, "module": model.module.state_dict()}, Path(place) / "state.pt")
                    ray.train.report({"step": step}, checkpoint=ray.train.Checkpoint.from_directory(place))
                else:
                    ray.train.report({"step": step})


def mirroring(folder: Path, common: list[str], arguments: Any) -> int:
    """Every fourth step's state is mirrored: the step that begins the copies and the one beside which they travel,
    against the other two.
    """
    from tests.integration.faults import Run

    every = 4
    run = Run(folder / "run", *common, f"run.steps={arguments.steps}", "checkpoint.every_steps=0",
              f"elastic.mirror_every_steps={every}",
              f"batch.global_samples={arguments.samples}")
    assert run.wait(3600) == 0, run.said()
    metrics = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()][8:]
    own = [line["step_time_s"] / line["predicted_makespan_s"] for line in metrics if line["step"] % every in (0, 1)]
    others = [line["step_time_s"] / line["predicted_makespan_s"] for line in metrics if line["step"] % every in (2, 3)]
    # Mirroring each step adds both costs to every step.
    ratio = 1.0 + 2.0 * (statistics.median(own) / statistics.median(others) - 1.0)
    parameters = json.loads(next((run.folder / "checkpoints").glob("*/*/parameters.json")).read_text())["shapes"]
    elements = sum(math.prod(shape) for shape in parameters.values())
    rank_mb = 2 * 3 * 4 * elements / NUM_RANKS / 2**20
    tokens = statistics.mean(line["num_tokens"] for line in metrics)
    print(
        f"{len(metrics)} steps of {NUM_RANKS} ranks and {tokens:.0f} tokens, model {arguments.preset} "
        f"({elements / 1e6:.2f} M parameters), "
        f"mirrored every {every} steps"
    )
    print(
        f"steps with mirroring {statistics.median(own):.3f} of their prediction, without "
        f"{statistics.median(others):.3f}: "
        f"mirroring every step takes {ratio:.3f} of the time without, at most 1.05"
    )
    print(
        f"copies of another rank's shard: {rank_mb:.1f} MB of host memory a rank (two versions of fp32 parameters and "
        "both moments)"
    )
    print("ok  " if ratio <= 1.05 else "FAIL", "mirroring")
    return int(ratio > 1.05)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
