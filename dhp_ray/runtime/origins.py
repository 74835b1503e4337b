"""The model, device and settings that a run's costs must be of, as cost files name them. Imports neither torch nor Ray.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dhp_ray.config import Config
from dhp_ray.planner.cost_origin import Origin, origin_of_run
from dhp_ray.planner.memory import MemoryModel


def origin_of(config: Config, memory: MemoryModel, kind: str, device_name: str, num_ranks: int) -> Origin:
    """The origin of costs measured for a run on `num_ranks` devices of this kind and name."""
    device: dict[str, Any] = {"kind": kind, "name": device_name, "count": num_ranks}
    if kind == "cpu":
        device["threads"] = max(1, int(config.cluster.cpus_per_worker))
    return origin_of_run(memory, model_name(config), _adapters(config), device)


def model_name(config: Config) -> str:
    """The preset, or the model's folder."""
    return config.model.preset or Path(config.model.path).resolve().name


def _adapters(config: Config) -> Mapping[str, Any]:
    """The settings of adapters that affect their costs; empty without adapters."""
    lora = config.train.lora
    return {"rank": lora.rank, "targets": list(lora.targets), "dropout": lora.dropout} if lora.rank else {}
