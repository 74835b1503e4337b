"""What a rank needs to encode images apart from the packs: pixels, and which of the feature rows go to which rank.

Both sides know the order of rows from the plan and the token ids alone, so nothing is negotiated:

    encoder     images of the packs in `RankPlan.encoded`, in plan order: their rows are numbered as they come
    to a rank   the rows that its shards of these packs hold, pack by pack, in the shard's order
    from ranks  in ascending order; of each, pack by pack, in the shard's order
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np
import torch
from torch import Tensor

from dhp_ray.model.adapter import EncoderArguments, ModelAdapter
from dhp_ray.model.kernels import Segments
from dhp_ray.model.layout import PackLayout
from dhp_ray.planner.plan import Grid, RankPlan, encoded_images
from dhp_ray.train.collate import joined
from dhp_ray.train.payload import Payload, check_payload, image_tokens


@dataclass(kw_only=True)
class EncoderPass:
    """Images that are encoded together: `pixels` (P, patch_dim), what the encoder takes from their grids, and the rows
    of features that they make."""

    pixels: Tensor
    grids: tuple[Grid, ...]
    encoder: EncoderArguments
    num_rows: int

    def map(self, change: Callable[[Tensor], Tensor]) -> EncoderPass:
        return replace(self, pixels=change(self.pixels),
                       encoder={name: value.map(change) if isinstance(value, Segments) else change(value)
                                for name, value in self.encoder.items()})

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
    plan: RankPlan, payloads: Mapping[str, Payload], adapter: ModelAdapter, pixel_type: torch.dtype = torch.float32,
    pinned: bool = False,
) -> VisionInputs:
    """What `plan.rank` encodes of `plan.encoded`, on the CPU. `payloads`: of the samples with an image that it encodes.

    Raises:
        ValueError: one line that names the sample whose payload is missing or not what was planned.
    """
    patches: list[np.ndarray | Tensor] = []
    grids: list[Grid] = []
    send: dict[int, list[Tensor]] = {}
    num_rows = 0
    for pack in plan.encoded:
        layout = PackLayout(tuple(sample.num_tokens for sample in pack.samples), len(pack.ranks))
        row_of = torch.full((sum(layout.lengths),), -1)  # of each token of the pack
        start = 0
        for sample, here in zip(pack.samples, encoded_images(pack, plan.rank)):
            if any(here) and sample.id not in payloads:
                raise ValueError(f"sample {sample.id}: no payload for the images that rank {plan.rank} encodes")
            if any(here) and not payloads[sample.id].masked:
                payload = payloads[sample.id]
                check_payload(sample, payload, adapter, here)
                for place, needed, pixels, grid in zip(image_tokens(payload, adapter), here, payload.pixels,
                                                       sample.vision_grids):
                    if needed:
                        assert pixels is not None  # check_payload
                        row_of[start + place] = torch.arange(num_rows, num_rows + len(place))
                        num_rows += len(place)
                        patches.append(pixels)
                        grids.append(grid)
            start += sample.num_tokens
        for member, rank in enumerate(pack.ranks):
            rows = row_of[layout.index(member)]
            send.setdefault(rank, []).append(rows[rows >= 0])
    passes = []
    for first, stop in passes_of([prod(grid) for grid in grids], plan.vision.pass_patches):
        of_pass = tuple(grids[first:stop])
        passes.append(EncoderPass(
            pixels=joined(patches[first:stop], adapter.patch_dim, pixel_type, pinned), grids=of_pass,
            encoder=adapter.encoder_arguments(of_pass),
            num_rows=sum(prod(grid) // adapter.merge_area for grid in of_pass)))
    found = {rank: torch.cat(rows) for rank, rows in sorted(send.items())}
    return VisionInputs(passes=passes, send_index={rank: rows for rank, rows in found.items() if len(rows)})


def passes_of(patches: Sequence[int], most: int) -> list[tuple[int, int]]:
    """Cut images into passes of at most `most` patches, or of one larger image: the first of each, and where it stops.
    0: one pass.
    """
    found: list[tuple[int, int]] = []
    total = 0
    for image, count in enumerate(patches):
        if not found or (most and total + count > most):
            found.append((image, image))
            total = 0
        found[-1] = (found[-1][0], image + 1)
        total += count
    return found
