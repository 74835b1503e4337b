"""Groups of workers that have said what they have, without their processes."""

from __future__ import annotations

from typing import Any

from dhp_ray.config import Config, load
from dhp_ray.runtime.driver.group import Member, WorkerGroup
from dhp_ray.runtime.worker.run_model import state_size

GIB = 2**30


def config_of(run_dir: str, *more: str) -> Config:
    return load(["data=synthetic", "data.path=none.parquet", f"run.dir={run_dir}", "cluster.num_workers=2",
                 "cluster.device=cpu", "planner.sync=step", *more])


def members(*described: dict[str, Any]) -> list[Member]:
    return [Member(slot, None, {"node_id": "a", "device": "cuda"} | found)
            for slot, found in enumerate(described)]  # type: ignore[arg-type]


def group_of(num_ranks: int, memory_gib: float, config: Config, device: str = "cuda") -> WorkerGroup:
    found = {"memory_bytes": int(memory_gib * GIB), "device": device, "device_name": "NVIDIA H100 80GB HBM3",
             "host_memory_bytes": 2000 * GIB, "fused": True}
    return WorkerGroup(members(*[found | state_size(config)._asdict()] * num_ranks))
