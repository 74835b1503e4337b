"""Small simulations for tests."""

from __future__ import annotations

from functools import cache

from dhp_ray.simulate.run import RunRecord, Simulated, SimulatedRun, prepared
from dhp_ray.simulate.settings import load_simulation

SMALL = ["model=qwen3_vl_2b", "workload=llava_video", "cluster.num_ranks=8", "cluster.ranks_per_node=4",
         "global_samples=24", "num_batches=6", "planners=[dhp_paper]", "planning.encoder=group", "planning.item_s=0",
         "sync=step", "train.activation_checkpointing=packs"]
"""Eight ranks on two nodes, six batches of 24 samples with a video each: steps of some seconds. What is tested is what
happens around the plans, so that the planner is a quick one, no plan is late and no second mode is compared.
"""

QUICK = ["faults.worker.seen_s=1", "faults.worker.form_s=2", "faults.worker.return_s=50", "faults.node.seen_s=2",
         "faults.node.form_s=4", "faults.node.return_s=70", "faults.all.seen_s=3", "faults.all.form_s=6",
         "faults.all.return_s=5", "faults.driver.seen_s=4", "faults.driver.form_s=3", "faults.join_s=0.5",
         "faults.load_s=8"]
"""What recovery takes."""


def small(*overrides: str) -> Simulated:
    return prepared(load_simulation([*SMALL, *overrides]))


@cache
def run_of(*overrides: str, planner: str = "dhp_paper") -> RunRecord:
    """The same run is simulated once; nobody changes its record."""
    return fresh_run_of(*overrides, planner=planner)


def fresh_run_of(*overrides: str, planner: str = "dhp_paper") -> RunRecord:
    simulation = small(*overrides)
    return SimulatedRun(planner, simulation.machine, simulation.batches).simulate()


def within(record: RunRecord, step: int) -> float:
    """A moment in the middle of a step."""
    found = next(one for one in record.steps if one.step == step)
    return 0.5 * (found.begin_s + found.end_s)


def events_of(record: RunRecord, kind: str = "generation") -> list[str]:
    return [event.text for event in record.events if event.kind == kind]
