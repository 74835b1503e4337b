"""What a rank needs to encode images apart from the packs: pixels, and which of the feature rows go to which rank.

Both sides know the order of rows from the plan and the token ids alone, so nothing is negotiated:

    encoder     pass by pass; in each, images of the packs in `RankPlan.encoded`, in plan order: their rows are numbered
                as they come
    to a rank   the rows that its shards of these packs hold, pack by pack, in the shard's order
    from ranks  in ascending order; of each, pack by pack, in the shard's order
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import prod
from typing import NamedTuple, cast

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


class PlannedImage(NamedTuple):
    """An image that a rank encodes: image `image` of sample `sample` of pack `pack` of `RankPlan.encoded`, in pass
    `number` of the rank."""

    pack: int
    sample: int
    image: int
    grid: Grid
    number: int


class ReadyImage(NamedTuple):
    """`pixels[image]` becomes rows of its pass's pixels. `places`: of its tokens in its pack."""

    pixels: Pixels
    image: int
    grid: Grid
    pack: int
    places: Tensor


def planned_images(plan: RankPlan) -> list[PlannedImage]:
    """What `plan.rank` encodes apart from the packs, in plan order.

    Passes are those of the plan where it names them (ranks run them in lockstep); else they are filled in turn, with at
    most `VisionPlan.pass_patches` patches or one larger image.
    """
    found: list[PlannedImage] = []
    number = filled = 0
    for pack_number, pack in enumerate(plan.encoded):
        passes = iter(pack.passes or (-1,) * len(pack.encoders))
        for row, (sample, here) in enumerate(zip(pack.samples, encoded_images(pack, plan.rank))):
            for image, (grid, needed, given) in enumerate(zip(sample.vision_grids, here, passes)):
                if not needed:
                    continue
                if filled and 0 < plan.vision.pass_patches < filled + prod(grid):
                    number, filled = number + 1, 0
                filled += prod(grid)
                found.append(PlannedImage(pack_number, row, image, grid, number if given < 0 else given))
    return found


def vision_inputs(
    plan: RankPlan, payload_of: Callable[[str], Payload], adapter: ModelAdapter,
    pixel_type: torch.dtype = torch.float32, pinned: bool = False,
) -> VisionInputs:
    """What `plan.rank` encodes of `plan.encoded`, on the CPU.

    `payload_of` is asked for each sample with an image that the rank encodes, by id, in plan order. Pixels of a payload
    become rows of their pass's as soon as all images of the pass have come. A pass without an image that can be used is
    left out, or, where ranks run them in lockstep, has a smallest image whose features nobody takes.

    Raises:
        ValueError: one line that names the sample whose payload is not what was planned.
    """
    planned = planned_images(plan)
    missing = Counter(image.number for image in planned)
    ready: dict[int, list[ReadyImage]] = {number: [] for number in range(plan.vision.num_passes)}
    passes: dict[int, EncoderPass] = {}
    for (pack_number, row), of_sample in groupby(planned, lambda image: (image.pack, image.sample)):
        pack, images = plan.encoded[pack_number], list(of_sample)
        payload, places = payload_of(pack.samples[row].id), list[Tensor]()
        if not payload.masked:
            needed = {image.image for image in images}
            check_payload(pack.samples[row], payload, adapter,
                          tuple(image in needed for image in range(len(pack.samples[row].vision_grids))))
            start = sum(sample.num_tokens for sample in pack.samples[:row])
            places = [start + tokens for tokens in image_tokens(payload, adapter)]
        for image in images:
            come = ready.setdefault(image.number, [])
            if places:
                come.append(ReadyImage(payload.pixels, image.image, image.grid, pack_number, places[image.image]))
            missing[image.number] -= 1
            if come and not missing[image.number]:
                passes[image.number] = _whole(come, adapter, pixel_type, pinned)
    for number in range(plan.vision.num_passes):
        if number not in passes:
            passes[number] = _tiny(adapter, pixel_type)
    return VisionInputs(passes=[passes[number] for number in sorted(passes)],
                        send_index=_send_index(plan, [ready[number] for number in sorted(passes)], adapter))


def _whole(
    images: Sequence[ReadyImage], adapter: ModelAdapter, pixel_type: torch.dtype, pinned: bool
) -> EncoderPass:
    """A pass; the images' pixels are rows of its own from now on."""
    patches = [image.pixels[image.image] for image in images]
    grids = tuple(image.grid for image in images)
    whole = joined(cast("list[np.ndarray | Tensor]", patches), adapter.patch_dim, pixel_type, pinned)
    for image, rows in zip(images, whole.split([prod(grid) for grid in grids])):
        image.pixels[image.image] = rows
    return EncoderPass(pixels=whole, grids=grids, encoder=adapter.encoder_arguments(grids),
                       num_rows=sum(prod(grid) // adapter.merge_area for grid in grids))


def _tiny(adapter: ModelAdapter, pixel_type: torch.dtype) -> EncoderPass:
    """A pass of a smallest image."""
    grid = adapter.smallest_grid
    return EncoderPass(pixels=torch.zeros(prod(grid), adapter.patch_dim, dtype=pixel_type), grids=(grid,),
                       encoder=adapter.encoder_arguments((grid,)), num_rows=prod(grid) // adapter.merge_area)


def _send_index(
    plan: RankPlan, passes: Sequence[Sequence[ReadyImage]], adapter: ModelAdapter
) -> dict[int, Tensor]:
    """`VisionInputs.send_index` of the images of each pass; one without an image makes the rows of a smallest one."""
    row_of = [torch.full((sum(sample.num_tokens for sample in pack.samples),), -1) for pack in plan.encoded]
    num_rows = 0
    for images in passes:
        for image in images:
            row_of[image.pack][image.places] = torch.arange(num_rows, num_rows + len(image.places))
            num_rows += len(image.places)
        num_rows += 0 if images else prod(adapter.smallest_grid) // adapter.merge_area
    send: dict[int, list[Tensor]] = {}
    for pack, row_of_token in zip(plan.encoded, row_of):
        layout = PackLayout(tuple(sample.num_tokens for sample in pack.samples), len(pack.ranks))
        for member, rank in enumerate(pack.ranks):
            rows = row_of_token[layout.index(member)]
            send.setdefault(rank, []).append(rows[rows >= 0])
    found = {rank: torch.cat(rows) for rank, rows in sorted(send.items())}
    return {rank: rows for rank, rows in found.items() if len(rows)}
