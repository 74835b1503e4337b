"""Low-rank adapters (LoRA, arXiv 2106.09685) on linear layers: y = W x + scale B A x, where only A and B are trained.

    model.language_model.layers.0.self_attn.q_proj.weight         (out, in)   unchanged, not trained
    model.language_model.layers.0.self_attn.q_proj.lora_A.weight  (rank, in)  random at first
    model.language_model.layers.0.self_attn.q_proj.lora_B.weight  (out, rank) zeros at first, so nothing changes

The names, without PEFT's prefix, and the files (`export.py`) are those of PEFT. Each of E experts has an adapter of its
own: those of the last parameter that has any are in the module of experts, those of the one before in its `base_layer`.
Files have (E rank, in) and, with the number of the expert last, (out, rank E):

    model.layers.0.mlp.experts.base_layer.lora_A.weight  (E, rank, in)   of gate_up_proj
    model.layers.0.mlp.experts.lora_B.weight             (E, out, rank)  of down_proj

Dropout on the inputs of adapters does not depend on the plan: sample, position and step decide what is dropped.

    key of a token    32 bits of (seed, step, sample, position in the sample), made on the host with the pack's inputs
    key of a layer    32 bits of its name
    value (t, f)      dropped where half f % 2 of hash(key of t + key of layer, f // 2) is below rate * 2 ** 16

A rank draws no random numbers, so no generators have to stay in step: whichever rank holds a token, and whenever it is
recomputed, the same values are dropped. One hash of 32 bits serves two values, with 16 bits each.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.utils import skip_init

from dhp_ray.model.attention import PackContext
from dhp_ray.model.experts import ADAPTERS, ExpertAdapters
from dhp_ray.model.files import ADAPTER_SETTINGS, ModelError
from dhp_ray.model.weights import StoredForm

ALL_LINEAR = "all-linear"
"""Every linear layer except the head; PEFT uses the same word."""

WEYL = -1640531527  # 2 ** 32 / golden ratio, as int32: its multiples are spread evenly
MIX = ((16, 2146121005), (15, -2073254261))  # shifts and factors of lowbias32 by Wellons: one bit of input changes half


@dataclass(frozen=True)
class LoraSettings:
    """`targets`: names of layers and of experts' parameters, ends of names (`q_proj`, `experts.down_proj`), or
    ALL_LINEAR. `seed` determines the initial values. `dropout`: the share of an adapter's inputs that a training step
    drops.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]
    seed: int = 0
    dropout: float = 0.0

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


class LoraLinear(nn.Linear):
    """A linear layer with an adapter: the parameters of `plain`, under their names, and those of the adapter.

    If `dropout_keys` (L,), the keys of its L tokens, are set, it drops some inputs of the adapter; `key` is the
    layer's.
    """

    def __init__(self, plain: nn.Linear, key: int, settings: LoraSettings) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, rank = plain.in_features, plain.out_features, settings.rank
        self.key, self.scale, self.dropout = key, settings.scale, settings.dropout
        self.dropout_keys: Tensor | None = None
        self.weight, self.bias = plain.weight, plain.bias
        place: dict[str, Any] = {"bias": False, "device": plain.weight.device}
        self.lora_A = skip_init(nn.Linear, self.in_features, rank, **place)
        self.lora_B = skip_init(nn.Linear, rank, self.out_features, **place)

    def forward(self, input: Tensor) -> Tensor:
        if self.dropout_keys is None:
            low = self.lora_A(input) * self.scale
        else:
            product = DroppedProduct.apply(  # type: ignore[no-untyped-call]
                input, self.lora_A.weight, self.dropout_keys, self.key, self.dropout)
            low = product * (self.scale / (1 - self.dropout))
        added: Tensor = self.lora_B(low)
        return F.linear(input, self.weight, self.bias) + added


