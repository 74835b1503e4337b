"""What ranks keep in their node's memory, and what packs move there (`train.activation_offload`) or recompute
(`train.activation_checkpointing`) so that they fit on their devices.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from dhp_ray.config import Config
from dhp_ray.planner.memory.host import node_terms
from dhp_ray.planner.memory.layer_share import largest_offload, largest_recomputation
from dhp_ray.planner.memory.model import MemoryModel
from dhp_ray.planner.mode import MEMORY_SHARE
from dhp_ray.planner.plan.cluster import NO_OFFLOAD, NO_RECOMPUTATION, LayerShare, Offload, Recomputation
from dhp_ray.runtime.driver.group import WorkerGroup

OFFLOAD = "train.activation_offload"


class Limits(NamedTuple):
    """The tokens of a pack that a rank holds, and what packs with more of them move to host memory or recompute."""

    tokens: int
    offload: Offload
    recomputation: Recomputation = NO_RECOMPUTATION

    @property
    def most_tokens(self) -> int:
        """The tokens of the largest pack that a rank holds."""
        return max(self.tokens, self.beyond.tokens_per_rank)

    @property
    def beyond(self) -> LayerShare:
        """What larger packs move or recompute."""
        return self.offload if self.offload.share else self.recomputation


def share_of_every_pack(config: Config) -> float:
    """The share of activations that each pack moves, whatever its size."""
    setting = config.train.activation_offload
    return 0.0 if setting in ("off", "auto") else float(setting)


def plain_tokens(config: Config, memory: MemoryModel, group: WorkerGroup) -> int:
    """Return the tokens of a pack that each rank's device holds if packs move no more than `share_of_every_pack`; 0:
    not even one.
    """
    return memory.tokens_that_fit(MEMORY_SHARE * group.memory_bytes, share_of_every_pack(config))


def offload_of(config: Config, memory: MemoryModel, group: WorkerGroup, tokens: int, most: int = 2**62) -> Offload:
    """Return what packs move to host memory, on ranks that plan with packs of `tokens`. With auto, that is so much that
    a larger pack fits, of at most `most` tokens, as far as devices and nodes have room. (On the CPU this gains
    nothing.)
    """
    if share := share_of_every_pack(config):
        return Offload(share, 0, tokens)
    if config.train.activation_offload == "off" or memory.settings.device == "cpu":
        return NO_OFFLOAD

    def has_room(held: int, share: float) -> bool:
        return all(sum(node_terms(memory, held, ranks, share).values()) <= node_limit(group, node_id)
                   for node_id, ranks in Counter(group.nodes).items())

    return largest_offload(memory, MEMORY_SHARE * group.memory_bytes, tokens, most, has_room)


def recomputation_of(
    config: Config, memory: MemoryModel, group: WorkerGroup, offload: Offload, tokens: int, most: int = 2**62
) -> Recomputation:
    """Return what packs recompute, on ranks that plan with packs of `tokens`, so that larger ones fit, of at most
    `most` tokens: nothing if all packs are recomputed, or move activations. (On the CPU this is not modelled.)
    """
    allowed = config.train.activation_checkpointing in ("packs", "auto") and not memory.settings.recomputes
    if not allowed or offload.share or memory.settings.device == "cpu":
        return NO_RECOMPUTATION
    return largest_recomputation(memory, MEMORY_SHARE * group.memory_bytes, tokens, most)


def node_limit(group: WorkerGroup, node_id: str) -> float:
    """Return the bytes that the ranks of a node may keep in its memory."""
    return MEMORY_SHARE * min(member.described["host_memory_bytes"] for member in group.members
                              if member.described["node_id"] == node_id)
