"""Costs of a model on a device, derived from its shape and from published figures of the device: nothing is measured.

Per token of a layer with P parameters, H heads (K of keys and values) of width d, c bytes of the computing type:

    products       2 P f operations: forward f = 1, recomputation 1 more, gradients of inputs and of weights 1 each;
                   weights that are not trained have none, their adapters (LoRA) have
    attention      2 H d f per pair of tokens (causal; 4 H d in an encoder), f = 1, again 1, backward 2.5 (five products
                   for two, FlashAttention-2, arXiv 2307.08691, section 3.1)
    other          values kept for the backward pass move through memory 4 times: written, read, read again, gradient;
                   if norms, rotations and SwiGLU are those of transformers, multiplied by the ratio of the bytes that
                   these move to those that fused ones move (`layer_traffic.py`)
    exchange       2 K d (c f + 4): keys and values each time that attention runs, their gradients in fp32

The forward pass is assumed to have the same share of a pack's compute as of its products. All activations of its layers
(`activation_memory.py`) may go to host memory and come back.

The fixed part of a step is its reduction, update and gather (`sync=step`). In a micro-batch it is what FSDP cannot
hide: the root's gather and reduction. In a collective of all ranks, each node sends and receives once what all of its
ranks need, over all of their links: each ring of NCCL and HCCL leaves a node by a different link
(benchmarks/published.py: 13 to 70 B parameters on 16 to 512 GPUs).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from dhp_ray.planner.bandwidth import constant
from dhp_ray.planner.cost import SYNCS, CostModel
from dhp_ray.planner.cost_constants import constants_of_file
from dhp_ray.planner.layer_traffic import layer_traffic
from dhp_ray.planner.memory import MemoryModel
from dhp_ray.planner.memory_terms import COMPUTE_BYTES, PackLoad
from dhp_ray.planner.model_shape import LayerShape
from dhp_ray.planner.plan import PlanError

LAUNCHES_PER_LAYER = 45
"""Kernels that a layer of transformers launches forward; twice as many backward. Counted in the trace of a layer."""
EXCHANGE_OVERLAP = 0.9
"""Share of attention that hides an exchange: nothing is exchanged during its first and its last piece."""
PASSES_THROUGH_MEMORY = 4


@dataclass(frozen=True, kw_only=True)
class Device:
    """Published figures of one device: operations a second, and bytes a second in one direction. `host_bytes_per_s`: to
    its node's memory and back, while the node's other devices copy as well.

    `matches`: parts of the names that drivers give it. `matrix_flops` and `attention_flops`: what bf16 products and
    attention reach, not peaks. `message_s`, `launch_s` and `group_s`: seconds of a short message, of a kernel launch,
    and of making a process group of a few devices.
    """

    name: str
    matches: tuple[str, ...]
    matrix_flops: float
    attention_flops: float
    memory_bytes_per_s: float
    intra_bytes_per_s: float
    inter_bytes_per_s: float
    host_bytes_per_s: float
    message_s: float
    launch_s: float
    group_s: float

    @classmethod
    def load(cls, path: str | Path) -> Device:
        """The description in a YAML file.

        Raises:
            PlanError: one line that names the file and the key.
        """
        tree = constants_of_file(path)
        names = [item.name for item in fields(cls)]
        if sorted(map(str, tree)) != sorted(names):
            raise PlanError(f"{path}: got {sorted(map(str, tree))}; allowed: {names}")
        matches = tree["matches"]
        if not isinstance(matches, list) or not matches or not all(
            isinstance(part, str | int) and not isinstance(part, bool) and str(part) for part in matches
        ):
            raise PlanError(f"{path}: matches: got {matches!r}; allowed: a list of parts of names")
        try:
            numbers = {name: constant(name, tree[name]) for name in names[2:]}
        except PlanError as error:
            raise PlanError(f"{path}: {error}") from None
        if not all(numbers.values()):
            raise PlanError(f"{path}: got {numbers}; allowed: numbers above 0")
        return cls(name=str(tree["name"]), matches=tuple(map(str, matches)), **numbers)

    def match_length(self, device_name: str) -> int:
        """Letters of the longest part of `matches` that stands in the name by itself; 0: none. (A100 is not part of
        A1000.)
        """
        return max((len(part) for part in self.matches if re.search(
            (r"(?<![a-z])" if part[0].isalpha() else r"(?<!\d)") + re.escape(part.lower())
            + (r"(?!\d)" if part[-1].isdigit() else ""), device_name.lower())), default=0)


def described(folder: Path, device_name: str) -> Device | None:
    """The description of the device with this driver name: the one with the longest match; None if none matches."""
    devices = [Device.load(path) for path in sorted(folder.glob("*.yaml"))]
    found = max(devices, key=lambda device: device.match_length(device_name), default=None)
    return found if found and found.match_length(device_name) else None


def derived_cost(memory: MemoryModel, device: Device, num_nodes: int, fused: bool = True) -> CostModel:
    """Seconds and bytes of the model and run of `memory`, on ranks of this device in `num_nodes` nodes.

    `fused`: norms, rotations and SwiGLU are fused operators.
    """
    shape, settings = memory.shape, memory.settings
    trains = {part: settings.trains(part) for part in ("vision", "language")}
    again = int(settings.recomputes)

    def products(part: str, num_parameters: float) -> float:
        """Seconds of a token's products, forward and backward."""
        backward = 1 + settings.trains_weights(part) if trains["vision"] or part == "language" else 0
        return 2 * num_parameters * (1 + again * (backward > 0) + backward) / device.matrix_flops

    def adapters(part: str) -> float:
        """Seconds of a token in the products of a part's adapters, which are trained."""
        return 2 * settings.adapters.get(part, 0) * (3 + again) / device.matrix_flops

    def attention(part: str, layer: LayerShape, operations: int) -> float:
        """Seconds of a pair of positions that see each other."""
        backward = 2.5 + again if trains["vision"] or part == "language" else 0.0
        return operations * layer.heads * layer.head_width * (1 + backward) / device.attention_flops

    def other(part: str, layer: LayerShape) -> float:
        """Seconds of a token in everything but products."""
        has_backward = trains["vision"] or part == "language"
        passes = PASSES_THROUGH_MEMORY if has_backward else PASSES_THROUGH_MEMORY / 2
        moved_bytes = memory.layer_bytes(part, layer) * (passes + 2 * again * has_backward)
        return moved_bytes * (1.0 if fused else own_over_fused(part, layer, has_backward)) / device.memory_bytes_per_s

    def own_over_fused(part: str, layer: LayerShape, has_backward: bool) -> float:
        """The bytes that a layer with transformers' own operators moves, divided by those with fused ones."""
        rotates = part == "language" or not shape.vision_projector  # an encoder with a projector learns its positions
        own, fewer = (traffic.forward * (1 + again * has_backward) + traffic.backward * has_backward for traffic in (
            layer_traffic(layer, part == "vision", rotates, kind) for kind in (False, True)))
        return own / fewer

    head = 6 if settings.trains_weights("language") else 4
    vision_rest = products("vision", shape.vision_rest / shape.merge_area)  # nearly all of it is the merger
    windows = sum(layer.count * layer.window * attention("vision", layer, 4) for layer in shape.vision)
    language_layers = sum(layer.count for layer in shape.language)
    fixed_s = {sync: _fixed_s(memory, device, num_nodes, sync) for sync in SYNCS}
    lockstep = MemoryModel(shape, replace(settings, sync="micro_batch"))
    gathers_s = {"step": 0.0, "micro_batch": gather_s(lockstep, device, num_nodes)}
    cost = CostModel(
        name=f"{shape.family}_{device.name}", communication="ring", overlap=EXCHANGE_OVERLAP, estimated=True,
        source=f"derived from the model's shape and the published figures of {device.name}; not measured",
        quadratic_s=sum(layer.count * attention("language", layer, 2) for layer in shape.language),
        linear_s=(sum(layer.count * (products("language", layer.num_parameters) + other("language", layer))
                      for layer in shape.language) + head * shape.embedding_parameters / device.matrix_flops
                  + adapters("language")),
        vision_quadratic_s=sum(layer.count * attention("vision", layer, 4) for layer in shape.vision
                               if not layer.window),
        vision_linear_s=vision_rest + windows + adapters("vision") + sum(
            layer.count * (products("vision", layer.num_parameters) + other("vision", layer))
            for layer in shape.vision),
        vision_forward=vision_forward_share(memory), comm_bytes_per_token=ring_bytes_per_token(memory),
        latency_s=language_layers * (3 + again) * device.message_s,
        pack_s=shape.num_layers * LAUNCHES_PER_LAYER * (3 + again) * device.launch_s, group_s=device.group_s,
        gather_s=gathers_s[settings.sync], gather_s_by_sync=gathers_s,
        fixed_s=fixed_s[settings.sync], fixed_s_by_sync=fixed_s,
        bandwidth_bytes_per_s={"intra": device.intra_bytes_per_s, "inter": device.inter_bytes_per_s},
        host_bytes_per_s=device.host_bytes_per_s, forward=forward_pass_share(memory))
    return with_offload_bytes(cost, memory)


