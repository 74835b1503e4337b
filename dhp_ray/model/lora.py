"""Low-rank adapters (LoRA, arXiv 2106.09685) on linear layers: y = W x + scale B A x, where only A and B are trained.

    model.language_model.layers.0.self_attn.q_proj.weight         (out, in)   unchanged, not trained
    model.language_model.layers.0.self_attn.q_proj.lora_A.weight  (rank, in)  random at first
    model.language_model.layers.0.self_attn.q_proj.lora_B.weight  (out, rank) zeros at first, so nothing changes

The names, without PEFT's prefix, and the files (`export.py`) are those of PEFT.

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
from collections.abc import Callable, Mapping, Sequence
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
from dhp_ray.model.files import ADAPTER_SETTINGS, ModelError

ALL_LINEAR = "all-linear"
"""Every linear layer except the head; PEFT uses the same word."""

WEYL = -1640531527  # 2 ** 32 / golden ratio, as int32: its multiples are spread evenly
MIX = ((16, 2146121005), (15, -2073254261))  # shifts and factors of lowbias32 by Wellons: one bit of input changes half


@dataclass(frozen=True)
class LoraSettings:
    """`targets`: names of layers, ends of names (`q_proj`), or ALL_LINEAR. `seed` determines the initial values.
    `dropout`: the share of an adapter's inputs that a training step drops.
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


def target_layers(module: nn.Module, targets: Sequence[str], without: Callable[[str], bool]) -> dict[str, nn.Linear]:
    """The linear layers that `targets` select, by name. `without` returns True for the name of a layer that never gets
    an adapter.

    Raises:
        ModelError: a target selects no layer.
    """
    layers = {name: layer for name, layer in module.named_modules() if type(layer) is nn.Linear and not without(name)}
    found: dict[str, nn.Linear] = {}
    for target in targets:
        named = {name: layer for name, layer in layers.items()
                 if target == ALL_LINEAR or name == target or name.endswith(f".{target}")}
        if not named:
            ends = sorted({name.rsplit(".", 1)[-1] for name in layers})
            raise ModelError(
                f"train.lora.targets: {target!r} names no linear layer that may be trained; allowed: {ALL_LINEAR}, "
                f"or the end of a name: {', '.join(ends)}"
            )
        found |= named
    return {name: layer for name, layer in layers.items() if name in found}


def add_adapters(module: nn.Module, layers: Mapping[str, nn.Linear], settings: LoraSettings) -> None:
    """Add adapters to these layers of `module`, with initial values unless the layers are on the meta device."""
    for name, layer in layers.items():
        adapted = LoraLinear(layer, layer_key(name), settings)
        for part, linear in (("lora_A", adapted.lora_A), ("lora_B", adapted.lora_B)):
            if not linear.weight.is_meta:
                with torch.no_grad():
                    linear.weight.copy_(first_values(f"{name}.{part}.weight", linear.weight.shape, settings.seed))
        module.set_submodule(name, adapted)


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
    bound = 1 / math.sqrt(shape[1])
    return torch.empty(*shape).uniform_(-bound, bound, generator=generator)


def write_settings(folder: Path, module: nn.Module, settings: LoraSettings, base: str) -> None:
    """Write adapter_config.json in PEFT's format, with the class by which PEFT loads the base. `base`: the folder of
    the base model, or empty.
    """
    base = str(Path(base).absolute()) if base else ""
    layers = [name for name, layer in module.named_modules() if isinstance(layer, LoraLinear)]
    ends = {name.rsplit(".", 1)[-1] for name in layers}
    by_end = {name for name, _ in module.named_modules() if name.rsplit(".", 1)[-1] in ends}
    kind = type(module)
    tree = {"peft_type": "LORA", "task_type": None, "base_model_name_or_path": base,
            "auto_mapping": {"base_model_class": kind.__name__, "parent_library": kind.__module__},
            "r": settings.rank, "lora_alpha": settings.alpha, "lora_dropout": settings.dropout, "bias": "none",
            "fan_in_fan_out": False, "inference_mode": True, "init_lora_weights": True, "modules_to_save": None,
            # the ends of names where these mean the same layers, else every name
            "target_modules": sorted(ends) if by_end == set(layers) else layers}
    (folder / ADAPTER_SETTINGS).write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")


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
