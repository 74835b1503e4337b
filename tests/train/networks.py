"""A small network with every kind of parameter, its data, and what plain torch makes of them on one rank."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dhp_ray.train.engine import Update
from dhp_ray.train.flat_engine import FlatEngine
from dhp_ray.train.state.optimizer import OptimizerSettings
from tests.ranks import run_ranks

NUM_SAMPLES = 7


class Network(nn.Module):
    """Token embedding tied to the head, odd sizes, a scalar, a part that is never used and one that is often not used.
    """

    def __init__(self, tied: bool = True, width: int = 6) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(31, width)
        self.visual = nn.Linear(3, width)
        self.hidden = nn.Linear(width, 2 * width + 1)
        self.norm = nn.LayerNorm(2 * width + 1)
        self.out = nn.Linear(2 * width + 1, width)
        self.scale = nn.Parameter(torch.tensor(1.3))
        self.unused = nn.Linear(4, 3)
        self.head = nn.Linear(width, 31, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, pixels: Tensor | None) -> Tensor:
        x = self.embed(tokens)
        if pixels is not None:
            x = x + self.visual(pixels.to(x.dtype))
        return self.head(self.scale * self.out(torch.tanh(self.norm(self.hidden(x)))))


def loss_sum(network: nn.Module, step: int, sample: int) -> tuple[Tensor, int]:
    """Summed loss and valid tokens of one sample; only sample 3 has pixels."""
    generator = torch.Generator().manual_seed(1000 * step + sample)
    tokens = torch.randint(0, 31, (4 + sample,), generator=generator)
    pixels = torch.randn(4 + sample, 3, generator=generator) if sample == 3 else None
    logits = network(tokens[:-1], pixels[:-1] if pixels is not None else None)
    return nn.functional.cross_entropy(logits.float(), tokens[1:], reduction="sum"), len(tokens) - 1


def decays(name: str) -> bool:
    return name.endswith("weight") and "norm" not in name


def learning_rate_of(name: str) -> float:
    return 3e-3 if name.startswith("visual") else 1e-2


def settings(clip_norm: float = 0.0, eps: float = 1e-6) -> OptimizerSettings:
    return OptimizerSettings(learning_rate_of, decays, weight_decay=0.1, betas=(0.9, 0.95), eps=eps,
                             clip_norm=clip_norm)


def make_engine(
    network: nn.Module, rank: int, world_size: int, bucket_bytes: int = 400, precision: str = "fp32", **options: float
) -> FlatEngine:
    group = dist.group.WORLD if world_size > 1 else None
    return FlatEngine(network, settings(**options), group, world_size, rank, precision, bucket_bytes)


def train_step(
    engine: FlatEngine, network: nn.Module, step: int, rank: int, world_size: int, factor: float = 1.0
) -> Update:
    """Each sample is a backward pass of its own; some ranks have none at all."""
    engine.zero_gradients()
    for sample in range(rank, NUM_SAMPLES, world_size):
        loss_sum(network, step, sample)[0].backward()
    return engine.update(sum(3 + sample for sample in range(NUM_SAMPLES)), factor)


def whole(engine: FlatEngine, kind: str) -> dict[str, Tensor]:
    """Value or moment by parameter name, flattened, put together from all ranks' pieces."""
    found = {name: torch.zeros(math.prod(shape)) for name, shape in engine.shapes.items()}
    for piece in engine.pieces:
        found[piece.name][piece.start : piece.stop] = engine.current.tensors()[kind][piece.shard]
    for tensor in found.values():
        if engine.world_size > 1:
            dist.all_reduce(tensor)
    return found


def plain_training(
    network: nn.Module, steps: int, clip_norm: float = 0.0
) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]], list[float]]:
    """Parameters, torch.optim.AdamW's state by name, and the gradient norm of every step."""
    named = {name: parameter for name, parameter in network.named_parameters() if parameter.requires_grad}
    groups = [{"params": [parameter], "lr": learning_rate_of(name), "weight_decay": 0.1 if decays(name) else 0.0}
              for name, parameter in named.items()]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-6)
    norms = []
    for step in range(steps):
        for parameter in named.values():
            parameter.grad = torch.zeros_like(parameter)
        num_valid_tokens = 0
        for sample in range(NUM_SAMPLES):
            loss, count = loss_sum(network, step, sample)
            loss.backward()
            num_valid_tokens += count
        for parameter in named.values():
            parameter.grad /= num_valid_tokens
        norms.append(float(torch.nn.utils.clip_grad_norm_(named.values(), clip_norm or float("inf"))))
        optimizer.step()
    states = {name: optimizer.state[parameter] for name, parameter in named.items()}
    return {name: parameter.detach() for name, parameter in network.named_parameters()}, states, norms


def error(found: Tensor, expected: Tensor) -> float:
    """Largest difference, relative to the largest value."""
    if not expected.numel():
        return 0.0
    return float((found.float() - expected.float()).abs().max() / expected.float().abs().max().clamp_min(1e-12))


def run_tensors(function: Callable[..., Any], num_ranks: int, *arguments: Any) -> list[Any]:
    """As run_ranks, for functions that return tensors: those are shared through files of a process that may be gone by
    then.
    """
    return [torch.load(io.BytesIO(saved), weights_only=False)
            for saved in run_ranks(_saved, num_ranks, function, *arguments)]


def _saved(rank: int, function: Callable[..., Any], *arguments: Any) -> bytes:
    saved = io.BytesIO()
    torch.save(function(rank, *arguments), saved)
    return saved.getvalue()
