"""Predicted seconds and bytes of a pack on the ranks that run it.

For a pack of sequences with lengths s (tokens) and images of p patches a frame, on d ranks whose slowest has speed v (1.0 = nominal):

    attention = quadratic_s * sum s^2                                        language = attention + linear_s * sum s
    vision    = vision_quadratic_s * sum p^2 + vision_linear_s * sum p       (an image's frames attend apart)
    time      = language / (d v) + encode / v + exposed + pack_s
    encode    = the fullest member's images; before they are dealt out: max(vision / d, largest image)

    exposed, communication: all_to_all   bytes / d / bandwidth
    exposed, communication: ring         max(0, (d - 1) bytes / d / bandwidth - overlap (d - 1) / d * attention / (d v)) + (d - 1) latency_s
    bytes = comm_bytes_per_token * sum s                                     0 for d = 1

In a ring, each of d - 1 steps sends a rank's keys and values on while attention runs over those that came before, so only what attention cannot hide is
exposed. `bandwidth` is a table by degree (a degree between two rows takes the row above it; past the last row, the last), or one for groups inside a node
(`intra`) and one for groups that cross nodes (`inter`), each a number or a table. On top come `fixed_s` (once per step, or per micro-batch in
`sync=micro_batch`) and, in memory, `memory_bytes_per_token * sum s / d` beside the resident state of the mode.

Both kinds are one formula over tables by degree (`Tables`), which is all that the schedulers see:
    exposed = max(0, transfer_s[crosses, d] * sum s - hidden[d] * attention / v) + latency_s[d]
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from dhp_ray.planner.plan import ClusterSpec, PlanError, Sample

REQUIRED = ("quadratic_s", "linear_s", "comm_bytes_per_token", "fixed_s", "bandwidth_bytes_per_s")
SYNCS = ("step", "micro_batch")

Bandwidth = dict[int, float]
"""Bytes per second by degree."""


class Tables(NamedTuple):
    """A cost model by degree, for degrees 0 (unused) to the largest. `transfer_s` has a row inside a node (0) and one across nodes (1)."""

    transfer_s: np.ndarray
    hidden: np.ndarray
    latency_s: np.ndarray
    pack_s: float


@dataclass(frozen=True)
class CostModel:
    """Constants of the formulas above: seconds, bytes, bytes per second. A negative or missing one is refused."""

    quadratic_s: float
    linear_s: float
    comm_bytes_per_token: float
    fixed_s: float
    bandwidth_bytes_per_s: dict[Any, Any]
    name: str = ""
    communication: str = "all_to_all"
    overlap: float = 1.0
    latency_s: float = 0.0
    pack_s: float = 0.0
    vision_quadratic_s: float = 0.0
    vision_linear_s: float = 0.0
    memory_bytes_per_token: float = 0.0
    resident_bytes: float | dict[str, float] = 0.0
    estimated: bool = False
    source: str = ""
    _cache: dict[int, Tables] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("quadratic_s", "linear_s", "comm_bytes_per_token", "fixed_s", "overlap", "latency_s", "pack_s", "vision_quadratic_s",
                     "vision_linear_s", "memory_bytes_per_token"):
            object.__setattr__(self, name, _constant(name, getattr(self, name)))
        if self.quadratic_s + self.linear_s == 0:
            raise PlanError("linear_s: got 0 with quadratic_s 0; a token must cost something")
        if self.overlap > 1:
            raise PlanError(f"overlap: got {self.overlap}; allowed: 0 to 1")
        if self.communication not in ("ring", "all_to_all"):
            raise PlanError(f"communication: got {self.communication!r}; allowed: ring, all_to_all")
        for sync in SYNCS:
            self.resident(sync)
        self._links()

    @classmethod
    def load(cls, path: str | Path) -> CostModel:
        """The constants of a YAML file.

        Raises:
            PlanError: one line that names the file and the key.
        """
        try:
            tree = yaml.safe_load(Path(path).read_text())
        except (OSError, UnicodeDecodeError) as error:
            raise PlanError(f"{path}: cannot be read: {error.__class__.__name__}") from None
        except yaml.YAMLError as error:
            raise PlanError(f"{path}: not YAML: {str(error).splitlines()[0]}") from None
        try:
            return cls.from_json(tree)
        except PlanError as error:
            raise PlanError(f"{path}: {error}") from None

    @classmethod
    def from_json(cls, tree: Any) -> CostModel:
        if not isinstance(tree, dict):
            raise PlanError("no constants; a cost file is a mapping from names to numbers")
        known = [item.name for item in fields(cls) if not item.name.startswith("_")]
        for name in REQUIRED:
            if name not in tree:
                raise PlanError(f"{name}: missing")
        for name in tree:
            if name not in known:
                raise PlanError(f"{name}: no such constant; allowed: {', '.join(known)}")
        return cls(**tree)

    def to_json(self) -> dict[str, Any]:
        """What `from_json` reads back (JSON makes strings of the degrees; those are read too)."""
        return {name: value for name, value in asdict(self).items() if not name.startswith("_")}

    def resident(self, sync: str) -> float:
        """Bytes of parameters, gradients and optimizer state that a rank holds throughout."""
        value = self.resident_bytes
        if isinstance(value, dict):
            if sync not in value:
                raise PlanError(f"resident_bytes.{sync}: missing")
            value = value[sync]
        return _constant("resident_bytes", value)

    def memory_bytes(self, num_tokens: int, degree: int, sync: str) -> float:
        """Bytes that one rank holds while a pack of `num_tokens` runs on `degree` ranks."""
        return self.resident(sync) + self.memory_bytes_per_token * num_tokens / degree

    def attention_s(self, num_tokens: Any) -> Any:
        """Seconds of one rank for the attention of sequences of these lengths."""
        return self.quadratic_s * num_tokens * num_tokens

    def image_s(self, sample: Sample) -> list[float]:
        """Seconds of one rank to encode each image of a sample, in order."""
        return [time * (self.vision_quadratic_s * (height * width) ** 2 + self.vision_linear_s * height * width)
                for time, height, width in sample.vision_grids]

    def tables(self, max_degree: int) -> Tables:
        """The model by degree, up to `max_degree`; made once."""
        if max_degree not in self._cache:
            degrees = np.maximum(np.arange(max_degree + 1, dtype=np.float64), 1.0)
            steps = degrees - 1
            bandwidth = np.stack([_by_degree(link, max_degree) for link in self._links()])
            transfer = self.comm_bytes_per_token / degrees / bandwidth
            if self.communication == "ring":
                tables = Tables(transfer * steps, self.overlap * steps / degrees / degrees, steps * self.latency_s, self.pack_s)
            else:
                tables = Tables(np.where(steps > 0, transfer, 0.0), np.zeros(max_degree + 1), np.where(steps > 0, self.latency_s, 0.0), self.pack_s)
            self._cache[max_degree] = tables
        return self._cache[max_degree]

    def pack_time_s(self, lengths: Sequence[int], ranks: Sequence[int], cluster: ClusterSpec, encode_s: float = 0.0) -> float:
        """Seconds of a pack of sequences of these lengths on these very ranks.

        `encode_s` is the time that the fullest member takes to encode its images, at its own speed.
        """
        degree = len(ranks)
        speed = min(cluster.speeds[rank] for rank in ranks)
        crosses = int(len({cluster.node_of(rank) for rank in ranks}) > 1)
        tables = self.tables(cluster.num_ranks)
        tokens = float(sum(lengths))
        attention = self.quadratic_s * sum(length * length for length in lengths)
        compute = (attention + self.linear_s * tokens) / (degree * speed)
        exposed = max(0.0, tables.transfer_s[crosses, degree] * tokens - tables.hidden[degree] * attention / speed)
        return float(compute + encode_s + exposed + tables.latency_s[degree] + self.pack_s)

    def _links(self) -> tuple[Bandwidth, Bandwidth]:
        """Bandwidth inside a node and across nodes."""
        value = self.bandwidth_bytes_per_s
        if isinstance(value, dict) and set(map(str, value)) & {"intra", "inter"}:
            for key in ("intra", "inter"):
                if key not in value:
                    raise PlanError(f"bandwidth_bytes_per_s.{key}: missing")
            return _table("bandwidth_bytes_per_s.intra", value["intra"]), _table("bandwidth_bytes_per_s.inter", value["inter"])
        table = _table("bandwidth_bytes_per_s", value)
        return table, table


def _table(name: str, value: Any) -> Bandwidth:
    if not isinstance(value, dict):
        value = {2: value}
    if not value:
        raise PlanError(f"{name}: got nothing; allowed: bytes per second by degree")
    table = {}
    for degree, rate in value.items():
        if not str(degree).isdigit() or int(degree) < 2:
            raise PlanError(f"{name}: got degree {degree!r}; allowed: whole numbers of at least 2")
        table[int(degree)] = _constant(f"{name}.{degree}", rate)
        if table[int(degree)] == 0:
            raise PlanError(f"{name}.{degree}: got 0; allowed: more than 0")
    return dict(sorted(table.items()))


def _by_degree(table: Bandwidth, max_degree: int) -> np.ndarray:
    rows = np.array(list(table))
    row = np.minimum(np.searchsorted(rows, np.arange(max_degree + 1)), len(rows) - 1)
    return np.array(list(table.values()))[row]


def _constant(name: str, value: Any) -> float:
    if isinstance(value, str):  # YAML 1.1 reads 1e-9 as text
        with contextlib.suppress(ValueError):
            value = float(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
        raise PlanError(f"{name}: got {value!r}; allowed: a number of at least 0")
    return float(value)
