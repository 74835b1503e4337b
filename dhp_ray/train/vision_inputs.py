"""What a rank needs to encode images apart from the packs: pixels, and which of the feature rows go to which rank.

Both sides know the order of rows from the plan and the token ids alone, so nothing is negotiated:

    encoder     images of the packs in `RankPlan.encoded`, in plan order: their rows are numbered as they come
    to a rank   the rows that its shards of these packs hold, pack by pack, in the shard's order
    from ranks  in ascending order; of each, pack by pack, in the shard's order
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from typing import cast

import numpy as np
import torch
from torch import Tensor

from dhp_ray.model.adapter import EncoderArguments, ModelAdapter
from dhp_ray.model.layout import PackLayout
from dhp_ray.planner.plan import Grid, RankPlan, encoded_images
from dhp_ray.train.collate import joined, mapped
from dhp_ray.train.payload import Payload, check_payload, image_tokens

Pixels = list[np.ndarray | Tensor | None]


@dataclass(kw_only=True)
class EncoderPass:
    """Images that are encoded together: `pixels` (P, patch_dim), what the encoder takes from their grids, and the rows
    of features that they make."""

    pixels: Tensor
    grids: tuple[Grid, ...]
    encoder: EncoderArguments
    num_rows: int

    def map(self, change: Callable[[Tensor], Tensor]) -> EncoderPass:
        return replace(self, pixels=change(self.pixels), encoder=mapped(self.encoder, change))

    def to(self, device: torch.device) -> EncoderPass:
        return self.map(lambda tensor: tensor.to(device, non_blocking=True))


@dataclass(kw_only=True)
class VisionInputs:
    """Of one rank and step. `send_index`: by rank, the rows of this rank's features that go there."""

    passes: list[EncoderPass]
    send_index: dict[int, Tensor]

    def map(self, change: Callable[[Tensor], Tensor]) -> VisionInputs:
        return VisionInputs(passes=[encoded.map(change) for encoded in self.passes],
                            send_index={rank: change(rows) for rank, rows in self.send_index.items()})


def vision_inputs(
    plan: RankPlan, payload_of: Callable[[str], Payload], adapter: ModelAdapter,
    pixel_type: torch.dtype = torch.float32, pinned: bool = False,
) -> VisionInputs:
    """What `plan.rank` encodes of `plan.encoded`, on the CPU.

    `payload_of` is asked for each sample with an image that the rank encodes, by id, in plan order. Pixels of a payload
    become rows of their pass's as soon as the pass is whole, so that of what was decoded one pass is held at a time.

    Raises:
        ValueError: one line that names the sample whose payload is not what was planned.
    """
    passes = PassBuilder(adapter, plan.vision.pass_patches, pixel_type, pinned)
    send: dict[int, list[Tensor]] = {}
    num_rows = 0
    for pack in plan.encoded:
        layout = PackLayout(tuple(sample.num_tokens for sample in pack.samples), len(pack.ranks))
        row_of = torch.full((sum(layout.lengths),), -1)  # of each token of the pack
        start = 0
        for sample, here in zip(pack.samples, encoded_images(pack, plan.rank)):
            payload = payload_of(sample.id) if any(here) else None
            if payload and not payload.masked:
                check_payload(sample, payload, adapter, here)
                places = image_tokens(payload, adapter)
                for image in [image for image, needed in enumerate(here) if needed]:
                    row_of[start + places[image]] = torch.arange(num_rows, num_rows + len(places[image]))
                    num_rows += len(places[image])
                    passes.add(payload.pixels, image, sample.vision_grids[image])
            start += sample.num_tokens
        for member, rank in enumerate(pack.ranks):
            rows = row_of[layout.index(member)]
            send.setdefault(rank, []).append(rows[rows >= 0])
    found = {rank: torch.cat(rows) for rank, rows in sorted(send.items())}
    return VisionInputs(passes=passes.finished(),
                        send_index={rank: rows for rank, rows in found.items() if len(rows)})


class PassBuilder:
    """Cuts images into passes of at most `most` patches, or of one larger image (0: one pass), as they come."""

    def __init__(
        self, adapter: ModelAdapter, most: int, pixel_type: torch.dtype = torch.float32, pinned: bool = False
    ) -> None:
        self._adapter, self._most, self._pixel_type, self._pinned = adapter, most, pixel_type, pinned
        self._passes: list[EncoderPass] = []
        self._images: list[tuple[Pixels, int, Grid]] = []  # of the pass that is not whole yet

    def add(self, pixels: Pixels, image: int, grid: Grid) -> None:
        """Add `pixels[image]`, which becomes rows of its pass's pixels."""
        if self._most and sum(prod(other) for *_, other in self._images) + prod(grid) > self._most:
            self._end_pass()
        self._images.append((pixels, image, grid))

    def finished(self) -> list[EncoderPass]:
        """All passes."""
        self._end_pass()
        return self._passes

    def _end_pass(self) -> None:
        if not self._images:
            return
        patches = [pixels[image] for pixels, image, _ in self._images]
        grids = tuple(grid for *_, grid in self._images)
        whole = joined(cast("list[np.ndarray | Tensor]", patches), self._adapter.patch_dim, self._pixel_type,
                       self._pinned)
        for (pixels, image, _), rows in zip(self._images, whole.split([prod(grid) for grid in grids])):
            pixels[image] = rows
        self._passes.append(EncoderPass(
            pixels=whole, grids=grids, encoder=self._adapter.encoder_arguments(grids),
            num_rows=sum(prod(grid) // self._adapter.merge_area for grid in grids)))
        self._images = []
