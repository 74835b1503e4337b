"""Inputs and terms of the memory model: the settings of a run, the load of a pack on a rank, bytes by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from dhp_ray.planner.model_shape import ModelShape

COMPUTE_BYTES = {"fp32": 4, "bf16": 2}
BUCKET_BYTES = 64 * 2**20  # gradients (fp32) that one collective of sync=step reduces

Terms = dict[str, float]


@dataclass(frozen=True, kw_only=True)
class MemorySettings:
    """Settings of a run that affect its memory.

    precision: fp32 or bf16. frozen: parts that are not trained. device: whose attention kernel runs (cpu, cuda, npu).
    largest_image: vision tokens of the largest image or piece of a video, which one rank encodes. image_limit: the
    run's limit for one image (default: the pack's tokens). adapters: parameters of the adapters (LoRA) of each part
    that has some, which are then trained instead of the weights. drops: their inputs have dropout.
    """

    sync: str
    world_size: int
    precision: str
    recomputes: bool
    frozen: tuple[str, ...] = ()
    device: str = "cuda"
    mirror_every_steps: str = "0"
    largest_image: int = 4096
    image_limit: int | None = None
    communicators_bytes: int = 0  # of all process groups
    adapters: Mapping[str, int] = field(default_factory=dict)
    drops: bool = False

    def trains(self, part: str) -> bool:
        """Whether anything in a part is trained, weights or adapters."""
        return part in self.adapters if self.adapters else part not in self.frozen

    def trains_weights(self, part: str) -> bool:
        return not self.adapters and part not in self.frozen

    def num_parameters(self, shape: ModelShape) -> int:
        """Number of parameters of the model and its adapters."""
        return shape.num_parameters() + sum(self.adapters.values())

    def num_trained(self, shape: ModelShape) -> int:
        return sum(self.adapters.values()) if self.adapters else shape.num_parameters(without=self.frozen)


class PackLoad(NamedTuple):
    """One rank's part of a pack: its tokens, how many are vision tokens and how many have a label; the patches that it
    encodes; how many sequences attention separates; how many ranks share the pack; and the shares of its layers whose
    activations go to host memory, and that are recomputed (all of them with `MemorySettings.recomputes`).
    """

    tokens: int
    vision_tokens: int = 0
    valid_tokens: int = 0
    patches: int = 0
    sequences: int = 1
    degree: int = 1
    offload: float = 0.0
    recomputed: float = 0.0


@dataclass(frozen=True)
class Memory:
    """Bytes of each term on a device: always held, and added by a pack at its highest `moment`."""

    resident: Terms
    moment: str
    pack: Terms

    @property
    def device_bytes(self) -> float:
        return sum(self.resident.values()) + sum(self.pack.values())
