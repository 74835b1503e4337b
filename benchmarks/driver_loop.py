"""What the driver does for a step of many ranks: its real loop, with its records, curves and plans, and actor handles
that answer at once.

    python benchmarks/driver_loop.py                        1,024 ranks, 2,048 samples a step
    python benchmarks/driver_loop.py --ranks 256 --samples 512
    python benchmarks/driver_loop.py --ranks 4096 --samples 16384 --images 4
                                                            4 images in each sample, at the costs of a 3B on H100:
                                                            planning and sending beside the step's predicted time
    python benchmarks/driver_loop.py --actors 4             the handles are those of 4 real actors, in turn:
                                                            what Ray's own calls cost

The main thread is what stands between two steps; planning and sending go on beside the step. CPU milliseconds of a
thread do not count what it waits for. With handles that answer at once, results come from memory as those of real calls
do, and calls cost nothing. Those of a process are all of its threads', Ray's own among them.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import ray
import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.driver_loop_ranks import prepared_handles, real_handles  # noqa: E402
from benchmarks.encoder_cases import cluster_and_cost, images_each  # noqa: E402
from benchmarks.stopwatch import Stopwatch  # noqa: E402
from dhp_ray.config import CONF, load  # noqa: E402
from dhp_ray.data.families import preset_token_ids  # noqa: E402
from dhp_ray.data.stream import GlobalBatch  # noqa: E402
from dhp_ray.model.build import model_shape  # noqa: E402
from dhp_ray.planner import CostModel, plan_batch, warm_up  # noqa: E402
from dhp_ray.planner.mode import Mode  # noqa: E402
from dhp_ray.planner.plan.cluster import ClusterSpec  # noqa: E402
from dhp_ray.planner.plan.types import Plan, Sample  # noqa: E402
from dhp_ray.runtime.driver.commit import Commits  # noqa: E402
from dhp_ray.runtime.driver.dispatch import Dispatcher  # noqa: E402
from dhp_ray.runtime.driver.driver import Driver  # noqa: E402
from dhp_ray.runtime.driver.group import WorkerGroup  # noqa: E402
from dhp_ray.runtime.driver.session import Session  # noqa: E402
from dhp_ray.runtime.messages import Message, StepCommitted  # noqa: E402
from dhp_ray.runtime.records.checkpoints import Checkpoints  # noqa: E402
from dhp_ray.runtime.records.run_records import RunRecords  # noqa: E402
from dhp_ray.runtime.records.tensorboard import ScalarLog, StepPictures  # noqa: E402
from dhp_ray.runtime.strategy import Choice, ResolvedRun  # noqa: E402
from dhp_ray.storage import Folder  # noqa: E402
from dhp_ray.train.results import StepResult  # noqa: E402

TOKENS_PER_RANK = 4096
WARM_UP, LIMIT_MS = 3, 20.0
WAITING = "waiting for the plan, as for a step"
RAY = "Ray: waiting for answers, unpickling them"
PARTS = (
    (WorkerGroup, "start", "calls to the ranks"), (WorkerGroup, "collect", "their answers, by rank"),
    (Dispatcher, "_plan", "planning"), (Dispatcher, "_send", "slices, and calls that send them"),
    (RunRecords, "plan", "the plan file"), (RunRecords, "commit", "metrics and ledger"),
    (ScalarLog, "step", "TensorBoard"), (Commits, "commit", "the rest of a commit"))
"""Methods, and what the table calls the time in each that is not in another of them."""

BESIDE = ("planning", "slices, and calls that send them", "the plan file")


class Batches:
    """A stream that gives one batch over and over."""

    epoch, num_rows, cursor = 0, 1, None

    def __init__(self, samples: list[Sample]) -> None:
        blocks = [ray.put(number) for number in range(-(-len(samples) // 64))]
        rows = {sample.id: (blocks[number // 64], number % 64) for number, sample in enumerate(samples)}
        self.batch = GlobalBatch(0, samples, rows, {}, {"epoch": 0})

    def next_batch(self, num_samples: int) -> GlobalBatch:
        return self.batch


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--samples", type=int, default=2048, help="samples of a step")
    parser.add_argument("--images", type=int, default=0, help="images of 1,024 patches in each sample")
    parser.add_argument("--steps", type=int, default=12, help="steps that count, after 3 that do not")
    parser.add_argument("--actors", type=int, default=0, help="real actors that the calls go to; 0: none")
    arguments = parser.parse_args(argv)
    ray.init("local", num_cpus=1, include_dashboard=False, configure_logging=False, log_to_driver=False)
    with tempfile.TemporaryDirectory(prefix="dhp_ray_loop_") as folder:
        handles_of = functools.partial(real_handles, arguments.actors) if arguments.actors else prepared_handles
        num_steps = arguments.steps + WARM_UP
        driver, plan = ready_driver(Path(folder), arguments.ranks, arguments.samples, num_steps, handles_of,
                                    arguments.images)
        assert driver.session is not None
        gc.collect()
        gc.freeze()  # as the driver does then
        watch = Stopwatch()
        watch.time(driver.session.current.dispatcher, "begin", WAITING)
        for owner, name, part in PARTS:
            watch.time(owner, name, part)
        for name in ("wait", "get"):
            watch.time(ray, name, RAY)
        between = times_between_steps()
        times, process_ms = run(driver, driver.session, watch)
        driver.session.current.dispatcher.stop()
    return report(watch, times, between[WARM_UP:], plan, arguments, process_ms)


def times_between_steps() -> list[tuple[float, float]]:
    """From here on, CPU and wall milliseconds of the main thread in which no rank has work: from the last answer of a
    step to the next step's calls, without the wait for its plan."""
    between: list[tuple[float, float]] = []
    collect, launch, ended = WorkerGroup.collect, Driver._launch, []

    def collected(*arguments: Any, **options: Any) -> Any:
        results = collect(*arguments, **options)
        if results and isinstance(results[0], StepResult):
            ended[:] = [time.thread_time(), time.perf_counter()]
        return results

    def launched(*arguments: Any, **options: Any) -> Any:
        running = launch(*arguments, **options)
        if ended:
            between.append((1e3 * (time.thread_time() - ended[0]), 1e3 * (time.perf_counter() - ended[1])))
        return running

    WorkerGroup.collect, Driver._launch = collected, launched  # type: ignore[method-assign]
    return between


