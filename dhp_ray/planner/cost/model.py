"""Predicted seconds and bytes of a pack on the ranks that run it.

For a pack of sequences with lengths s (tokens) and images of p patches a frame, on d ranks whose slowest has speed v
(1.0 = nominal):

    attention = quadratic_s * sum (s^2 + s min(s, attention_block))          language = attention + linear_s * sum s
    vision    = vision_quadratic_s * sum p^2 + vision_linear_s * sum p       (frames attend separately)
    time      = max(gather_s, language / (d v) + encode / v + exposed + waits + pack_s)
    encode    = the fullest member's images, plus encoder_pass_s if the pack has any image; before images are dealt
                out: max(vision / d, largest image). Apart from packs encoder_pass_s is paid once a phase
                (`sync=step`) or once a pass (`sync=micro_batch`)

    exposed, communication: all_to_all   bytes / d / bandwidth
    exposed, communication: ring         max(0, (d - 1) bytes / d / bandwidth - overlap (d - 1) / d * attention / (d v))
                                         + (d - 1) latency_s
    and for any d > 1                    + window_s
    bytes = comm_bytes_per_token * sum s                                     0 for d = 1

In a ring, each of the d - 1 steps sends keys and values on while attention runs over those that arrived before, so only
what attention cannot hide is exposed. Layers with a sliding window exchange once, in `window_s`. A kernel takes keys in
blocks of `attention_block` keys and computes a partly masked block as a whole (0: as if it took keys one by one).
`bandwidth` is a table by degree (a degree between two rows takes the row above it; past the last row, the last), or one
for groups inside a node (`intra`) and one for groups that cross nodes (`inter`), each a number or a table.

`fixed_s` is added once per step, or per micro-batch in `sync=micro_batch`; `fixed_s_by_sync` has it by mode if the two
differ. `update_s` is added once more a step in `sync=micro_batch`. `gather_s` is that of `sync=micro_batch`, where the
parameters and gradients of the layers travel during every pack, and 0 in `step`; `gather_s_by_sync` has both.
`latency_s_by_sync` has `latency_s` by mode if a ring's messages wait longer during that traffic. In memory, a pack
takes `memory_bytes_per_token * sum s / d` in addition to the resident state of the mode. `group_s` is the time that the
ranks of a new process group take to make it, before the step's first pack. It is weighed against longer plans that need
fewer new groups, and is not part of a plan's predicted time.

If the ranks of a pack have more tokens each than fit on their devices, t > `free_tokens`, the share s(t) of activations
goes to host memory (`offload`). All activations are `offload_bytes_per_token` and `_per_patch`, copied at
`host_bytes_per_s` one way. Copies run during compute: out during the forward pass, which is the share `forward` of it,
and back during the backward pass, which is the rest. So ranks wait only for what is left of either:

    compute = language / (d v) + encode         moved = s(t) * (bytes of all activations) / d / host_bytes_per_s
    waits   = max(0, moved - forward * compute) + max(0, moved - (1 - forward) * compute)

Or the share s(t) of its layers is recomputed (`recomputation`): their forward passes run again, but for attention and
what it exchanges, whose results are kept (`model/recomputation.py`); the latency of its messages counts again.

    rest  = linear_s * sum s / (d v) + pack_s + (d - 1) latency_s + window_s
    again = s(t) * (forward * rest + vision_forward * encode)                of images only if the encoder is trained

If images are encoded apart from the packs (`timeline.EncoderTimeline`), `vision_forward` is the share of their time
before the packs (1: there is no backward phase), and `feature_bytes` are the bytes of a vision token's features in
transit. In memory, a pack then takes `pack_bytes + language_bytes_per_token * sum s / d`; a pack of the most tokens
that a rank holds with activations in host memory takes `most_pack_bytes`. A patch takes `encoder_bytes_per_patch` from
its forward to its backward pass, in addition to `encoder_bytes` of a pass. With `sync=micro_batch` a pass takes at
least `encoder_gather_s`, because the encoder's parameters are gathered and its gradients reduced.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from dhp_ray.errors import about, yaml_line
from dhp_ray.planner.cost.rates import RATE, Rates, pairs_of, predicted_s
from dhp_ray.planner.errors import PlanError
from dhp_ray.planner.plan.cluster import NO_OFFLOAD, ClusterSpec, LayerShare, Recomputation
from dhp_ray.planner.plan.types import Sample

Bandwidth = dict[int, float]
"""Bytes per second by degree."""


def links_of(value: Any) -> tuple[Bandwidth, Bandwidth]:
    """Bandwidth inside a node and across nodes, from `bandwidth_bytes_per_s`: a number or a table by degree; one for
    all links, or `intra` and `inter`. PlanError: a part is missing or is not a number above 0.
    """
    if isinstance(value, dict) and set(map(str, value)) & {"intra", "inter"}:
        for key in ("intra", "inter"):
            if key not in value:
                raise PlanError(f"bandwidth_bytes_per_s.{key}: missing")
        return (_table("bandwidth_bytes_per_s.intra", value["intra"]),
                _table("bandwidth_bytes_per_s.inter", value["inter"]))
    table = _table("bandwidth_bytes_per_s", value)
    return table, table


def by_degree(table: Bandwidth, max_degree: int) -> np.ndarray:
    """The bandwidth for each degree from 0 to `max_degree`. A degree between two rows takes the row above it; past the
    last row, the last.
    """
    rows = np.array(list(table))
    row = np.minimum(np.searchsorted(rows, np.arange(max_degree + 1)), len(rows) - 1)
    return np.array(list(table.values()))[row]


MOST = 1e30
"""The largest constant: no sum or product of constants and tokens is then infinite."""


def constant(name: str, value: Any) -> float:
    """A number in a cost file. PlanError: it is not from 0 to MOST."""
    if isinstance(value, str):  # YAML 1.1 reads 1e-9 as text
        with contextlib.suppress(ValueError):
            value = float(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= MOST:
        raise PlanError(f"{name}: got {value!r}; allowed: a number of at least 0 and at most {MOST:g}")
    return float(value)


def _table(name: str, value: Any) -> Bandwidth:
    if not isinstance(value, dict):
        value = {2: value}
    if not value:
        raise PlanError(f"{name}: got nothing; allowed: bytes per second by degree")
    table = {}
    for degree, rate in value.items():
        if not (str(degree).isascii() and str(degree).isdigit()) or int(degree) < 2:
            raise PlanError(f"{name}: got degree {degree!r}; allowed: whole numbers of at least 2")
        table[int(degree)] = constant(f"{name}.{degree}", rate)
        if table[int(degree)] < 1:
            raise PlanError(f"{name}.{degree}: got {rate!r}; allowed: at least 1")
    return dict(sorted(table.items()))


SECTIONS = ("device", "model", "settings", "versions", "measured", "intervals", "errors")
"""Sections of a measured file besides its constants (`origin.py`)."""


def constants_of_file(path: str | Path) -> dict[str, Any]:
    """The content of a YAML file. PlanError: one line that names the file, which is not a mapping or cannot be read."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"{path}: cannot be read: {error.__class__.__name__}") from None
    return constants_of_text(text, path)


