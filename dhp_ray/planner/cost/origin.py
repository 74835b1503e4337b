"""The origin of a measured cost: the sections of its file besides the constants, and whether a run has the same origin.

    device: {kind: cuda, name: NVIDIA H100 80GB HBM3, count: 8}           on the CPU also `threads` of a rank
    model: {name: tiny, family: qwen2_5_vl, shape: {...}}                 every number of its `ModelShape`
    settings: {sync: [step], precision: bf16, activation_checkpointing: false, freeze: [], lora: {},
               fused_operators: false}
    versions: {torch: 2.13.0, ...}     measured: {...}     other observations, for people
    errors: {linear_s: 0.03, ...}, and `intervals` in files of earlier versions: for people

A file without these sections has the older form: its origin is unknown, and it is used without a check.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dhp_ray.errors import about
from dhp_ray.planner.cost.model import SYNCS, CostModel, constants_of_file
from dhp_ray.planner.errors import PlanError
from dhp_ray.planner.memory.model import MemoryModel

SETTINGS = ("precision", "activation_checkpointing", "freeze", "lora")
"""Settings of a run, under the user's names (`train.`)."""


@dataclass(frozen=True)
class Origin:
    """The sections `device`, `model` and `settings`."""

    device: Mapping[str, Any]
    model: Mapping[str, Any]
    settings: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        return {name: dict(value) for name, value in asdict(self).items()}


@dataclass(frozen=True)
class CostFile:
    """A cost and its origin (None: the file does not say)."""

    cost: CostModel
    origin: Origin | None

    @classmethod
    def load(cls, path: str | Path) -> CostFile:
        """Read a file. Raises PlanError: one line that names the file and what is wrong in it."""
        return cls.parsed(constants_of_file(path), path)

    @classmethod
    def parsed(cls, tree: Mapping[str, Any], name: str | Path) -> CostFile:
        """The content of a file with this name. Raises PlanError as `load` does."""
        with about(PlanError, name):
            return cls(CostModel.from_json(tree), origin_of(tree))


def origin_of(sections: Mapping[str, Any]) -> Origin | None:
    """The origin in the sections of a file; None if it has none of them. PlanError: some are missing, or no mappings.
    """
    needed = {"device": ("kind", "name"), "model": ("name", "shape"), "settings": ("sync", *SETTINGS)}
    if not any(section in sections for section in needed):
        return None
    for section, names in needed.items():
        found = sections.get(section)
        if not isinstance(found, Mapping):
            raise PlanError(f"{section}: got {found!r}; allowed: a section, as jobs/measure.py writes it")
        for name in names:
            if name not in found:
                raise PlanError(f"{section}.{name}: missing")
    if not isinstance(sections["model"]["shape"], Mapping):
        raise PlanError(f"model.shape: got {sections['model']['shape']!r}; allowed: the numbers of a model's shape")
    sharding = sections["settings"].get("sharding", "whole")  # older files say
    if sharding != "whole":
        raise PlanError(f"settings.sharding: got {sharding!r}, which no longer exists; allowed: whole, or a file "
                        "measured for planner.sync=micro_batch")
    syncs = sections["settings"]["sync"]
    if not isinstance(syncs, list) or not all(sync in SYNCS for sync in syncs):
        raise PlanError(f"settings.sync: got {syncs!r}; allowed: a list of {', '.join(SYNCS)}")
    return Origin(*(dict(sections[name]) for name in needed))


def origin_of_run(
    memory: MemoryModel, model_name: str, lora: Mapping[str, Any], device: Mapping[str, Any], fused: bool = False
) -> Origin:
    """The origin that costs of this run must have. `lora`: the settings of its adapters, empty without them. `fused`:
    norms, rotations and SwiGLU are fused operators.
    """
    settings, shape = memory.settings, asdict(memory.shape)
    family = shape.pop("family")
    numbers = {name: [dict(layer) for layer in value] if isinstance(value, tuple) else value
               for name, value in shape.items()}
    return Origin(device, {"name": model_name, "family": family, "shape": numbers}, {
        "sync": [settings.sync], "precision": settings.precision,
        "activation_checkpointing": settings.recomputes and (not settings.keeps_attention or "selective"),
        "freeze": sorted(settings.frozen), "lora": dict(lora), "fused_operators": fused})


def _same_shape(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    """Whether two shapes have equal numbers. `vision_projector`, which older files lack, and what they have instead or
    besides, follow from the other numbers and are not compared.
    """
    compared = (first.keys() | second.keys()) - {"vision_projector", "vision_one_row", "piece_patches"}
    return all(first.get(name) == second.get(name) for name in compared)


def difference(origin: Origin, run: Origin) -> str:
    """How the origin of a cost differs from a run's, naming both; empty if it does not."""
    of_file, of_run = origin.model["name"], run.model["name"]
    if not _same_shape(origin.model["shape"], run.model["shape"]) or origin.model.get("family") != run.model["family"]:
        other = " of another shape" if of_file == of_run else ""
        return f"measured for model {of_file}, and this run trains {of_run}{other}"
    for key in ("kind", "name", "threads"):
        if origin.device.get(key) != run.device.get(key):
            return f"measured on {device_words(origin.device)}, and this run is on {device_words(run.device)}"
    if not set(run.settings["sync"]) <= set(origin.settings["sync"]):
        return (f"measured for planner.sync={', '.join(origin.settings['sync'])}, and this run has planner.sync="
                f"{', '.join(run.settings['sync'])}")
    for name in SETTINGS:
        if origin.settings[name] != run.settings[name]:
            return (f"measured for train.{name}={_words(origin.settings[name])}, and this run has train.{name}="
                    f"{_words(run.settings[name])}")
    fused = run.settings["fused_operators"]
    if origin.settings.get("fused_operators", fused) != fused:  # older files do not say
        return "measured " + ("without fused operators, and this run has them" if fused
                              else "with fused operators, and this run has none")
    return ""


def device_words(device: Mapping[str, Any]) -> str:
    threads = f" with {device['threads']} threads a rank" if device.get("threads", 1) != 1 else ""
    return f"{device['kind']} {device['name']}{threads}".strip()


def _words(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
