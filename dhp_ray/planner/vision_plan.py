"""Where the images of a batch are encoded: the part of a plan that concerns the whole batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class VisionPlan:
    """Where the images of a batch are encoded.

    `layout` group: each image by a rank of the group that runs its sequence, inside the pack. world: by any rank, in a
    phase before the packs; a phase after them runs the encoder's backward pass. `keeps`: activations are kept from the
    first phase to the second; otherwise the second computes them again, in passes of at most `pass_patches` patches or
    of one larger image (0: all images of a rank in one pass).

    With sync=micro_batch every rank runs `num_passes` passes, and `GroupPlan.passes` tells which image is in which.
    With sync=step each rank runs as many as its images fill.
    """

    layout: str = "group"
    keeps: bool = True
    pass_patches: int = 0
    num_passes: int = 0

    @property
    def apart(self) -> bool:
        """Whether images are encoded outside the packs."""
        return self.layout != "group"


IN_PACKS = VisionPlan()


@dataclass(frozen=True, slots=True)
class SplitImage:
    """An image whose parts several ranks encode, apart from the packs (`image_parts`). `image`: its number within its
    pack. `ranks`: the rank of each part, in order. `passes`: the pass of each part, with sync=micro_batch.
    """

    image: int
    ranks: tuple[int, ...]
    passes: tuple[int, ...] = ()


def encoding_ranks(encoders: Sequence[int], splits: Sequence[SplitImage]) -> list[tuple[int, ...]]:
    """For each image of a pack the ranks that encode it: several if it is split."""
    found: list[tuple[int, ...]] = [(rank,) for rank in encoders]
    for split in splits:
        found[split.image] = split.ranks
    return found
