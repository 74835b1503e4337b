"""What faults and slow ranks cost, simulated: goodput beside checkpoint-restart, stragglers in published situations.

    export DHP_RAY_TEST_DATA=FOLDER
    python benchmarks/goodput.py [goodput] [stragglers]    (none: both)

goodput: an hour on 1,024 H100, a fault every ten minutes, workers and nodes in turn, at five moments; 8,192 samples of
the video-heavy mix a batch, Qwen2.5-VL 7B, planned by dhp. The checkpoint-restart systems have the same plans and each
its best interval between checkpoints.

stragglers: 64 H100, 512 samples a batch, ranks slow from the first step on; steps from the 31st on, when speeds are
known. `allowed`: the sum of all speeds over 64. Rates are how many times as long a rank takes.

All of it is modelled; the times that recovery takes are given, with their sources in the table.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dhp_ray.planner import warm_up
from dhp_ray.simulate.run import RunRecord, SimulatedRun, prepared
from dhp_ray.simulate.settings import Event, FaultKind, FaultSettings, Simulation, Slow, load_simulation

HOUR_S, EVERY_S = 3600.0, 600.0
INTERVALS_S = (45.0, 70.0, 130.0, 290.0)
"""Between two checkpoints, of which a restarting system has the best one: from about as long as one is written, the
shortest that can be kept. None divides the time between two faults, which would then all strike at one moment of it.
"""
WRITE_S = 40.0
"""Until a checkpoint is written, beside steps: bigscience-workshop, train/tr11-176B-ml/chronicles.md, of 176B
parameters."""


class System(NamedTuple):
    """How a system goes on from a fault: seconds from a lost worker, and from a lost node, until it does."""

    name: str
    policy: str
    worker_s: float
    node_s: float
    source: str


SYSTEMS = (
    System("dhp_ray", "elastic", 1.7, 10.1, "benchmarks/README.md, Recovery: 2 to 4 CPU workers"),
    System("dhp_ray, as slow as at scale", "elastic", 20.0, 20.0, "1,024 GPUs: TrainMover, arXiv 2412.12636, abstract"),
    System("restart, Ray Train", "restart", 16.6, 72.9, "benchmarks/README.md, Recovery: 2 to 4 CPU workers"),
    System("restart at scale", "restart", 150.0, 150.0, "4,800 devices: FlashRecovery, arXiv 2509.03047, abstract"),
)

SITUATIONS = {
    "one rank": (2.57,), "one rank, far slower": (12.53,),
    "three nodes, a rank each (32 GPUs there)": (4.79, 2.34, 3.8),
    "three nodes, a rank each (64 GPUs there)": (12.53, 12.53, 2.57),
    "all of a node": (2.57,) * 8,
}
"""Rates of the slow ranks. Those of the third and fourth row, and with them 2.57 and 12.53, are Malleus's own:
PKU-DAIR/Hetu, examples/malleus/test_strategy_model.py (arXiv 2410.13333); the others are ours."""
LEARNT = 30
"""Steps after which speeds are taken to be known."""


def goodput() -> None:
    print("\n## An hour at 1,024 ranks with a fault every ten minutes, modelled\n")
    print("| system | goes on after a lost worker, node [s] | source | checkpoint every [s] | steps | run again | "
          "tokens a second, of those without faults |\n|---|---|---|---|---|---|---|")
    base = load_simulation(["sync=step", "cluster.num_ranks=1024", "global_samples=8192", f"duration_s={HOUR_S}",
                            "planning.encoder=group", "planners=[dhp]"])
    calm = rate_of(run_of(base, FaultSettings(mirror_every_steps="0")))
    for system in SYSTEMS:
        tried = INTERVALS_S if system.policy == "restart" else (1800.0,)
        found = [(rate_of(record), every_s, record) for every_s in tried
                 for record in [run_of(base, faults_of(system, every_s))]]
        rate, every_s, record = max(found, key=lambda one: one[0])
        print(f"| {system.name} | {system.worker_s:g}, {system.node_s:g} | {system.source} | {every_s:g} | "
              f"{len(record.steps)} | {len(record.lost)} | {100 * rate / calm:.1f} % |", flush=True)


def faults_of(system: System, checkpoint_every_s: float) -> FaultSettings:
    """Workers and nodes in turn, of ranks spread over the cluster. A lost worker can join after 20 s, a lost node after
    five minutes (assumed); what restarts has others standing by."""
    events = [Event(time_s=EVERY_S * number, kind="worker" if number % 2 else "node", rank=197 * number)
              for number in range(1, int(HOUR_S / EVERY_S))]
    elastic = system.policy == "elastic"
    return FaultSettings(
        events=events, policy=system.policy, worker=FaultKind(form_s=system.worker_s, return_s=20.0 * elastic),
        node=FaultKind(form_s=system.node_s, return_s=300.0 * elastic), join_s=system.worker_s, stage_s=1.0,
        mirror_every_steps="auto" if elastic else "0", checkpoint_every_s=checkpoint_every_s, write_s=WRITE_S)


def rate_of(record: RunRecord) -> float:
    if record.error:
        raise RuntimeError(f"{record.planner}: {record.error}")
    return sum(step.num_tokens for step in record.steps) / record.time_s


def run_of(settings: Simulation, faults: FaultSettings) -> RunRecord:
    simulation = prepared(replace(settings, faults=faults))
    return SimulatedRun("dhp", simulation.machine, simulation.batches).simulate()


def stragglers(num_batches: int = 60) -> None:
    print("\n## Slow ranks among 64, modelled\n")
    print("| situation | rates | allowed | dhp, of the speed without slow ranks | of what is allowed | static_best | "
          "of what is allowed |\n|---|---|---|---|---|---|---|")
    base = load_simulation([f"num_batches={num_batches}", "sync=step", "planning.encoder=group"])
    calm = {planner: known_rate(base, (), planner) for planner in ("dhp", "static_best")}
    for name, rates in SITUATIONS.items():
        allowed = (64 - len(rates) + sum(1 / rate for rate in rates)) / 64
        cells = []
        for planner in ("dhp", "static_best"):
            kept = known_rate(base, rates, planner) / calm[planner]
            cells += [f"{100 * kept:.1f} %", f"{100 * kept / allowed:.1f} %"]
        shown = ", ".join(f"{rate:g}" for rate in rates) if len(set(rates)) > 1 else f"{len(rates)} x {rates[0]:g}"
        print(f"| {name} | {shown} | {100 * allowed:.1f} % | {' | '.join(cells)} |", flush=True)


def known_rate(settings: Simulation, rates: Sequence[float], planner: str) -> float:
    """Tokens a second of the steps from which on speeds are known. Slow ranks are on nodes of their own, or all of
    them one node's."""
    apart = 1 if len(rates) == 8 else 8
    slow = [Slow(ranks=str(place * apart), speed=1 / rate) for place, rate in enumerate(rates)]
    simulation = prepared(replace(settings, faults=FaultSettings(mirror_every_steps="0", slow=slow)))
    record = SimulatedRun(planner, simulation.machine, simulation.batches).simulate()
    steps = [step for step in record.steps if step.step > LEARNT]
    return sum(step.num_tokens for step in steps) / sum(step.end_s - step.begin_s for step in steps)


TABLES = {"goodput": goodput, "stragglers": stragglers}


def main(words: Sequence[str]) -> int:
    if {"-h", "--help"} & set(words):
        print(__doc__)
        return 0
    unknown = [word for word in words if word not in TABLES]
    if unknown:
        print(f"goodput.py: {unknown[0]}: no such table; allowed: {', '.join(TABLES)}", file=sys.stderr)
        return 2
    warm_up()
    for name in words or TABLES:
        TABLES[name]()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