def with_offload_bytes(cost: CostModel, memory: MemoryModel) -> CostModel:
    """The cost with the bytes of all activations of a token, and of a patch, which copies to host memory carry."""
    return replace(cost, offload_bytes_per_token=memory.moved_bytes(PackLoad(1, offload=1.0)),
                   offload_bytes_per_patch=memory.moved_bytes(PackLoad(0, patches=1, offload=1.0)))


def ring_bytes_per_token(memory: MemoryModel) -> float:
    """Bytes of a token's keys, values and gradients in a whole turn of the ring, over all layers."""
    layers, settings = memory.shape.language, memory.settings
    key_values = sum(2 * layer.count * layer.key_value_heads * layer.head_width for layer in layers)
    return float(key_values * (COMPUTE_BYTES[settings.precision] * (2 + settings.recomputes) + 4))


def forward_pass_share(memory: MemoryModel) -> float:
    """The forward pass's share of a token's time: one of two to four equal passes."""
    return 1 / (2 + memory.settings.trains_weights("language") + memory.settings.recomputes)


def vision_forward_share(memory: MemoryModel) -> float:
    """The forward pass's share of an image's time: one of three or four equal passes; 1 without a backward pass."""
    return 1 / (3 + memory.settings.recomputes) if memory.settings.trains("vision") else 1.0