def target_layers(
    module: nn.Module, targets: Sequence[str], trained: Collection[str]
) -> tuple[dict[str, nn.Linear], dict[str, nn.Parameter]]:
    """The linear layers and the experts' parameters that `targets` select, by name; only those with a parameter in
    `trained`. The name of a parameter alone (`down_proj`) is that of a layer.

    Raises:
        ModelError: a target selects nothing.
    """
    layers = {name: layer for name, layer in module.named_modules()
              if type(layer) is nn.Linear and f"{name}.weight" in trained}
    experts = {name: parameter for name, parameter in module.named_parameters()
               if name in trained and StoredForm(name, 0, tuple(parameter.shape)).is_experts}
    found: set[str] = set()
    for target in targets:
        named = {name for name in (*layers, *experts) if name == target
                 or (name.endswith(f".{target}") and (name in layers or "." in target))}
        if target == ALL_LINEAR:
            named = {*layers}
        if not named:
            ends = sorted({_end(name, 1) for name in layers} | {_end(name, 2) for name in experts})
            raise ModelError(
                f"train.lora.targets: {target!r} names no linear layer that may be trained; allowed: {ALL_LINEAR}, "
                f"or the end of a name: {', '.join(ends)}"
            )
        found |= named
    return ({name: layer for name, layer in layers.items() if name in found},
            {name: parameter for name, parameter in experts.items() if name in found})


def add_adapters(
    module: nn.Module, layers: Mapping[str, nn.Linear], experts: Mapping[str, nn.Parameter], settings: LoraSettings
) -> None:
    """Add adapters to these layers and experts of `module`, and train nothing else. They have their initial values
    unless the module is on the meta device.
    """
    module.requires_grad_(False)
    for name, layer in layers.items():
        module.set_submodule(name, LoraLinear(layer, layer_key(name), settings))
    inner: dict[str, list[str]] = {}
    for name in experts:
        owner, _, own = name.rpartition(".")
        inner.setdefault(owner, []).append(own)
    for owner, names in inner.items():
        place, matrices = module.get_submodule(owner), dict[str, tuple[nn.Module, nn.Module]]()
        setattr(place, ADAPTERS, ExpertAdapters(matrices, settings.scale))
        for own in reversed(names):
            if matrices:
                place.base_layer = nn.Module()
                place = place.base_layer
            weight = experts[f"{owner}.{own}"]
            count, rows, columns = weight.shape
            for part, shape in (("lora_A", (settings.rank, columns)), ("lora_B", (rows, settings.rank))):
                place.add_module(part, nn.Module())
                place.get_submodule(part).weight = nn.Parameter(weight.new_empty(count, *shape))
            matrices[own] = place.get_submodule("lora_A"), place.get_submodule("lora_B")
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and not parameter.is_meta:
            with torch.no_grad():
                parameter.copy_(first_values(name, parameter.shape, settings.seed))