def constants_of_text(text: str | bytes, path: str | Path) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(text)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise PlanError(f"{path}: not YAML: {yaml_line(error)}") from None
    if not isinstance(tree, dict):
        raise PlanError(f"{path}: not a mapping from names to values")
    return tree


REQUIRED = ("quadratic_s", "linear_s", "comm_bytes_per_token", "fixed_s", "bandwidth_bytes_per_s")
SYNCS = ("step", "micro_batch")
GONE = ("image_piece_patches", "image_comm_bytes_per_patch", "image_latency_s", "image_part_bytes_per_patch")
"""Constants that older files have, of images that were cut within a step in time."""


@dataclass(frozen=True)
class CostModel:
    """Constants of the formulas above: seconds, bytes, bytes per second. A negative or missing constant is refused."""

    quadratic_s: float
    linear_s: float
    comm_bytes_per_token: float
    fixed_s: float
    bandwidth_bytes_per_s: dict[Any, Any]
    name: str = ""
    communication: str = "all_to_all"
    overlap: float = 1.0
    latency_s: float = 0.0
    window_s: float = 0.0
    pack_s: float = 0.0
    group_s: float = 0.0
    gather_s: float = 0.0
    vision_quadratic_s: float = 0.0
    vision_linear_s: float = 0.0
    encoder_pass_s: float = 0.0
    attention_block: float = 0.0
    update_s: float = 0.0
    vision_forward: float = 1 / 3
    feature_bytes: float = 0.0
    encoder_gather_s: float = 0.0
    memory_bytes_per_token: float = 0.0
    encoder_bytes_per_patch: float = 0.0
    encoder_bytes: float = 0.0
    language_bytes_per_token: float = 0.0
    pack_bytes: float = 0.0
    most_pack_bytes: float = 0.0
    offload_bytes_per_token: float = 0.0
    offload_bytes_per_patch: float = 0.0
    host_bytes_per_s: float = 0.0
    forward: float = 1 / 3
    resident_bytes: float | dict[str, float] = 0.0
    fixed_s_by_sync: dict[str, float] = field(default_factory=dict)
    gather_s_by_sync: dict[str, float] = field(default_factory=dict)
    latency_s_by_sync: dict[str, float] = field(default_factory=dict)
    estimated: bool = False
    source: str = ""
    _cache: dict[tuple[int, LayerShare], Rates] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for item in fields(self):
            if item.type == "float":
                object.__setattr__(self, item.name, constant(item.name, getattr(self, item.name)))
        if self.quadratic_s + self.linear_s == 0:
            raise PlanError("linear_s: got 0 with quadratic_s 0; a token must cost something")
        if self.overlap > 1:
            raise PlanError(f"overlap: got {self.overlap}; allowed: 0 to 1")
        for name in ("vision_forward", "forward"):
            if not 0 < getattr(self, name) <= 1:
                raise PlanError(f"{name}: got {getattr(self, name)}; allowed: above 0, up to 1")
        if self.communication not in ("ring", "all_to_all"):
            raise PlanError(f"communication: got {self.communication!r}; allowed: ring, all_to_all")
        for sync in SYNCS:
            self.resident(sync)
        for name in ("fixed_s_by_sync", "gather_s_by_sync", "latency_s_by_sync"):
            by_sync = getattr(self, name)
            if not isinstance(by_sync, dict) or by_sync.keys() not in (set(), set(SYNCS)):
                raise PlanError(f"{name}: got {by_sync!r}; allowed: none, or {' and '.join(SYNCS)}")
            for sync, value in by_sync.items():
                constant(f"{name}.{sync}", value)
        links_of(self.bandwidth_bytes_per_s)

    @classmethod
    def load(cls, path: str | Path) -> CostModel:
        """The constants of a YAML file. PlanError: one line that names the file and the key."""
        tree = constants_of_file(path)
        with about(PlanError, path):
            return cls.from_json(tree)

    @classmethod
    def from_json(cls, tree: Any) -> CostModel:
        """The constants of a mapping, which may have the sections of a measured file beside them."""
        if not isinstance(tree, dict):
            raise PlanError("no constants; a cost file is a mapping from names to numbers")
        tree = {name: value for name, value in tree.items() if name not in (*GONE, *SECTIONS)}
        known = [item.name for item in fields(cls) if not item.name.startswith("_")]
        for name in REQUIRED:
            if name not in tree:
                raise PlanError(f"{name}: missing")
        for name in tree:
            if name not in known:
                raise PlanError(f"{name}: no such constant; allowed: {', '.join(known)}")
        return cls(**tree)

    def to_json(self) -> dict[str, Any]:
        """The form that `from_json` reads (JSON turns degrees into strings, which it also reads)."""
        values = {item.name: getattr(self, item.name) for item in fields(self) if not item.name.startswith("_")}
        return {name: dict(value) if isinstance(value, dict) else value for name, value in values.items()}

    def in_mode(self, sync: str) -> CostModel:
        """This cost with the `fixed_s`, `gather_s` and `latency_s` of a mode."""
        fixed_s = self.fixed_s_by_sync.get(sync, self.fixed_s)
        gather_s = self.gather_s_by_sync.get(sync, self.gather_s if sync == "micro_batch" else 0.0)
        latency_s = self.latency_s_by_sync.get(sync, self.latency_s)
        if (fixed_s, gather_s, latency_s) == (self.fixed_s, self.gather_s, self.latency_s):
            return self
        return replace(self, fixed_s=fixed_s, gather_s=gather_s, latency_s=latency_s)

    def resident(self, sync: str) -> float:
        """Bytes of parameters, gradients and optimizer state that a rank always holds."""
        value = self.resident_bytes
        if isinstance(value, dict):
            if sync not in value:
                raise PlanError(f"resident_bytes.{sync}: missing")
            value = value[sync]
        return constant("resident_bytes", value)

    def memory_bytes(self, num_tokens: int, degree: int, sync: str) -> float:
        """Bytes that one rank holds while a pack of `num_tokens` runs on `degree` ranks."""
        return self.resident(sync) + self.memory_bytes_per_token * num_tokens / degree

    @property
    def cuts_images(self) -> bool:
        """Whether several ranks may encode an image apart from the packs: where the memory of its parts is known."""
        return self.encoder_bytes_per_patch > 0.0

    @property
    def slowest_bytes_per_s(self) -> float:
        """Bandwidth between two ranks of different nodes."""
        return min(links_of(self.bandwidth_bytes_per_s)[1].values())

    def attention_s(self, num_tokens: Any) -> Any:
        """Seconds of one rank for the attention of sequences of these lengths."""
        return self.quadratic_s * pairs_of(num_tokens, self.attention_block)

    def images_s(self, grids: np.ndarray) -> np.ndarray:
        """Seconds of one rank to encode images of these (time, height, width), one in each row, without
        `encoder_pass_s`.
        """
        patches = grids[:, 1] * grids[:, 2]
        return grids[:, 0] * (self.vision_quadratic_s * patches * patches + self.vision_linear_s * patches)

    def image_s(self, sample: Sample) -> list[float]:
        """Seconds of one rank to encode each image of a sample, in order."""
        return self.images_s(np.array(sample.vision_grids, dtype=np.float64).reshape(-1, 3)).tolist()

    def host_s(self, num_tokens: Any, num_patches: Any = 0.0) -> Any:
        """Seconds that the host link of one rank takes, one way, for all activations of these tokens and patches."""
        if self.host_bytes_per_s == 0.0:
            return 0.0 * num_tokens
        return (self.offload_bytes_per_token * num_tokens
                + self.offload_bytes_per_patch * num_patches) / self.host_bytes_per_s

    def rates(self, max_degree: int, beyond: LayerShare = NO_OFFLOAD) -> Rates:
        """The model by degree: a RATE for each degree from 0 (unused) to `max_degree`; computed once. `beyond`: what
        is moved or recomputed of packs that do not fit otherwise.
        """
        if (max_degree, beyond) not in self._cache:
            degrees = np.maximum(np.arange(max_degree + 1, dtype=np.float64), 1.0)
            steps, rates = degrees - 1, np.recarray(max_degree + 1, dtype=RATE)
            rates.inside_s, rates.across_s = [
                self.comm_bytes_per_token / degrees / by_degree(link, max_degree) * (steps > 0)
                for link in links_of(self.bandwidth_bytes_per_s)
            ]
            rates.overlap, rates.overhead_s = np.zeros_like(degrees), self.latency_s * (steps > 0) + self.pack_s
            rates.encoder_pass_s = np.full_like(degrees, self.encoder_pass_s)
            rates.least_s = np.full(len(degrees), self.gather_s)
            if self.communication == "ring":
                rates.inside_s, rates.across_s = rates.inside_s * steps, rates.across_s * steps
                rates.overlap, rates.overhead_s = (
                    self.overlap * steps / degrees / degrees,
                    self.latency_s * steps + self.pack_s,
                )
            rates.overhead_s += self.window_s * (steps > 0)
            again = isinstance(beyond, Recomputation)
            rates.moved = np.zeros_like(degrees) if again else beyond.slope / degrees
            rates.again = np.full_like(degrees, beyond.slope * self.forward * again)
            has_backward = self.vision_forward < 1.0
            rates.encoded_again = np.full_like(degrees, beyond.slope * self.vision_forward * again * has_backward)
            rates.from_tokens, rates.free_tokens = beyond.from_tokens * degrees, beyond.free_tokens * degrees
            rates.forward = np.full_like(degrees, self.forward)
            self._cache[max_degree, beyond] = rates
        return self._cache[max_degree, beyond]

    def pack_time_s(
        self, lengths: Sequence[int], ranks: Sequence[int], cluster: ClusterSpec, encode_s: float = 0.0,
        num_patches: float = 0.0,
    ) -> float:
        """Seconds of a pack of sequences of these lengths on these ranks.

        `encode_s`: encoding time of the most loaded member at its own speed, including `encoder_pass_s` if it encodes
        any image; all images together have `num_patches`.
        """
        degree = len(ranks)
        speed = min(cluster.speeds[rank] for rank in ranks)
        rate = self.rates(cluster.num_ranks, cluster.layer_share)[degree]
        tokens = float(sum(lengths))
        attention = sum(self.attention_s(length) for length in lengths)
        transfer_s = rate.across_s if cluster.crosses(ranks) else rate.inside_s
        language = attention + self.linear_s * tokens
        return float(
            predicted_s(language, attention, encode_s, self.host_s(tokens, num_patches), tokens, degree, speed,
                        transfer_s, rate)
        )
