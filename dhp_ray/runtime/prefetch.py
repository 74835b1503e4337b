"""A rank's payload of one step: blocks from the object store, and the pixels of the images that this rank encodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import ray

from dhp_ray.data.images import decode
from dhp_ray.data.processor import Processor
from dhp_ray.data.stream import read_rows
from dhp_ray.planner.plan import RankPack, RankPlan
from dhp_ray.train.collate import Payload


@dataclass
class BlockRows:
    """Rows of one block in the object store. The reference is nested in a list, so that Ray hands it on unresolved."""

    reference: list[ray.ObjectRef] = field(repr=False)
    rows: list[int]


def load_payloads(plan: RankPlan, blocks: Sequence[BlockRows], processor: Processor) -> tuple[dict[str, Payload], dict[str, str]]:
    """Payloads by sample id, and the reason of each sample whose images do not decode.

    A failed sample still has a payload of the right shape (blank pixels): it keeps its place in the plan.
    """
    rows = {row["id"]: row for block in blocks for row in read_rows(ray.get(block.reference[0]), block.rows)}
    payloads: dict[str, Payload] = {}
    failures: dict[str, str] = {}
    for pack in plan.packs:
        for sample_id, mine in _images_to_encode(pack, plan.rank).items():
            row = rows[sample_id]
            pixels: list[np.ndarray | None] = [None] * len(mine)
            for place in (place for place, encodes in enumerate(mine) if encodes):
                pixels[place], error = _pixels(row, place, processor)
                if error:
                    failures[sample_id] = f"image {place + 1}: {error}"
            payloads[sample_id] = Payload(
                input_ids=np.asarray(row["input_ids"], np.int32), labels=np.asarray(row["labels"], np.int32),
                grids=np.asarray(row["grids"], np.int64).reshape(-1, 3), pixels=pixels)
    return payloads, failures


def _images_to_encode(pack: RankPack, rank: int) -> dict[str, list[bool]]:
    """For every sample of the pack, whether this rank encodes each of its images."""
    member = pack.ranks.index(rank)
    encoders = iter(pack.encoders)
    return {sample.id: [next(encoders) == member for _ in sample.vision_grids] for sample in pack.samples}


def _pixels(row: dict[str, Any], place: int, processor: Processor) -> tuple[np.ndarray, str]:
    """Patches of one image, or blank ones with the reason."""
    time, height, width = (int(size) for size in row["grids"][place])
    shape = (time * height * width, processor.patch_dim)
    try:
        pixels = decode(row["images"][place], processor)
    except Exception as error:  # whatever an image decoder raises on foreign bytes makes this a bad sample, with its reason
        return np.zeros(shape, np.float32), f"does not decode: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
    if pixels.shape != shape:
        return np.zeros(shape, np.float32), f"has {pixels.shape[0]} patches, its header said {shape[0]}"
    return pixels, ""