def drop_by_pack(decoder_layer: nn.Module) -> None:
    """Let the adapters inside a layer use the dropout keys of the pack in its `context`. A layer that the backward pass
    recomputes takes those of the last forward pass, so a pack's backward pass ends before the next forward pass.
    """
    adapted = [layer for layer in decoder_layer.modules() if isinstance(layer, LoraLinear)]

    def take_keys(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        context: PackContext = named["context"]
        for layer in adapted:
            layer.dropout_keys = context.dropout_keys

    decoder_layer.register_forward_pre_hook(take_keys, with_kwargs=True)


def first_values(name: str, shape: Sequence[int], seed: int) -> Tensor:
    """Initial values (fp32) of the adapter parameter `name`, the same on every rank and distributed as in PEFT: zeros
    for B, uniform in +-1 / sqrt(in) for A.
    """
    if name.endswith("lora_B.weight"):
        return torch.zeros(*shape)
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
    bound = 1 / math.sqrt(shape[-1])
    return torch.empty(*shape).uniform_(-bound, bound, generator=generator)


def write_settings(folder: Path, module: nn.Module, settings: LoraSettings, base: str) -> None:
    """Write adapter_config.json in PEFT's format, with the class by which PEFT loads the base. `base`: the folder of
    the base model, or empty.
    """
    base = str(Path(base).absolute()) if base else ""
    layers = [name for name, layer in module.named_modules() if isinstance(layer, LoraLinear)]
    experts = [f"{name}.{own}" for name, owner in module.named_modules() if hasattr(owner, ADAPTERS)
               for own in getattr(owner, ADAPTERS).matrices]
    kind = type(module)
    tree = {"peft_type": "LORA", "task_type": None, "base_model_name_or_path": base,
            "auto_mapping": {"base_model_class": kind.__name__, "parent_library": kind.__module__},
            "r": settings.rank, "lora_alpha": settings.alpha, "lora_dropout": settings.dropout, "bias": "none",
            "fan_in_fan_out": False, "inference_mode": True, "init_lora_weights": True, "modules_to_save": None,
            "target_modules": _ends(layers, [name for name, _ in module.named_modules()], 1)}
    if experts:
        tree["target_parameters"] = _ends(experts, [name for name, _ in module.named_parameters()], 2)
    (folder / ADAPTER_SETTINGS).write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")


def _end(name: str, count: int) -> str:
    """The last `count` words of a name."""
    return ".".join(name.rsplit(".", count)[-count:])


def _ends(chosen: Sequence[str], names: Sequence[str], count: int) -> list[str]:
    """The ends of the chosen ones where these mean no others of `names`, else every name."""
    ends = {_end(name, count) for name in chosen}
    return sorted(ends) if {name for name in names if _end(name, count) in ends} == {*chosen} else [*chosen]


def stored_form(name: str, shape: tuple[int, ...]) -> StoredForm:
    """How PEFT's files have the parameter `name` of an adapter."""
    if len(shape) == 3 and "lora_A" in name:
        return StoredForm(name, 0, (shape[0] * shape[1], shape[2]))
    return StoredForm(name, 0, shape, experts_last=len(shape) == 3)


def token_keys(seed: int, step: int, sample_id: str, num_tokens: int) -> Tensor:
    """Keys (num_tokens,) int32 of a sample's tokens in a step."""
    of_sample = _digest(f"{seed} {step} {sample_id}", 8)
    x = np.uint64(of_sample) + np.arange(num_tokens, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):  # splitmix64
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return torch.from_numpy((x >> np.uint64(32)).astype(np.uint32).view(np.int32))


def layer_key(name: str) -> int:
    """The int32 key of the layer with this name."""
    return _digest(name, 4) - 2**31


def kept(keys: Tensor, layer: int, width: int, rate: float) -> Tensor:
    """Mask (L, width), bool, of what a layer keeps for tokens with `keys` (L,); it drops the share `rate`."""
    pairs = torch.arange((width + 1) // 2, dtype=torch.int32, device=keys.device) * WEYL
    x = (keys + layer)[:, None] ^ pairs
    for shift, factor in MIX:
        x ^= _shifted(x, shift)
        x *= factor
    x ^= _shifted(x, MIX[0][0])
    return (x.view(torch.int16) >= min(round(rate * 2**16), 2**16 - 1) - 2**15)[:, :width]


class DroppedProduct(torch.autograd.Function):
    """Compute (x * kept) weight^T for x (..., in) and weight (rank, in). Saves only x, as a product without dropout
    does, and recomputes the mask in the backward pass.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, keys: Tensor, layer: int, rate: float) -> Tensor:
        ctx.save_for_backward(x, weight, keys)
        ctx.layer, ctx.rate = layer, rate
        return _dropped(x, keys, layer, rate) @ weight.t()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, keys = ctx.saved_tensors
        of_x = of_weight = None
        if ctx.needs_input_grad[1]:
            of_weight = gradient.flatten(0, -2).t() @ _dropped(x, keys, ctx.layer, ctx.rate).flatten(0, -2)
        if ctx.needs_input_grad[0]:
            of_x = _dropped(gradient @ weight, keys, ctx.layer, ctx.rate)
        return of_x, of_weight, None, None, None


def _dropped(x: Tensor, keys: Tensor, layer: int, rate: float) -> Tensor:
    return x * kept(keys, layer, x.shape[-1], rate).view(x.shape)


def _shifted(x: Tensor, shift: int) -> Tensor:
    """Shift x (int32) right as an unsigned number."""
    return (x >> shift).bitwise_and_((1 << (32 - shift)) - 1)


def _digest(text: str, num_bytes: int) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=num_bytes).digest(), "little")
