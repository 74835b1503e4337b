"""What memory is reckoned from, and its terms: the settings of a run, what a pack asks of a rank, bytes by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from dhp_ray.planner.model_shape import ModelShape

COMPUTE_BYTES = {"fp32": 4, "bf16": 2}

Terms = dict[str, float]


@dataclass(frozen=True, kw_only=True)
class MemorySettings:
    """What of a run decides about its memory. `precision`: fp32 or bf16; `frozen`: parts that are not trained.

    `device`: whose attention kernel runs (cpu, cuda, npu). `largest_image`: vision tokens of the largest image or piece
    of a video, which one rank encodes; `image_limit`: what the run allows one (default: the pack's tokens). `sharding`:
    of `sync=step`, whole or node, and `node_ranks` the ranks of the node that has fewest. `adapters`: parameters of the
    adapters of each part that has some (LoRA), which are then trained in place of the weights; `drops`: their inputs
    are dropped in part.
    """

    sync: str
    world_size: int
    precision: str
    recomputes: bool
    frozen: tuple[str, ...] = ()
    device: str = "cuda"
    bucket_bytes: int = 64 * 2**20
    mirror_every_steps: str = "0"
    largest_image: int = 4096
    image_limit: int | None = None
    communicators_bytes: int = 0  # of all process groups
    sharding: str = "whole"
    node_ranks: int = 1
    adapters: Mapping[str, int] = field(default_factory=dict)
    drops: bool = False

    def trains(self, part: str) -> bool:
        """Whether anything in a part is trained, its weights or adapters."""
        return part in self.adapters if self.adapters else part not in self.frozen

    def trains_weights(self, part: str) -> bool:
        return not self.adapters and part not in self.frozen

    def num_parameters(self, shape: ModelShape) -> int:
        """Those of the model and of its adapters."""
        return shape.num_parameters() + sum(self.adapters.values())

    def num_trained(self, shape: ModelShape) -> int:
        return sum(self.adapters.values()) if self.adapters else shape.num_parameters(without=self.frozen)


class PackLoad(NamedTuple):
    """One rank's part of a pack: its tokens, those of them that are vision tokens and those with a label; the patches
    that it encodes, how many sequences attention sees apart, how many ranks share the pack, and an image, and the share
    of its layers whose activations go to host memory."""

    tokens: int
    vision_tokens: int = 0
    valid_tokens: int = 0
    patches: int = 0
    sequences: int = 1
    degree: int = 1
    image_degree: int = 1
    offload: float = 0.0


@dataclass(frozen=True)
class Memory:
    """Bytes of each term on a device: held throughout, and added by a pack at its highest `moment`."""

    resident: Terms
    moment: str
    pack: Terms

    @property
    def device_bytes(self) -> float:
        return sum(self.resident.values()) + sum(self.pack.values())
