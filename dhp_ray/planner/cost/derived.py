"""Costs of a model on a device, derived from its shape and from published figures of the device: nothing is measured.

Per token of a layer with P parameters (of experts those that it goes to), H heads (K of keys and values) of width d, c
bytes of the computing type:

    products       2 P f operations: forward f = 1, recomputation 1 more, gradients of inputs and of weights 1 each;
                   weights that are not trained have none, their adapters (LoRA) have
    attention      2 H d f per pair of tokens (causal; 4 H d in an encoder), f = 1, again 1, backward 2.5 (five products
                   for two, FlashAttention-2, arXiv 2307.08691, section 3.1)
    other          values kept for the backward pass move through memory 4 times: written, read, read again, gradient;
                   if norms, rotations and SwiGLU are those of transformers, multiplied by the ratio of the bytes that
                   these move to those that fused ones move (`layer_traffic`); experts: the bytes that they move
    states         of a gated delta net: products in fp32, their rate as FP32_SHARE has it, always once more in the
                   backward pass; between ranks, states that are as large for any tokens (`state_exchange_s`)
    exchange       2 K d (c f + 4): keys and values each time that attention runs, their gradients in fp32
    window         of W tokens: 4 H d f W operations a token, as if all saw so many; instead of the exchange what a
                   member's two chunks look back on, as much for any tokens (`window_exchange_s`)

The forward pass is assumed to have the same share of a pack's compute as of its products. All activations of its layers
(`memory/model.py`) may go to host memory and come back.

The fixed part of a step is its reduction, update and gather (`sync=step`). In a micro-batch it is what FSDP cannot
hide: the root's gather and reduction. Those of a head that is not tied count as a layer's, although one layer may be
too short for them. In a collective of all ranks, each node sends and receives once what all of its ranks need, over all
of their links: each ring of NCCL and HCCL leaves a node by a different link (benchmarks/published.py: 13 to 70 B
parameters on 16 to 512 GPUs).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import NamedTuple

from dhp_ray.errors import about
from dhp_ray.planner.cost.model import SYNCS, CostModel, constant, constants_of_file
from dhp_ray.planner.errors import PlanError
from dhp_ray.planner.memory.model import (
    CHUNKS_HELD,
    COMPUTE_BYTES,
    LOGITS_HELD,
    SMALLEST_IMAGE,
    STATE_CHUNK,
    MemoryModel,
    MemorySettings,
    PackLoad,
)
from dhp_ray.planner.memory.model_shape import LayerShape
from dhp_ray.planner.plan.cluster import NO_OFFLOAD, LayerShare


class Traffic(NamedTuple):
    """Bytes of the forward and of the backward pass."""

    forward: float
    backward: float

    def times(self, width: int) -> Traffic:
        return Traffic(self.forward * width, self.backward * width)


RMS_NORM, FUSED_RMS_NORM, LAYER_NORM = Traffic(36, 92), Traffic(4, 6), Traffic(4, 6)
SWIGLU, FUSED_SWIGLU, GELU = Traffic(10, 18), Traffic(6, 10), Traffic(4, 6)
ROTATION, FUSED_ROTATION = Traffic(20, 28), Traffic(4, 4)
ENCODER_ROTATION, FUSED_ENCODER_ROTATION = Traffic(52, 68), Traffic(20, 20)
SUM, SUM_OF_GRADIENTS, BIAS_GRADIENT = Traffic(6, 6), Traffic(0, 6), Traffic(0, 2)


def experts_traffic(layer: LayerShape) -> Traffic:
    """Bytes that one token moves in a layer's experts (`model/experts.py`) and their router, without products.

    For each value, in bf16, forward and backward: 14 and 40 of the experts' width (SiLU, two factors), 8 and 8 of the
    rows that go to them and come back, both once for each expert of the token; 10 and 40 of the router's input. The
    output of a shared expert is gated and added, 10 and 24.
    """
    narrow, wide = layer.experts_per_token * layer.mlp_width, layer.experts_per_token * layer.width
    shared = bool(layer.shared_width)
    return Traffic(14 * narrow + 8 * wide + (10 + 10 * shared) * layer.width,
                   40 * narrow + 8 * wide + (40 + 24 * shared) * layer.width)


def layer_traffic(layer: LayerShape, in_encoder: bool, rotates: bool, fused: bool) -> Traffic:
    """Bytes that one token (or patch) moves in a layer, in what is neither a product nor attention. `rotates`: the
    layer applies rotary embeddings to queries and keys.

    The bytes of their inputs and outputs in bf16, forward and backward, for each value of their width:

        operator               transformers' own    fused
        RMS norm               36, 92               4, 6       own: in fp32, one kernel after another
        layer norm             4, 6                 4, 6       one kernel
        SwiGLU                 10, 18               6, 10
        GELU                   4, 6                 4, 6
        rotation               20, 28               4, 4       of queries and keys
          in an encoder        52, 68               20, 20     in fp32, with conversions
        sum                    6, 6                 6, 6       with the residual, twice in a layer
        sum of gradients       0, 6                 0, 6       where several products share an input, for each more
        gradient of a bias     0, 2                 0, 2       of an encoder's products (a decoder has few)

    The width is that of the hidden states, of the MLP (SwiGLU, GELU), or of queries and keys together (rotations, and
    their norms where a model has them). Example, a layer of a Qwen2.5 3B (2,048 wide, an MLP of 11,008, 2,304 of
    queries and keys), forward with transformers' own operators: 2 x 36 x 2,048 + 10 x 11,008 + 20 x 2,304 + 2 x 6 x
    2,048 = 328,192 bytes a token; a trace counts the same within 3 % (`tests/planner/test_layer_traffic.py`). Fused:
    116,224.

    The fused column counts each input and output once. Learned scales of an encoder's layers (InternVL) are left out:
    they are the same in both columns.
    """
    queries_and_keys = (layer.heads + layer.key_value_heads) * layer.head_width
    rms_norm = FUSED_RMS_NORM if fused else RMS_NORM
    parts = [(LAYER_NORM if layer.layer_norms else rms_norm).times(layer.norms * layer.width),
             SUM.times(2 * layer.width),
             # of queries, keys and values; where they are one product, they are joined
             SUM_OF_GRADIENTS.times(2 * layer.width)]
    if layer.experts:
        parts += [experts_traffic(layer), SUM_OF_GRADIENTS.times(layer.width)]
    if layer.shared_width or (layer.gated and not layer.experts):
        gated_width = layer.shared_width or layer.mlp_width
        parts += [(FUSED_SWIGLU if fused else SWIGLU).times(gated_width), SUM_OF_GRADIENTS.times(layer.width)]
    elif not layer.experts:
        parts.append(GELU.times(layer.mlp_width))
    if in_encoder:
        parts.append(BIAS_GRADIENT.times(queries_and_keys + 3 * layer.width + (1 + layer.gated) * layer.mlp_width))
    if layer.query_key_norms:
        parts.append(rms_norm.times(queries_and_keys))
    if rotates:
        own, in_one = (ENCODER_ROTATION, FUSED_ENCODER_ROTATION) if in_encoder else (ROTATION, FUSED_ROTATION)
        parts.append((in_one if fused else own).times(queries_and_keys))
    return Traffic(sum(part.forward for part in parts), sum(part.backward for part in parts))


LAUNCHES_PER_LAYER, LAUNCHES_OF_EXPERTS, LAUNCHES_OF_SHARED, LAUNCHES_PER_CHUNK = 45, 20, 9, 9
"""Kernels that a layer of transformers launches forward; those that one with experts launches beside them, and those of
a shared expert; and those of a gated delta net for each chunk of a sequence, with its part of a run's. Twice as many
backward. Counted in the trace of a layer.
"""
EXCHANGE_OVERLAP = 0.9
"""Share of attention that hides an exchange: nothing is exchanged during its first and its last piece."""
PASSES_THROUGH_MEMORY = 4
FP32_SHARE = 1 / 16
"""Of the rate of bf16 products, that of fp32 ones (A100: 19.5 of 312 TFLOPS, H100: 67 of 989)."""


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
        """The description in a YAML file. PlanError: one line that names the file and the key."""
        tree = constants_of_file(path)
        names = [item.name for item in fields(cls)]
        if sorted(map(str, tree)) != sorted(names):
            raise PlanError(f"{path}: got {sorted(map(str, tree))}; allowed: {names}")
        matches = tree["matches"]
        if not isinstance(matches, list) or not matches or not all(
            isinstance(part, str | int) and not isinstance(part, bool) and str(part) for part in matches
        ):
            raise PlanError(f"{path}: matches: got {matches!r}; allowed: a list of parts of names")
        with about(PlanError, path):
            numbers = {name: constant(name, tree[name]) for name in names[2:]}
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
    again, turns = int(settings.recomputes), ring_turns(settings)
    attention_again = turns - 2

    def products(part: str, num_parameters: float) -> float:
        """Seconds of a token's products, forward and backward."""
        backward = 1 + settings.trains_weights(part) if trains["vision"] or part == "language" else 0
        return 2 * num_parameters * (1 + again * (backward > 0) + backward) / device.matrix_flops

    def adapters(part: str) -> float:
        """Seconds of a token in the products of a part's adapters, which are trained."""
        return 2 * settings.adapters.get(part, 0) * (3 + again) / device.matrix_flops

    def attention(part: str, layer: LayerShape, operations: int) -> float:
        """Seconds of a pair of positions that see each other."""
        runs_again = attention_again if part == "language" else again
        backward = 2.5 + runs_again if trains["vision"] or part == "language" else 0.0
        return operations * layer.heads * layer.head_width * (1 + backward) / device.attention_flops

    def states(layer: LayerShape) -> float:
        """Seconds of a token in the products of a gated delta net's chunks, and their launches: chunk after chunk."""
        if not layer.state_heads:
            return 0.0
        keys, values, chunk = layer.state_keys, layer.state_values, STATE_CHUNK
        operations = layer.state_heads * (6 * keys * values + chunk * (5 * keys + 3 * values))
        launches = LAUNCHES_PER_CHUNK / chunk * device.launch_s
        return (4 + attention_again) * (operations / (device.matrix_flops * FP32_SHARE) + launches)

    def other(part: str, layer: LayerShape) -> float:
        """Seconds of a token in everything but products."""
        has_backward = trains["vision"] or part == "language"
        passes = PASSES_THROUGH_MEMORY if has_backward else PASSES_THROUGH_MEMORY / 2
        rest = replace(layer, mlp_width=layer.shared_width, experts=0, experts_per_token=0, shared_width=0
                       ) if layer.experts else layer
        moved_bytes = memory.layer_bytes(part, rest) * (passes + 2 * again * has_backward)
        moved_bytes *= 1.0 if fused else own_over_fused(part, rest, has_backward)
        if layer.state_heads:
            moved_bytes += memory.run_bytes(layer) * (passes + 2 * (1 + attention_again) * has_backward)
        if layer.experts:
            experts = experts_traffic(layer)
            moved_bytes += experts.forward * (1 + again * has_backward) + experts.backward * has_backward
        return moved_bytes / device.memory_bytes_per_s

    def own_over_fused(part: str, layer: LayerShape, has_backward: bool) -> float:
        """The bytes that a layer with transformers' own operators moves, divided by those with fused ones."""
        rotates = part == "language" or not shape.vision_projector  # an encoder with a projector learns its positions
        own, fewer = (traffic.forward * (1 + again * has_backward) + traffic.backward * has_backward for traffic in (
            layer_traffic(layer, part == "vision", rotates, kind) for kind in (False, True)))
        return own / fewer

    head = 6 if settings.trains_weights("language") else 4
    vision_rest = products("vision", shape.vision_rest / shape.merge_area)  # nearly all of it is the merger
    windows, sliding = (sum(layer.count * layer.window * attention(part, layer, 4) for layer in layers)
                        for part, layers in (("vision", shape.vision), ("language", shape.language)))
    language_layers = sum(layer.count for layer in shape.language)
    launches = shape.num_layers * LAUNCHES_PER_LAYER + sum(
        layer.count * (LAUNCHES_OF_EXPERTS + LAUNCHES_OF_SHARED * bool(layer.shared_width))
        for layer in shape.language if layer.experts)
    fixed_s = {sync: _fixed_s(memory, device, num_nodes, sync) for sync in SYNCS}
    lockstep = MemoryModel(shape, replace(settings, sync="micro_batch"))
    gathers_s = {"step": 0.0, "micro_batch": gather_s(lockstep, device, num_nodes)}
    cost = CostModel(
        name=f"{shape.family}_{device.name}", communication="ring", overlap=EXCHANGE_OVERLAP, estimated=True,
        source=f"derived from the model's shape and the published figures of {device.name}; not measured",
        quadratic_s=sum(layer.count * attention("language", layer, 2) for layer in shape.language if not layer.window),
        linear_s=(sliding + sum(layer.count * (products("language", layer.parameters_used) + other("language", layer)
                                     + states(layer)) for layer in shape.language)
                  + head * shape.embedding_parameters / device.matrix_flops
                  + adapters("language") + adapters("experts") * shape.experts_per_token / (shape.experts or 1)
                  + expert_exchange_s(memory, device, num_nodes)),
        vision_quadratic_s=sum(layer.count * attention("vision", layer, 4) for layer in shape.vision
                               if not layer.window),
        vision_linear_s=vision_rest + windows + adapters("vision") + sum(
            layer.count * (products("vision", layer.num_parameters) + other("vision", layer))
            for layer in shape.vision),
        vision_forward=vision_forward_share(memory), comm_bytes_per_token=ring_bytes_per_token(memory),
        latency_s=language_layers * (1 + turns) * device.message_s + state_exchange_s(memory, device, num_nodes),
        window_s=window_exchange_s(memory, device, num_nodes),
        pack_s=launches * (3 + again) * device.launch_s, group_s=device.group_s,
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
    key_values = sum(2 * layer.count * layer.key_value_heads * layer.head_width for layer in layers if not layer.window)
    return float(key_values * (COMPUTE_BYTES[settings.precision] * ring_turns(settings) + 4))


def ring_turns(settings: MemorySettings) -> int:
    """How often keys and values go round the ring: forward, forward again if layers recompute attention, backward."""
    return 2 + (settings.recomputes and not settings.keeps_attention)


def forward_pass_share(memory: MemoryModel) -> float:
    """The forward pass's share of a token's time: one of two to four equal passes."""
    return 1 / (2 + memory.settings.trains_weights("language") + memory.settings.recomputes)


def vision_forward_share(memory: MemoryModel) -> float:
    """The forward pass's share of an image's time: one of three or four equal passes; 1 without a backward pass."""
    return 1 / (3 + memory.settings.recomputes) if memory.settings.trains("vision") else 1.0


def gather_s(memory: MemoryModel, device: Device, num_nodes: int) -> float:
    """Seconds to gather the parameters of all units but the root (forward and backward) and to reduce their gradients
    (fp32) over all ranks during the compute of a micro-batch. 0 in `sync=step`: a rank has all parameters. Experts that
    ranks share are gathered and reduced over those that have the same ones.
    """
    ranks, sharing = memory.settings.world_size, memory.settings.expert_parallel
    if memory.settings.sync == "step":
        return 0.0
    experts_bytes = sum(layer.count * layer.units(sharing)[1] for layer in memory.shape.language) * _bytes_gathered(
        memory, "language")
    rest_bytes = gathered_bytes(memory) - sharing * experts_bytes
    return sum((among - 1) / among * num_bytes / collective_bytes_per_s(device, among, num_nodes)
               for among, num_bytes in ((ranks, rest_bytes), (ranks // sharing, experts_bytes)))


def expert_exchange_s(memory: MemoryModel, device: Device, num_nodes: int) -> float:
    """Seconds in which a token goes to the ranks that share its experts and comes back, forward and backward, in all
    layers (`comm/expert_group.py`).
    """
    settings, sharing = memory.settings, memory.settings.expert_parallel
    inside = num_nodes == 1 or settings.world_size // num_nodes % sharing == 0
    received = (sharing - 1) * COMPUTE_BYTES[settings.precision] * memory.shape.width
    layers = sum(layer.count for layer in memory.shape.language if layer.experts)
    # what runs again gathers, and ends before it would scatter
    return layers * (4 + settings.recomputes) * received / (
        device.intra_bytes_per_s if inside else device.inter_bytes_per_s)


def gathered_bytes(memory: MemoryModel, parts: Sequence[str] = ("vision", "language")) -> float:
    """Bytes of the parameters of these parts' units, once for each pass that they have, and of their gradients (fp32).
    Only an encoder that is not trained has no backward pass; that of a head follows its forward pass.
    """
    c = COMPUTE_BYTES[memory.settings.precision]
    return float(sum(unit.num_parameters * unit.count * (_bytes_gathered(memory, unit.part) - c * (unit.name == "head"))
                     for unit in memory.shape.units()[:-1] if unit.part in parts))


def _bytes_gathered(memory: MemoryModel, part: str) -> int:
    """Those of one parameter."""
    settings, c = memory.settings, COMPUTE_BYTES[memory.settings.precision]
    return c * (1 + (part == "language" or settings.trains("vision"))) + 4 * settings.trains_weights(part)


def collective_bytes_per_s(device: Device, num_ranks: int, num_nodes: int) -> float:
    """Bytes a second of each rank in a gather or reduction over all ranks, limited by all links of a node together or
    by the links inside it, whichever are slower.
    """
    if num_nodes == 1:
        return device.intra_bytes_per_s
    return min(device.intra_bytes_per_s, device.inter_bytes_per_s * max(1, num_ranks // num_nodes))


def state_exchange_s(memory: MemoryModel, device: Device, num_nodes: int) -> float:
    """Seconds that a member of a pack waits for the states of each other one, over the slower link."""
    return state_bytes(memory) / (device.inter_bytes_per_s if num_nodes > 1 else device.intra_bytes_per_s)


def state_bytes(memory: MemoryModel) -> float:
    """Bytes that each member of a pack sends each other one in all gated delta nets: two states in each, as each has
    two chunks of the pack, with what multiplies them in the forward pass.
    """
    again = int(memory.settings.recomputes)
    return float(sum(8 * layer.count * layer.state_heads * layer.state_keys * (
        (1 + again) * (layer.state_keys + layer.state_values) + layer.state_values)
        for layer in memory.shape.language))


def window_exchange_s(memory: MemoryModel, device: Device, num_nodes: int) -> float:
    """Seconds in which a member of a pack gets what its two chunks look back on, forward and backward, over the slower
    link.
    """
    runs = 2 + memory.settings.recomputes
    moved = sum(4 * layer.count * layer.window * layer.key_value_heads * layer.head_width for layer in
                memory.shape.language) * COMPUTE_BYTES[memory.settings.precision] * runs
    return moved / (device.inter_bytes_per_s if num_nodes > 1 else device.intra_bytes_per_s)


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


def with_encoder_apart(
    cost: CostModel, memory: MemoryModel, tokens: int, beyond: LayerShare = NO_OFFLOAD
) -> CostModel:
    """The cost with the constants, from a model's memory, for images encoded apart from packs of at most `tokens` a
    rank, or more `beyond` that with layers whose activations are moved or recomputed.

    A pack's bytes are a maximum of straight lines over its tokens, except for logits, which grow up to one chunk, and
    their gradients, up to several. Between such places they are below the line through both ends, so a line that is
    above them at these places is above them everywhere. The bytes of an encoder pass are a maximum of straight lines
    over its patches, with a step for every SMALLEST_IMAGE patches. They are below the steepest of these lines, raised
    until it is above the first step.
    """
    shape, settings = memory.shape, memory.settings
    if not shape.vision:
        return cost
    chunk, most = max(1, LOGITS_HELD // shape.vocabulary_size), max(tokens, beyond.tokens_per_rank)
    share = replace(beyond, share=float(beyond.share_of(tokens)))
    slope = (language_bytes(memory, tokens, share) - language_bytes(memory, 1, share)) / max(1, tokens - 1)
    above = [language_bytes(memory, length, share) - slope * length
             for length in (1, chunk, CHUNKS_HELD * chunk, tokens) if length <= tokens]
    many = SMALLEST_IMAGE << 20  # where the steepest line is above all others
    of_patch = (encoder_bytes(memory, 2 * many) - encoder_bytes(memory, many)) / many
    of_pass = max(encoder_bytes(memory, count) - of_patch * count for count in (1, SMALLEST_IMAGE))
    return replace(
        with_offload_bytes(cost, memory),
        vision_forward=cost.vision_forward if settings.trains("vision") else 1.0,
        feature_bytes=float(COMPUTE_BYTES[settings.precision] * shape.width * shape.feature_levels),
        encoder_gather_s=encoder_gather_s(cost, memory),
        encoder_bytes_per_patch=of_patch, encoder_bytes=max(0.0, of_pass),
        language_bytes_per_token=slope, pack_bytes=max(0.0, *above),
        most_pack_bytes=language_bytes(memory, most, beyond))


def encoder_gather_s(cost: CostModel, memory: MemoryModel) -> float:
    """Seconds to gather the encoder's parameters for a pass, forward and backward, and to reduce its gradients: its
    share of what the cost has for the layers of both parts. 0 if a rank has all parameters.
    """
    if memory.settings.sync != "micro_batch":
        return 0.0
    return cost.in_mode("micro_batch").gather_s * gathered_bytes(memory, ["vision"]) / gathered_bytes(memory)


def encoder_bytes(memory: MemoryModel, patches: int) -> float:
    """Bytes that a rank needs to encode images of `patches` patches apart from packs, forward and backward, with their
    features and the gradients of these. Nothing of the language model is on the device then.
    """
    shape, load = memory.shape, PackLoad(0, patches=patches, sequences=patches // SMALLEST_IMAGE + 1)
    gone = ("gathered: embedding", "gradient of the embedding")
    found = [sum(value for term, value in terms.items() if term not in gone)
             for name, terms in memory.moments(load).items() if name.startswith("vision")]
    width = shape.width * shape.feature_levels
    return max(found) + 2 * COMPUTE_BYTES[memory.settings.precision] * width * patches / shape.merge_area


def language_bytes(memory: MemoryModel, tokens: int, relieved: LayerShare = NO_OFFLOAD) -> float:
    """Bytes that a pack of `tokens` tokens a rank adds if its images are encoded apart from it and `relieved.share` of
    its layers is moved or recomputed.
    """
    load = memory.worst_load(tokens, **relieved.of_load(relieved.share))._replace(patches=0)
    return sum(memory.memory(load).pack.values())
