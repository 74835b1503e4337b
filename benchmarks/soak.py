"""One run and many faults: workers killed and stopped, nodes that vanish and come, drivers killed, two things at once,
in any phase of a step.

    python benchmarks/soak.py                                60 faults over 320 steps
    python benchmarks/soak.py --faults 6 --steps 24 --seed 2 the short one of make test
    python benchmarks/soak.py --sync micro_batch --seed 2
    python benchmarks/soak.py --encoder world                images encoded apart from their packs
    python benchmarks/soak.py model=tiny_qwen3_vl_moe        another model, or other keys of a run
    python benchmarks/soak.py --churn                        one membership after the other, to see that nothing
                                                             piles up in a survivor

Nodes are raylets of this machine, with room for two workers each. What happens, when and to whom follows from the seed;
the moment within a step does not. The run must end by itself, its ledger must be that of an undisturbed run, and so
must its losses: within 1e-4 in the first 50 steps, and then, since rounding alone drives runs on other numbers of ranks
apart, within 3 times what two undisturbed runs on 3 and 5 workers differ by (means of 20 steps).
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.processes import Held, held_by  # noqa: E402
from benchmarks.worlds import data_overrides  # noqa: E402
from tests.integration.faults import Run, children, kill, seconds_since  # noqa: E402
from tests.integration.jobs import ledger, lines, losses  # noqa: E402
from tests.integration.nodes import Nodes  # noqa: E402

SETTINGS = ["data.max_pixels=40000", "planner.tokens_per_rank=512", "planner.max_sequence_tokens=512",
            "train.adam_eps=1e-6", "train.learning_rate=1e-3", "train.min_learning_rate_ratio=1",
            "batch.global_samples=6",
            "cluster.cpus_per_worker=1.3", "cluster.start_timeout_s=60", "seed=5"]
HEAD_CPUS, NODE_CPUS = 1, 3
"""No worker fits on the head, two fit on a node; what is left is for tasks that read data. Ray wants whole numbers."""

KINDS = {"kill": 4, "stop": 2, "node lost": 2, "node added": 2, "driver": 2, "two": 2}
"""How often each happens, beside the others, once all have happened. The last node is not lost: one is added then, and
lost where none is missing.
"""

ALARMS = ("broken", "worker_lost", "newcomer_lost")
"""Events that an undisturbed run has none of. `slow` is not among them: ranks that share cores are slow at times."""

COMPARED, WINDOW, STALL_S = 50, 20, 240.0


@dataclass
class Fault:
    """Something done to the run, after it had committed `step` steps."""

    number: int
    step: int
    kind: str
    target: str
    moment: float
    seen_s: float | None = None
    over_s: float | None = None

    def __str__(self) -> str:
        seen, over = (f"{seconds:6.1f}" if seconds is not None else "     -" for seconds in (self.seen_s, self.over_s))
        deed = f"{self.number:3d}  step {self.step:4d}  {self.kind:<11}"
        return f"{deed} seen after {seen} s, over after {over} s  {self.target}"


@dataclass
class Soak:
    run: Run
    nodes: Nodes
    random: random.Random
    num_nodes: int
    faults: list[Fault] = field(default_factory=list)

    def inflict(self, kind: str) -> Fault:
        """Do it, or what can be done in its place."""
        if kind in ("node lost", "node added"):
            least = 2 if kind == "node lost" else self.num_nodes
            kind = "node added" if len(self.nodes.nodes) < least else "node lost"
        pids, step = self.run.pids, self.run.step
        match kind:
            case "kill":
                target, moment = self._kill(self.random.choice(pids))
            case "stop":
                pid = self.random.choice(pids)
                target, moment = f"worker {pid}", time.time()
                with suppress(ProcessLookupError):  # gone with the fault before, which the run has not noticed yet
                    os.kill(pid, signal.SIGSTOP)
            case "driver":
                drivers = children("Driver")
                target, moment = f"driver {drivers}", kill(*drivers)
            case "node lost":
                node = self.random.choice(self.nodes.nodes)
                target, moment = f"node {node.node_id[:8]}", self.nodes.vanish(node)
            case "node added":
                moment = time.time()
                target = f"node {self.nodes.add(NODE_CPUS).node_id[:8]}"
            case "two":
                first = self.random.choice(pids)
                target, moment = self._kill(first)
                other = self.random.choice(["worker", "driver"])
                victims = [pid for pid in pids if pid != first] if other == "worker" else children("Driver")
                if victims:
                    second = self.random.choice(victims)
                    kill(second)
                    target += f" and {other} {second}"
        self.faults.append(Fault(len(self.faults) + 1, step, kind, target, moment))
        return self.faults[-1]

    def _kill(self, pid: int) -> tuple[str, float]:
        return f"worker {pid}", kill(pid)

    def follow(self) -> None:
        """Fill in what the run has told of each fault."""
        for fault in self.faults:
            told = self.run.events_after(fault.moment, "broken", "worker_lost", "generation")
            formed = self.run.events_after(fault.moment, "generation")
            fault.seen_s = seconds_since(told[0], fault.moment) if told else None
            fault.over_s = seconds_since(formed[0], fault.moment) if formed else None


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=60)
    parser.add_argument("--steps", type=int, default=0, help="steps of the run; 0: 320, or with --churn 500")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--sync", choices=("step", "micro_batch"), default="step")
    parser.add_argument("--encoder", choices=("group", "world", "auto"), default="auto")
    parser.add_argument("--nodes", type=int, default=2, help="nodes of two workers each")
    parser.add_argument("--kinds", default=",".join(KINDS), help="faults to draw from")
    parser.add_argument("--samples", type=int, default=6, help="samples of a step")
    parser.add_argument("--churn", action="store_true")
    parser.add_argument("--reference", nargs="*", default=[],
                        help="run folders of undisturbed runs under SETTINGS, no shorter; none is made then")
    parser.add_argument("--folder", default="", help="keep the runs here")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of all runs")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="dhp_ray_soak_") as scratch:
        folder = Path(arguments.folder or scratch)
        folder.mkdir(parents=True, exist_ok=True)
        common = [*data_overrides(os.environ.get("DHP_RAY_TEST_DATA", ""), folder), *SETTINGS,
                  f"batch.global_samples={arguments.samples}", f"planner.encoder={arguments.encoder}",
                  *arguments.overrides]
        with Nodes(HEAD_CPUS) as nodes:
            os.environ["RAY_ADDRESS"] = nodes.address
            return (churn if arguments.churn else soak)(nodes, folder, common, arguments)


def soak(nodes: Nodes, folder: Path, common: list[str], arguments: Any) -> int:
    steps = arguments.steps or 320
    for _ in range(max(arguments.nodes, 3 if steps > COMPARED and not arguments.reference else 0)):
        nodes.add(NODE_CPUS)
    numbers = [] if arguments.reference else [3, 5] if steps > COMPARED else [3]
    calm = [undisturbed(folder / f"calm{number}", number, common, steps) for number in numbers]
    calm += [Path(folder) for folder in arguments.reference]
    while len(nodes.nodes) > arguments.nodes:
        nodes.vanish(nodes.nodes[-1])
    draw = random.Random(arguments.seed)
    names = arguments.kinds.split(",")
    kinds = draw.sample(names, len(names)) + draw.choices(names, [KINDS[name] for name in names], k=arguments.faults)
    # A fault may come while the run still recovers from the one before: some share a step.
    when = sorted(draw.randint(2, max(3, steps - 8)) for _ in range(arguments.faults))
    run = Run(folder / "soak", *common, f"run.steps={steps}", f"cluster.num_workers={2 * arguments.nodes}",
              f"planner.sync={arguments.sync}", "checkpoint.every_steps=10")
    state = Soak(run, nodes, draw, arguments.nodes)
    begun = time.time()
    try:
        for kind, step in zip(kinds, when):
            wait_for(run, lambda step=step: run.step >= step)  # type: ignore[misc]
            time.sleep(draw.uniform(0.0, 1.0))
            state.inflict(kind)
            print(state.faults[-1].kind, state.faults[-1].target, "at step", state.faults[-1].step, flush=True)
        wait_for(run, lambda: run.process.poll() is not None)
    finally:
        run.end()
    state.follow()
    return report(state, calm, steps, time.time() - begun)


def wait_for(run: Run, what: Callable[[], object]) -> None:
    """Return once `what` is true or the run has ended; a run that makes no step for long stands still."""
    last, since = run.step, time.monotonic()
    while not what() and run.process.poll() is None:
        time.sleep(0.02)
        if run.step != last:
            last, since = run.step, time.monotonic()
        if time.monotonic() - since > STALL_S:
            raise SystemExit(f"the run stands still at step {run.step}\n{run.said()}")


def undisturbed(folder: Path, num_workers: int, common: list[str], steps: int) -> Path:
    run = Run(folder, *common, f"run.steps={steps}", f"cluster.num_workers={num_workers}", "checkpoint.every_steps=0")
    wait_for(run, lambda: run.process.poll() is not None)
    assert run.process.returncode == 0, run.said()
    return folder


def report(state: Soak, calm: list[Path], steps: int, seconds: float) -> int:
    """Print what happened and what came of it; the exit status."""
    run, reference = state.run, losses(calm[0])[:steps]
    for fault in state.faults:
        print(fault)
    for kind in dict.fromkeys(fault.kind for fault in state.faults):
        of_kind = [fault for fault in state.faults if fault.kind == kind]
        seen_s, over_s = (
            statistics.median([seconds for seconds in found if seconds is not None] or [float("nan")])
            for found in ([fault.seen_s for fault in of_kind], [fault.over_s for fault in of_kind]))
        print(f"{kind:<11} {len(of_kind):3d} times, median: seen after {seen_s:.1f} s, over after {over_s:.1f} s")
    generations, rollbacks = run.events("generation"), run.events("rollback")
    print(f"{steps} steps in {seconds:.0f} s, {len(generations)} generations, "
          f"{len(rollbacks)} times back to an earlier step")
    exact = run.ledger == ledger(calm[0])[:steps]
    compared = min(COMPARED, steps)
    apart = max((abs(mine - calm) / abs(calm) for mine, calm in zip(run.losses[:compared], reference)),
                default=float("inf"))
    checks = {
        f"ends by itself (exit status {run.process.returncode})": run.process.returncode == 0,
        f"ledger: {len(run.ledger)} lines, those of the undisturbed run": exact and len(run.ledger) == steps,
        f"loss: {apart:.1e} from the undisturbed run's in the first {compared} steps, at most 1e-4": apart <= 1e-4}
    if len(calm) > 1:
        between, mine = distance(reference, losses(calm[1])), distance(reference, run.losses)
        words = (f"means of {WINDOW} steps: {mine:.2e} from the undisturbed run's, "
                 f"at most 3 times {between:.2e} (undisturbed, 3 and 5 workers)")
        checks[words] = mine <= 3 * between
    kinds = [event["kind"] for folder in calm for event in lines(folder, "events.jsonl")]
    alarms = [kind for kind in kinds if kind in ALARMS]
    calm_steps = sum(len(losses(folder)) for folder in calm)
    checks[f"false alarms in {calm_steps} undisturbed steps: {len(alarms)} "
           f"(ranks called slow for a while: {kinds.count('slow')})"] = not alarms
    for words, passed in checks.items():
        print("ok  " if passed else "FAIL", words)
    if not all(checks.values()):
        print(run.said())
        return 1
    return 0


def distance(one: list[float], other: list[float]) -> float:
    """The largest distance between the means of each 20 steps."""
    pairs = list(zip(one, other))
    windows = [pairs[place : place + WINDOW] for place in range(0, len(pairs) - WINDOW + 1, WINDOW)]
    return max(abs(statistics.mean(a for a, _ in window) - statistics.mean(b for _, b in window)) for window in windows)


def churn(nodes: Nodes, folder: Path, common: list[str], arguments: Any) -> int:
    """A change of membership about every 5 steps; what a worker that stays holds open must not grow."""
    steps = arguments.steps or 500
    for _ in range(arguments.nodes):
        nodes.add(NODE_CPUS)
    run = Run(folder / "churn", *common, f"run.steps={steps}", f"cluster.num_workers={2 * arguments.nodes}",
              f"planner.sync={arguments.sync}", "checkpoint.every_steps=50")
    held: list[tuple[int, int, Held]] = []
    try:
        wait_for(run, lambda: run.step >= 5)
        survivor, due = run.pids[0], 5
        while run.process.poll() is None and run.step < steps - 10:
            wait_for(run, lambda due=due: run.step >= due)  # type: ignore[misc]
            changes = run.cluster["generation"] - 1
            if not held or changes > held[-1][1]:
                held.append((run.step, changes, held_by(survivor)))
                print(f"step {run.step} after {changes} changes: {held[-1][2]}", flush=True)
            others = [pid for pid in run.pids if pid != survivor]
            if others:
                kill(others[len(held) % len(others)])
            due = run.step + 5
        wait_for(run, lambda: run.process.poll() is not None)
    finally:
        run.end()
    assert run.process.returncode == 0, run.said()
    early, late = held[len(held) // 8 : len(held) // 4 + 1], held[-len(held) // 8 :]
    changes = run.cluster["generation"] - 1
    print(f"{steps} steps, {changes} changes of membership, one every {steps / max(1, changes):.1f} steps")
    print("| of a survivor | after the first | at the end |\n|---|---|---|")
    grown = False
    slacks = {"file descriptors": 8.0, "threads": 4.0, "memory, MB": 64.0}
    for column, (name, slack) in enumerate(slacks.items()):
        before, after = (statistics.median(row[2][column] for row in rows) for rows in (early, late))
        grown |= after > before + slack
        print(f"| {name} | {before:.0f} | {after:.0f} |")
    print("FAIL it grows" if grown else "ok   it does not grow")
    return int(grown)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
