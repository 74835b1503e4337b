"""What a run's costs have to be of: its model, device and settings, as cost files name them. Neither torch nor Ray
here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dhp_ray.config import Config
from dhp_ray.planner.cost_origin import Origin, origin_of_run
from dhp_ray.planner.memory import MemoryModel


def origin_of(config: Config, memory: MemoryModel, kind: str, device_name: str, num_ranks: int) -> Origin:
    """The origin of a cost that is measured for a run, on so many devices of this kind and name."""
    device: dict[str, Any] = {"kind": kind, "name": device_name, "count": num_ranks}
    if kind == "cpu":
        device["threads"] = max(1, int(config.cluster.cpus_per_worker))
    return origin_of_run(memory, model_name(config), _adapters(config), device)


def model_name(config: Config) -> str:
    """The preset, or the model's folder."""
    return config.model.preset or Path(config.model.path).resolve().name


def _adapters(config: Config) -> Mapping[str, Any]:
    """What adapters are made from, as far as that decides what they cost; empty without them."""
    lora = config.train.lora
    return {"rank": lora.rank, "targets": list(lora.targets), "dropout": lora.dropout} if lora.rank else {}