def ready_driver(
    folder: Path, num_ranks: int, num_samples: int, num_steps: int, handles_of: Callable[[Plan, int], list[Any]],
    images: int = 0,
) -> tuple[Driver, Plan]:
    """A driver before its first step, whose ranks have the handles that `handles_of(plan, steps)` makes; and the plan
    that every step has.
    """
    samples, cluster, cost = work_of(num_ranks, num_samples, images)
    folder.mkdir(parents=True, exist_ok=True)
    cost_file = folder / "cost.yaml"
    cost_file.write_text(yaml.safe_dump(cost.to_json()))
    config = load(["data.format=synthetic", "data.path=unused", f"run.dir={folder}", f"run.steps={num_steps}",
                   f"batch.global_samples={num_samples}", "checkpoint.every_steps=0", "planner.sync=step",
                   f"planner.cost={cost_file}",
                   f"planner.tokens_per_rank={cluster.tokens_per_rank}",
                   f"planner.max_sequence_tokens={16 * cluster.tokens_per_rank}",
                   "train.deterministic=true",  # the ranks make their seconds up
                   "elastic.hang_s=600"])  # few actors that stand for many ranks are slow to say how these are
    compiled: Future[float] = Future()
    compiled.set_result(warm_up())
    plan = plan_batch(samples, cluster, cost, encoder=config.planner.encoder)
    driver = Driver(config, dict(enumerate(handles_of(plan, num_steps))), ("", 0), takes_over=False)
    shape = model_shape("tiny", "", preset_token_ids("tiny"))
    for rank, member in enumerate(driver.group.members):
        member.described = {"pid": rank, "node_id": f"node-{rank // 8}", "device": "cpu", "memory_bytes": 1,
                            "host_memory_bytes": 1, "device_name": "", "fused": False, "num_layers": 2, "shape": shape,
                            "adapters": {}}
    storage = Folder(str(folder))
    curves, batches = ScalarLog(storage.child("tensorboard"), 1), Batches(samples)
    resolved = ResolvedRun(config, Choice(Mode("step")), False, 0, "")
    session = Session(resolved, driver.group, ("", 0), RunRecords(storage), Checkpoints(storage, 1), curves,
                      StepPictures(storage, 0), batches, None, num_steps,  # type: ignore[arg-type]
                      compiled, driver.tell)
    session.choose_mode()
    session.enter(1)
    driver.session, driver.commits = session, Commits(session)
    driver.commits.save = lambda step, cursor: None  # type: ignore[method-assign]  # the last step's: ranks have no state
    dispatcher = session.current.dispatcher

    def begin(step: int) -> None:
        """A step takes as long as planning the next one: plans are never late."""
        Dispatcher.begin(dispatcher, step)
        assert dispatcher._planning is not None
        wait([dispatcher._planning.ahead])

    dispatcher.begin = begin  # type: ignore[method-assign]
    return driver, plan


