"""Run folders as the driver leaves them, written by the code that writes them, without a cluster: real plans, and the
times of ranks made up.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dhp_ray.config import CONF, load
from dhp_ray.planner import ClusterSpec, CostModel, Plan, Sample, plan_batch, plan_starts
from dhp_ray.planner.timeline import apart_timeline
from dhp_ray.runtime.driver.commit import step_metrics
from dhp_ray.runtime.records.run_records import RunRecords
from dhp_ray.storage import Folder
from dhp_ray.train.results import PackTime, StepResult

COST = CostModel.load(CONF / "cost" / "cpu.yaml")


def batch(step: int, num_samples: int = 16, prefix: str = "row") -> list[Sample]:
    """Short texts, some with images, one with a clip of eight frames, and a long one."""
    random_ = random.Random(step)
    samples = []
    for index in range(num_samples):
        kind = index % 4
        grids = {0: (), 1: ((1, 8, 8),), 2: ((1, 8, 8), (1, 4, 8)), 3: ((4, 8, 8),)}[kind]
        tokens = 1500 if index == 5 else random_.randint(20, 300)
        samples.append(Sample(f"{prefix}-{step}-{index}", tokens, sum(t * h * w for t, h, w in grids) // 4, grids))
    return samples


def plan_of(step: int, num_ranks: int = 4, sync: str = "step", encoder: str = "group", **more: Any) -> Plan:
    return plan_batch(batch(step, **more), ClusterSpec(num_ranks, 8, 480), COST, sync=sync, encoder=encoder)


def results_of(plan: Plan, step: int) -> list[StepResult]:
    """As the ranks would report, a tenth slower than planned, with a fifth of each exchange spent waiting."""
    starts, makespan = plan_starts(plan)
    starts, makespan = [start - plan.fixed_s for start in starts], makespan - plan.fixed_s
    apart = apart_timeline(plan)
    results = []
    for rank in range(plan.cluster.num_ranks):
        times = [PackTime(index, 1.1 * start, 1.1 * (start + group.predicted_time_s),
                          0.2 * group.predicted_time_s if group.degree > 1 else 0.0)
                 for index, (group, start) in enumerate(zip(plan.groups, starts)) if rank in group.ranks]
        results.append(StepResult(step, rank, 200.0 / step, 100, 1.0, 1e-3, True, step, 1.1 * makespan + 0.01, 0.0,
                                  tuple(times), {"hits": step}, encoder_times=() if apart is None else (
                                      PackTime(-1, 0.0, 1.1 * apart.ready_s[rank],
                                               1.1 * (apart.ready_s[rank] - apart.encoded_s[rank])),
                                      PackTime(-1, 1.1 * apart.backward_s[rank], 1.1 * apart.end_s[rank], 0.0)),
                                  exchanged_bytes=0 if apart is None else 1000))
    return results


def write_run(folder: Path, num_steps: int = 6, arguments: Sequence[str] = (), **more: Any) -> RunRecords:
    """A run of some steps, with an event and a sample left out. The records are left open."""
    records = RunRecords(Folder(str(folder)))
    records.write_config(load([f"run.dir={folder}", *arguments]))
    records.event("started", generation=1, step=1, num_ranks=4)
    records.cluster(1, [{"rank": rank, "pid": 4711 + rank, "node_id": "a1b2", "device": "cpu"} for rank in range(4)])
    for step in range(1, num_steps + 1):
        plan = plan_of(step, **more)
        results = results_of(plan, step)
        metrics = step_metrics(plan, results, 0.5, 1) | ({"eval_loss": 2.5 / step} if step % 3 == 0 else {})
        records.plan(step, plan.to_json())
        records.commit(step, [sample.id for sample in plan.samples], metrics)
    records.skip("row-x", "image cannot be read", 2)
    return records
