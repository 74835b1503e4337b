"""Two real workers under five faults in twenty minutes, beside the simulator.

    python benchmarks/faulty_run.py                    DHP_RAY_TEST_DATA=FOLDER: with real pictures
    python benchmarks/faulty_run.py --minutes 8        a try

The faults are those of the hour in benchmarks/goodput.py: worker, node, worker, node, worker, at even distances. A
worker comes back as soon as Ray has started another; a lost node is replaced after NODE_AFTER_S.

A rehearsal, a run of its own with each kind of fault twice, tells the simulator what it cannot know: seconds of steps
with both ranks (the plans' own predictions, scaled to them), of a checkpoint, until a fault is seen, until the survivor
goes on, until the other is back, until both go on. Then the run itself: tokens that its committed steps have trained,
beside those of the simulated one, which has the samples of the rehearsal. The exit code is 1 where they differ by more
than 10 %. Faults cost some 5 % of the tokens, so what the simulator says without any is printed beside it.

Two nodes (raylets of this machine) with a worker each; every step's state is mirrored. It needs two cores that do
nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import yaml  # noqa: E402

from benchmarks.worlds import data_overrides  # noqa: E402
from dhp_ray.planner import CostModel, Plan, Sample  # noqa: E402
from dhp_ray.simulate.machine import SimulatedCluster  # noqa: E402
from dhp_ray.simulate.run import SimulatedRun  # noqa: E402
from dhp_ray.simulate.settings import Event, FaultKind, FaultSettings, load_simulation  # noqa: E402
from tests.integration.faults import Run, kill, seconds_since  # noqa: E402
from tests.integration.jobs import lines  # noqa: E402
from tests.integration.nodes import Nodes  # noqa: E402

KINDS = ("worker", "node", "worker", "node", "worker")
REHEARSED = ("worker", "node", "worker", "node")
NODE_AFTER_S = 30.0
"""From the loss of a node until another is there."""
HEAD_CPUS, NODE_CPUS, RANKS = 1, 2, 2
TOKENS, SAVE_EVERY = 512, 15
SETTINGS = ["data.max_pixels=40000", f"planner.tokens_per_rank={TOKENS}", f"planner.max_sequence_tokens={TOKENS}",
            "train.min_learning_rate_ratio=1", "model.preset=small", "batch.global_samples=12",
            "cluster.cpus_per_worker=1.3", "cluster.start_timeout_s=60", f"cluster.num_workers={RANKS}",
            "run.steps=1000000", "planner.sync=step", "elastic.mirror_every_steps=1",
            f"checkpoint.every_steps={SAVE_EVERY}", "planner.encoder=group"]
FIRST_STEPS, CALM_STEPS, SLOW_STEPS = 40, 15, 10
"""Of the rehearsal: steps before its first fault, and before the others. Its first SLOW_STEPS do not count."""
MOST_ERROR = 0.1


@dataclass
class Observed:
    """A run, and when (seconds since the epoch) each of its steps was committed."""

    run: Run
    commits: list[float] = field(default_factory=list)

    def look(self) -> None:
        while len(self.commits) < self.run.step:
            self.commits.append(time.time())

    def wait_for(self, what: Callable[[], object], timeout_s: float = 300.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not what():
            assert self.run.process.poll() is None, self.run.said()
            assert time.monotonic() < deadline, f"not within {timeout_s:g} s\n{self.run.said()}"
            self.look()
            time.sleep(0.01)

    def wait_until(self, moment: float) -> None:
        self.wait_for(lambda: time.time() >= moment, 3600.0)

    def wait_for_steps(self, number: int) -> None:
        """So many more, of all ranks."""
        self.wait_for(lambda: len(self.run.pids) == RANKS)
        last = self.run.step + number
        self.wait_for(lambda: self.run.step >= last)


class Loss(NamedTuple):
    """What a fault took, in seconds, as `FaultKind` and `join_s` have it."""

    kind: str
    seen_s: float
    form_s: float
    return_s: float
    join_s: float


@dataclass
class Calibration:
    """What the rehearsal gives the simulator. `between_s`: from the end of a step to the begin of the next."""

    samples: list[tuple[Sample, ...]]
    cost: CostModel
    between_s: float
    stage_s: float
    save_every_s: float
    losses: list[Loss]

    def median_of(self, name: str, kind: str = "") -> float:
        return max(0.0, statistics.median(getattr(loss, name) for loss in self.losses if kind in ("", loss.kind)))

    def kind(self, kind: str) -> FaultKind:
        return FaultKind(**{name: self.median_of(name, kind) for name in ("seen_s", "form_s", "return_s")})


class SeenBatches:
    """The batches of a run, over and over (as `simulate.batches.Batches`)."""

    def __init__(self, samples: Sequence[tuple[Sample, ...]]) -> None:
        self._samples = samples
        longest = [max(sample.num_tokens for sample in batch) for batch in samples]
        self.longest_tokens = max(longest)
        self.longest_step = longest.index(self.longest_tokens) + 1
        self.left_out: set[str] = set()

    def __call__(self, step: int) -> list[Sample]:
        return list(self._samples[(step - 1) % len(self._samples)])


def inflict(observed: Observed, nodes: Nodes, kind: str) -> float:
    """Take a worker, or its node; when (seconds since the epoch)."""
    if kind == "worker":
        return kill(observed.run.pids[-1])
    last = observed.run.pids[-1]
    moment = nodes.vanish(next(node for node in nodes.nodes if last in nodes.pids(node)))
    observed.wait_until(moment + NODE_AFTER_S)
    nodes.add(NODE_CPUS)
    return moment


def loss_of(observed: Observed, kind: str, moment: float, end: float) -> Loss:
    """What the events and commits from a fault to a later moment tell of it; all ranks are back by then."""
    formed = observed.run.events_after(moment, "generation")
    broken = observed.run.events_after(moment, "broken")[0]
    seen_s, stands_s = (seconds_since(event, moment) for event in (broken, formed[0]))
    joined = next(event for event in formed if event["num_ranks"] == RANKS)
    joined_s = seconds_since(joined, moment)
    begun_s = joined_s - joined["seconds"]
    first, *others = [commit for commit in observed.commits if moment + joined_s < commit < end]
    period_s = statistics.median(differences([first, *others]))
    join_s = first - moment - begun_s - period_s  # its first step is slower than the others
    return Loss(kind, seen_s, stands_s - seen_s, begun_s - seen_s, max(joined["seconds"], join_s))


def differences(values: Sequence[float]) -> list[float]:
    return [after - before for before, after in pairwise(values)]


def rehearsal(folder: Path, nodes: Nodes, common: list[str]) -> Calibration:
    observed = Observed(Run(folder, *common))
    moments = []
    try:
        observed.wait_for(lambda: (folder / "cluster.json").exists())
        for number, kind in enumerate(REHEARSED):
            observed.wait_for_steps(CALM_STEPS if number else FIRST_STEPS)
            moments.append((kind, inflict(observed, nodes, kind)))
            observed.wait_for(lambda: len(observed.run.pids) < RANKS)
            print(f"rehearsal: {kind} lost at step {observed.run.step}", flush=True)
        observed.wait_for_steps(CALM_STEPS)
    finally:
        observed.run.end()
    ends = [moment for _, moment in moments[1:]] + [time.time()]
    losses = [loss_of(observed, kind, moment, end) for (kind, moment), end in zip(moments, ends)]
    return calibrated(folder, observed, losses, moments[0][1])


def calibrated(folder: Path, observed: Observed, losses: list[Loss], first_fault: float) -> Calibration:
    """From the calm steps before the first fault."""
    count = len([commit for commit in observed.commits if commit < first_fault])
    metrics = lines(folder, "metrics.jsonl")
    trees = [json.loads(path.read_text()) for path in sorted((folder / "plans").glob("step_*.json"))[:count]]
    plans = [Plan.from_json(tree) for tree in trees]
    periods = dict(zip(range(2, count + 1), differences(observed.commits[:count])))  # by the step that ends with it
    counted = {step: period for step, period in periods.items() if step > SLOW_STEPS}
    saves, others = ([period for step, period in counted.items() if (step % SAVE_EVERY == 1) == saved]
                     for saved in (True, False))
    plain = [step for step in counted if step % SAVE_EVERY != 1]
    step_s = statistics.mean(metrics[step - 1]["step_time_s"] for step in plain)
    predicted_s = statistics.mean(plans[step - 1].predicted_time_s for step in plain)
    period_s = statistics.mean(others)
    cost = scaled(CostModel.from_json(plans[-1].inputs["cost"]), step_s / predicted_s)
    return Calibration([plan.samples for plan in plans], cost, max(0.0, period_s - step_s),
                       max(0.0, statistics.mean(saves) - period_s), SAVE_EVERY * period_s, losses)


def scaled(cost: CostModel, factor: float) -> CostModel:
    """All constants in seconds times `factor`; bandwidths stay."""
    def of(value: Any) -> Any:
        return {name: factor * each for name, each in value.items()} if isinstance(value, dict) else factor * value

    times = [item.name for item in fields(cost) if (item.name.endswith("_s") or item.name.endswith("_s_by_sync"))
             and not item.name.endswith("bytes_per_s")]
    return replace(cost, **{name: of(getattr(cost, name)) for name in times})


def real(folder: Path, nodes: Nodes, common: list[str], duration_s: float) -> float:
    """Tokens that a run has trained in so many seconds from the begin of its first step, faults among them."""
    observed = Observed(Run(folder, *common))
    try:
        observed.wait_for(lambda: observed.commits)
        begun = observed.commits[0] - lines(folder, "metrics.jsonl")[0]["step_time_s"]
        for at_s, kind in times_of(duration_s):
            observed.wait_until(begun + at_s)
            print(f"{kind} lost at step {observed.run.step}", flush=True)
            inflict(observed, nodes, kind)
        observed.wait_until(begun + duration_s)
        done = len([commit for commit in observed.commits if commit <= begun + duration_s])
        return float(sum(line["num_tokens"] for line in lines(folder, "metrics.jsonl")[:done]))
    finally:
        observed.run.end()


def times_of(duration_s: float) -> Iterator[tuple[float, str]]:
    """When each fault strikes: seconds after the first step began."""
    for number, kind in enumerate(KINDS, 1):
        yield number * duration_s / (len(KINDS) + 1), kind


def simulated(calibration: Calibration, folder: Path, duration_s: float, with_faults: bool) -> float:
    """The same of the simulator."""
    cost_file = folder / "cost.yaml"
    cost_file.write_text(yaml.safe_dump(calibration.cost.to_json()))
    settings = load_simulation([
        f"cluster.num_ranks={RANKS}", "cluster.ranks_per_node=1", "cluster.kind=cpu", "cluster.memory_gib=100000",
        f"cluster.cost={cost_file}", f"train.tokens_per_rank={TOKENS}", f"duration_s={duration_s}", "sync=step",
        "planning.encoder=group", f"planning.between_s={calibration.between_s}", "planners=[dhp]",
        f"global_samples={len(calibration.samples[0])}"])
    events = [Event(time_s=at_s, kind=kind, rank=RANKS - 1) for at_s, kind in times_of(duration_s)]
    faults = FaultSettings(
        events=events if with_faults else [], worker=calibration.kind("worker"), node=calibration.kind("node"),
        join_s=calibration.median_of("join_s"), mirror_every_steps="1", copy_s=1e-3,
        checkpoint_every_s=calibration.save_every_s, stage_s=calibration.stage_s)
    batches: Any = SeenBatches(calibration.samples)
    machine = SimulatedCluster(replace(settings, faults=faults), batches.longest_tokens, batches(1))
    record = SimulatedRun("dhp", machine, batches).simulate()
    assert not record.error, record.error
    return float(sum(step.num_tokens for step in record.steps))


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0)
    arguments = parser.parse_args(argv)
    duration_s = 60 * arguments.minutes
    if duration_s < 2 * NODE_AFTER_S * (len(KINDS) + 1):
        least = 2 * NODE_AFTER_S * (len(KINDS) + 1) / 60
        parser.error(f"--minutes: got {arguments.minutes:g}; allowed: at least {least:g}, so that a lost node is back "
                     "before the next fault")
    with tempfile.TemporaryDirectory(prefix="dhp_ray_faulty_") as name, Nodes(HEAD_CPUS) as nodes:
        os.environ["RAY_ADDRESS"] = nodes.address
        folder = Path(name)
        for _ in range(RANKS):
            nodes.add(NODE_CPUS)
        common = [*data_overrides(os.environ.get("DHP_RAY_TEST_DATA", ""), folder), *SETTINGS]
        calibration = rehearsal(folder / "rehearsal", nodes, common)
        print(f"{calibration.between_s:.3f} s between two steps, {calibration.stage_s:.3f} s more for a checkpoint")
        print("| lost | seen after [s] | survivor goes on after | the other is back after | both go on after |\n"
              "|---|---|---|---|---|")
        for loss in calibration.losses:
            print(f"| {loss.kind} | {' | '.join(f'{seconds:.2f}' for seconds in loss[1:])} |")
        predicted, calm = (simulated(calibration, folder, duration_s, faulty) for faulty in (True, False))
        trained = real(folder / "run", nodes, common, duration_s)
    error = predicted / trained - 1.0
    print(f"\n{arguments.minutes:g} minutes, {len(KINDS)} faults: {trained / duration_s:,.0f} tokens a second, "
          f"simulated {predicted / duration_s:,.0f} ({100 * error:+.1f} %), without faults {calm / duration_s:,.0f} "
          f"({100 * (calm / trained - 1):+.1f} %)")
    return int(abs(error) > MOST_ERROR)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
