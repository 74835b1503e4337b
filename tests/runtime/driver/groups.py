"""Groups of workers that have said what they have, without their processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from dhp_ray.config import Config, load
from dhp_ray.planner.cost.origin import CostFile
from dhp_ray.planner.mode import Mode
from dhp_ray.planner.plan.types import Sample
from dhp_ray.runtime.driver.group import WorkerGroup, WorkerHandle
from dhp_ray.runtime.strategy import Choice, PackLimits, Strategy, resolve
from dhp_ray.runtime.worker.run_model import state_size

GIB = 2**30


def config_of(run_dir: str, *more: str) -> Config:
    return load(["data=synthetic", "data.path=none.parquet", f"run.dir={run_dir}", "cluster.num_workers=2",
                 "cluster.device=cpu", "planner.sync=step", *more])


def members(*described: dict[str, Any]) -> list[WorkerHandle]:
    common = {"node_id": "a", "device": "cuda", "host_memory_bytes": 2000 * GIB}
    return [WorkerHandle(slot, None, common | found)  # type: ignore[arg-type]
            for slot, found in enumerate(described)]


class Workers(WorkerGroup):
    """Workers, the limit of images in their run, its first batch, and the costs that they have measured."""

    image_limit = 0
    first_batch: Sequence[Sample] = ()
    measured_cost: CostFile | None = None


def group_of(num_ranks: int, memory_gib: float, config: Config, device: str = "cuda") -> Workers:
    found = {"memory_bytes": int(memory_gib * GIB), "device": device, "device_name": "NVIDIA H100 80GB HBM3",
             "fused": True}
    return Workers(members(*[found | state_size(config)._asdict()] * num_ranks))


def strategy_of(config: Config, group: Workers, auto_tokens: bool = True) -> Strategy:
    return Strategy(config, group.ranks, auto_tokens, group.image_limit, group.first_batch, group.measured_cost)


def limits_of_generation(config: Config, group: Workers, num_ranks: int) -> PackLimits:
    strategy = strategy_of(config, group)
    of_so_many = replace(strategy, ranks=replace(strategy.ranks, nodes=("a",) * num_ranks))
    return strategy.limits(of_so_many.choose().mode, num_ranks)


def limits_as_given(config: Config, group: Workers, mode: Mode) -> PackLimits:
    return strategy_of(config, group, auto_tokens=False).limits(mode)


def resolve_limits(config: Config, stored: Mapping[str, Any], group: Workers, takes_over: bool = False) -> Choice:
    """Resolve a run; its limits are written into `config`."""
    found = resolve(config, group.ranks, stored, group.first_batch, takes_over)
    vars(config.planner).update(vars(found.config.planner))
    group.image_limit = found.image_limit
    return found.choice