def work_of(num_ranks: int, num_samples: int, images: int) -> tuple[list[Sample], ClusterSpec, CostModel]:
    """The samples of a step, the ranks and the costs."""
    if images:
        return images_each(num_samples, images), *cluster_and_cost(num_ranks)
    drawn = np.random.default_rng(0).lognormal(6.0, 1.5, num_samples)
    lengths = np.minimum(drawn, min(num_ranks, 16) * TOKENS_PER_RANK - 1).astype(int)
    samples = [Sample(f"shard-{number // 1000:05d}/{number:09d}", int(length) + 1)
               for number, length in enumerate(lengths)]
    return samples, ClusterSpec(num_ranks, 8, TOKENS_PER_RANK), CostModel.load(CONF / "cost" / "cpu.yaml")


def run(driver: Driver, session: Session, watch: Stopwatch) -> tuple[list[tuple[float, float]], float]:
    """Wall and CPU milliseconds of the main thread, by step, and CPU milliseconds a step of the process: the first
    steps are left out of both, and of `watch`.
    """
    process_s = 0.0
    times: list[tuple[float, float]] = []
    before = time.perf_counter(), time.thread_time()

    def tell(message: Message) -> None:
        nonlocal before, process_s
        if not isinstance(message, StepCommitted):
            return
        now = time.perf_counter(), time.thread_time()
        times.append((1e3 * (now[0] - before[0]), 1e3 * (now[1] - before[1])))
        before = now
        if message.metrics["step"] == WARM_UP:
            times.clear()
            watch.wall_ms.clear()
            watch.cpu_ms.clear()
            process_s = time.process_time()

    run_steps(driver, session, tell)
    return times, 1e3 * (time.process_time() - process_s) / len(times)


def run_steps(driver: Driver, session: Session, tell: Callable[[Message], None]) -> None:
    """Run all steps; `tell` is told of each commit."""
    driver.commits.session = replace(session, tell=tell)
    driver._steps(session)


def report(
    watch: Stopwatch,
    times: list[tuple[float, float]],
    between: list[tuple[float, float]],
    plan: Plan,
    arguments: argparse.Namespace,
    process_ms: float,
) -> int:
    steps = len(times)
    answers = f"{arguments.actors} actors answer for all" if arguments.actors else "answers are there at once"
    plan_kb = len(json.dumps(plan.to_json())) / 1e3
    print(f"{arguments.ranks} ranks, {arguments.samples} samples, {len(plan.groups)} packs, "
          f"{len(plan.process_groups())} process groups; {answers}; plan file {plan_kb:.0f} kB; {steps} steps")
    print("| milliseconds a step | main thread: CPU | wall | beside the step: CPU | wall |")
    print("|---|---|---|---|---|")
    for part in [WAITING, RAY, *dict.fromkeys(part for _, _, part in PARTS)]:
        columns = [table["main" if place < 2 else "planning", part] / steps
                   for place, table in enumerate((watch.cpu_ms, watch.wall_ms) * 2)]
        print(f"| {part} | " + " | ".join(f"{value:.1f}" if value else "-" for value in columns) + " |")
    cpu = statistics.mean(cpu for _, cpu in times)
    wall = statistics.mean(wall for wall, _ in times) - watch.wall_ms["main", WAITING] / steps
    print(f"a step of the main thread: {cpu:.1f} ms of CPU, {wall:.1f} ms without that wait")
    cpu_between, wall_between = (statistics.mean(values) for values in zip(*between))
    print("while no rank has work, from a step's last answer to the next step's calls: "
          f"{cpu_between:.1f} ms of CPU, {wall_between:.1f} ms")
    beside = sum(watch.cpu_ms["planning", part] for part in BESIDE) / steps
    print(f"beside the step, planning and sending: {beside:.0f} ms of CPU; the step itself takes "
          f"{1e3 * plan.predicted_time_s:.0f} ms, as predicted")
    print(f"CPU of a step, all threads of the driver's process: {process_ms:.0f} ms")
    if arguments.actors or arguments.images:
        return int(beside > 1e3 * plan.predicted_time_s)
    own = cpu - watch.cpu_ms["main", RAY] / steps
    verdict = "ok  " if own <= LIMIT_MS else "FAIL"
    print(verdict,
          f"at most {LIMIT_MS:g} ms of the main thread's CPU are the driver's own: {own:.1f}, the rest is Ray's")
    return int(own > LIMIT_MS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
