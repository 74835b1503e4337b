"""Points of benchmarks/published.yaml, and what the cost model makes of them.

A step of FSDP is as many micro-batches as the source says, each its pack's time (`planner/cost/model.py`, derived from
the model's shape and the device) or what its layers' parameters take to travel, whichever is more, and what is paid
once; and the update, once a step.

    1 / rate of the products, of attention, of memory      a pack's time is a sum of these, each times what the pack has
                                                           of it, and of what is known: so they are fitted by least
                                                           squares of the relative error, none below 0 (for the fit
                                                           nothing hides an exchange between ranks: torchtitan's
                                                           longest sequences, 0.5 % off)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from dhp_ray.config import CONF
from dhp_ray.planner import ClusterSpec
from dhp_ray.planner.cost.derived import Device, derived_cost, update_s
from dhp_ray.planner.memory.model import MemoryModel, MemorySettings
from dhp_ray.planner.memory.model_shape import LayerShape, ModelShape

FILE = Path(__file__).with_name("published.yaml")
ENDLESS = 1e30
"""A rate at which a term takes no time."""
LEAST_ROWS = 5
"""Of a source that numbers are fitted on."""

Rates = dict[str, float]


@dataclass(frozen=True)
class Point:
    """A row of a source: a model on so many GPUs, its micro-batches, and the figure that is published."""

    model: str
    length: int
    gpus: int
    sequences: int
    micro_batches: int
    recomputes: bool | float
    figure: float
    degree: int = 1
    fp8: bool = False
    in_nodes: bool = False
    node_gpus: int = 8

    @property
    def name(self) -> str:
        extra = f", {self.degree} GPUs a sequence" * (self.degree > 1) + ", fp8" * self.fp8
        again = ", again" if self.recomputes is True else ", half again" if self.recomputes else ""
        return f"{self.model}, {self.length:,} x {self.sequences} on {self.gpus}{again}{extra}"


@dataclass(frozen=True)
class Source:
    name: str
    url: str
    note: str
    device: str
    fits: bool
    points: tuple[Point, ...]


@dataclass
class Published:
    """The data file. `fitted`: the names of a device's numbers that are fitted on the sources that allow it."""

    sources: list[Source]
    models: dict[str, dict[str, Any]]
    devices: dict[str, Device]
    fitted: dict[str, list[str]]
    like: dict[str, str]
    _shapes: dict[tuple[str, int], ModelShape] = field(default_factory=dict)
    _known: dict[tuple[str, Point], list[float]] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path = FILE) -> Published:
        tree = yaml.safe_load(path.read_text())
        devices, fitted, like = {}, {}, {}
        for name, entry in tree["devices"].items():
            known = {key: value for key, value in entry.items() if key not in ("file", "fitted", "like")}
            devices[name] = replace(Device.load(CONF / "device" / f"{entry['file']}.yaml"), **known)
            fitted[name], like[name] = entry["fitted"], entry.get("like", name)
            if len(fitted[name]) > 3:
                raise ValueError(f"{path}: devices.{name}.fitted: got {len(fitted[name])}; allowed: three at most")
        sources = [_source(entry) for entry in tree["sources"]]
        for source in sources:
            if source.fits and len(source.points) < LEAST_ROWS:
                raise ValueError(f"{path}: {source.name}: {len(source.points)} rows; at least {LEAST_ROWS} to fit on")
        return cls(sources, tree["models"], devices, fitted, like)

    def shape(self, model: str, length: int) -> ModelShape:
        if (model, length) not in self._shapes:
            self._shapes[model, length] = shape_of(self.models[model], length)
        return self._shapes[model, length]

    def step_s(self, point: Point, device: Device, rates: Rates, travels: bool = True) -> float:
        """Seconds of a step at these rates. `travels`: a micro-batch takes at least what parameters do to travel."""
        device = replace(device, **{name: rate for name, rate in rates.items() if name != "fp8_flops"})
        if point.fp8 and "fp8_flops" in rates:
            device = replace(device, matrix_flops=rates["fp8_flops"])
        nodes = 1 if point.in_nodes else -(-point.gpus // point.node_gpus)
        ranks = min(point.gpus, point.node_gpus) if point.in_nodes else point.gpus
        found = []
        for again in {bool(point.recomputes), point.recomputes is True}:
            memory = self._memory(point, ranks, again)
            cost = derived_cost(memory, device, nodes)
            cost = cost if travels else replace(cost, gather_s=0.0)
            cluster = ClusterSpec(max(point.gpus, point.degree), point.node_gpus, 10**9)
            pack_s = cost.pack_time_s([point.length] * point.sequences, range(point.degree), cluster)
            found.append(pack_s + cost.fixed_s)
        share = float(point.recomputes)
        micro_batch_s = found[0] if len(found) == 1 else share * max(found) + (1 - share) * min(found)
        return point.micro_batches * micro_batch_s + update_s(self._memory(point, ranks, True), device)

    def figure(self, point: Point, device: Device, rates: Rates) -> float:
        """Tokens a second of a GPU."""
        tokens = point.length * point.sequences * point.micro_batches / point.degree
        return tokens / self.step_s(point, device, rates)

    def fit(self, device: str, points: Sequence[Point]) -> Rates:
        """The device's fitted rates, by the points alone."""
        names = self.fitted[device]
        rows = [self._parts(device, point) for point in points]
        rest, parts = np.array([row[0] for row in rows]), np.array([row[1:] for row in rows])
        seconds = np.array([point.length * point.sequences * point.micro_batches / point.degree / point.figure
                            for point in points])
        weights = least_squares(parts / seconds[:, None], 1 - rest / seconds)
        return {name: 1e12 / weight if weight > 0 else ENDLESS for name, weight in zip(names, weights)}

    def _parts(self, device: str, point: Point) -> list[float]:
        """Seconds of a step of what is not fitted, and of each fitted term at 1e12 a second; nothing travels."""
        if (device, point) not in self._known:
            names = self.fitted[device]
            base = {name: ENDLESS for name in names}
            rest = self.step_s(point, self.devices[device], base, False)
            self._known[device, point] = [rest, *(self.step_s(point, self.devices[device], base | {name: 1e12}, False)
                                                  - rest for name in names)]
        return self._known[device, point]

    def _memory(self, point: Point, ranks: int, recomputes: bool) -> MemoryModel:
        return MemoryModel(self.shape(point.model, point.length), MemorySettings(
            sync="micro_batch", world_size=ranks, precision="bf16", recomputes=recomputes))


def least_squares(parts: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The weights (K,), none below 0, for which `parts @ weights` is nearest to `wanted`: the best of all subsets of
    parts that come out so."""
    best, best_error = np.zeros(parts.shape[1]), float((wanted**2).sum())
    for count in range(1, parts.shape[1] + 1):
        for chosen in combinations(range(parts.shape[1]), count):
            found, *_ = np.linalg.lstsq(parts[:, chosen], wanted, rcond=None)
            error = float(((parts[:, chosen] @ found - wanted) ** 2).sum())
            if (found >= 0).all() and error < best_error:
                best, best_error = np.zeros(parts.shape[1]), error
                best[list(chosen)] = found
    return best


def shape_of(entry: dict[str, Any], length: int) -> ModelShape:
    """A model of text alone. `mpt`: GELU, layer norms, biases, learned positions, one embedding; `llama`: SwiGLU, RMS
    norms, a head of its own."""
    width, heads = entry["width"], entry["heads"]
    mpt = entry["like"] == "mpt"
    head_width, key_values = width // heads, entry.get("key_value_heads", heads)
    mlp = entry.get("mlp_width", 4 * width)
    products = 2 * width * heads * head_width + 2 * width * key_values * head_width + (2 if mpt else 3) * width * mlp
    layer = LayerShape(count=entry["count"], width=width, mlp_width=mlp, heads=heads, key_value_heads=key_values,
                       head_width=head_width, num_parameters=products + 2 * width, gated=not mpt, layer_norms=mpt)
    return ModelShape(family=entry["like"], language=(layer,), vocabulary_size=entry.get("vocabulary_size", 50368),
                      tied=mpt, language_rest=width + mpt * length * width)


def _source(entry: dict[str, Any]) -> Source:
    points = []
    for row in entry["rows"]:
        more = {key: value for key, value in row.items() if key != "row"} if isinstance(row, dict) else {}
        values = row["row"] if isinstance(row, dict) else row
        points.append(Point(*values, node_gpus=entry.get("node_gpus", 8), **more))
    return Source(entry["name"], entry["url"], entry["note"], entry["device"], entry["fits"], tuple(points))