def gather_s(memory: MemoryModel, device: Device, num_nodes: int) -> float:
    """Seconds to gather the layers' parameters (forward and backward) and to reduce their gradients (fp32) over all
    ranks during the compute of a micro-batch. 0 in `sync=step`: a rank has all parameters.
    """
    ranks = memory.settings.world_size
    if memory.settings.sync == "step":
        return 0.0
    return (ranks - 1) / ranks * gathered_bytes(memory) / collective_bytes_per_s(device, ranks, num_nodes)


def gathered_bytes(memory: MemoryModel, parts: Sequence[str] = ("vision", "language")) -> float:
    """Bytes of the parameters of these parts' layers, once for each pass that they have, and of their gradients (fp32).
    Only an encoder that is not trained has no backward pass.
    """
    settings, c = memory.settings, COMPUTE_BYTES[memory.settings.precision]
    return float(sum(
        unit.num_parameters * unit.count * (
            c * (1 + (unit.part == "language" or settings.trains("vision"))) + 4 * settings.trains_weights(unit.part))
        for unit in memory.shape.units()[:-1] if unit.part in parts))


def collective_bytes_per_s(device: Device, num_ranks: int, num_nodes: int) -> float:
    """Bytes a second of each rank in a gather or reduction over all ranks, limited by all links of a node together or
    by the links inside it, whichever are slower.
    """
    if num_nodes == 1:
        return device.intra_bytes_per_s
    return min(device.intra_bytes_per_s, device.inter_bytes_per_s * max(1, num_ranks // num_nodes))


def update_s(memory: MemoryModel, device: Device) -> float:
    """Seconds of AdamW on a rank's shard, once a step: it reads one version of the state, writes one, and reads the
    gradient. With `sync=micro_batch` derived costs do not include it, since it is the same under all plans.
    """
    trained = memory.settings.num_trained(memory.shape) / memory.settings.world_size
    return trained * (4 * 3 * 2 + 4) / device.memory_bytes_per_s


def _fixed_s(memory: MemoryModel, device: Device, num_nodes: int, sync: str) -> float:
    """Seconds once a step, or once a micro-batch."""
    link = collective_bytes_per_s(device, memory.settings.world_size, num_nodes)
    shape, settings, c = memory.shape, memory.settings, COMPUTE_BYTES[memory.settings.precision]
    trained, ranks = settings.num_trained(shape), settings.world_size
    moved = (ranks - 1) / ranks
    if sync == "micro_batch":
        root = shape.units()[-1].num_parameters
        return moved * root * (c + 4 * settings.trains_weights("language")) / link
    return moved * trained * (4 + c) / link + update_s(memory, device)
