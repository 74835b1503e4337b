"""The origin that a run's costs must have: its model, device and settings, as cost files name them. Imports neither
torch nor Ray.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dhp_ray.config import Config
from dhp_ray.planner.cost.origin import Origin, origin_of_run
from dhp_ray.planner.memory.model import MemoryModel


def origin_of(
    config: Config, memory: MemoryModel, kind: str, device_name: str, num_ranks: int, fused: bool = False
) -> Origin:
    """Return the origin of a cost that is measured for a run on `num_ranks` devices of this kind and name, with or
    without fused operators.
    """
    device: dict[str, Any] = {"kind": kind, "name": device_name, "count": num_ranks}
    if kind == "cpu":
        device["threads"] = max(1, int(config.cluster.cpus_per_worker))
    return origin_of_run(memory, model_name(config), _adapters(config), device, fused)


def model_name(config: Config) -> str:
    """Return the preset, or the name of the model folder."""
    return config.model.preset or Path(config.model.path).resolve().name


def _adapters(config: Config) -> Mapping[str, Any]:
    """Return the adapter settings that affect the cost; empty without adapters."""
    lora = config.train.lora
    return {"rank": lora.rank, "targets": list(lora.targets), "dropout": lora.dropout} if lora.rank else {}
