"""A rank's payload of one step: blocks from the object store, and the pixels of the images that this rank encodes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np

from dhp_ray.config import Config
from dhp_ray.data.blocks import BlockRows, fetch_rows
from dhp_ray.data.images import decode
from dhp_ray.data.processor import Processor, ProcessorSpec
from dhp_ray.data.video import decode_video
from dhp_ray.errors import first_line
from dhp_ray.model.adapter import ModelAdapter
from dhp_ray.planner.plan import RankPack, RankPlan
from dhp_ray.train.collate import Payload, check_payload, placeholder


def processor_spec(config: Config) -> ProcessorSpec:
    return ProcessorSpec.of(config.model, config.data)


def load_payloads(
    plan: RankPlan, blocks: Sequence[BlockRows], processor: Processor, adapter: ModelAdapter
) -> tuple[dict[str, Payload], dict[str, str]]:
    """Payloads by sample id, and the reason of each sample that cannot be used; such a one is a placeholder here."""
    rows = {row["id"]: row for row in fetch_rows(blocks)}
    payloads: dict[str, Payload] = {}
    failures: dict[str, str] = {}
    for pack in plan.packs:
        for sample, encoded_here in zip(pack.samples, encoded_images(pack, plan.rank)):
            try:
                payload = payload_of(rows[sample.id], encoded_here, processor)
                check_payload(sample, payload, adapter, encoded_here)
            # whatever decoders raise on foreign bytes: the sample is bad, and its reason is reported
            except Exception as error:
                payload = placeholder(sample)
                failures[sample.id] = first_line(error).removeprefix(f"sample {sample.id}: ")
            payloads[sample.id] = payload
    return payloads, failures


def encoded_images(pack: RankPack, rank: int) -> list[tuple[bool, ...]]:
    """For every sample of the pack, whether `rank` encodes each of its images."""
    member = pack.ranks.index(rank)
    encoders = iter(pack.encoders)
    return [tuple(next(encoders) == member for _ in sample.vision_grids) for sample in pack.samples]


def payload_of(row: dict[str, Any], encoded_here: Sequence[bool], processor: Processor) -> Payload:
    """A row of a block as a payload, with the patches of the grids that are encoded here. Raises whatever decoders
    raise on foreign bytes.
    """
    return Payload(input_ids=np.asarray(row["input_ids"], np.int32), labels=np.asarray(row["labels"], np.int32),
                   grids=np.asarray(row["grids"], np.int64).reshape(-1, 3),
                   pixels=pixels_of(row, encoded_here, processor),
                   media=np.asarray(row["media"], np.int64), seconds=np.asarray(row["seconds"], np.float64))


def pixels_of(row: dict[str, Any], encoded_here: Sequence[bool], processor: Processor) -> list[np.ndarray | None]:
    """Patches of every grid that this rank encodes. A video is decoded once, for all of its pieces encoded here."""
    pixels: list[np.ndarray | None] = []
    for number, entries in groupby(zip(row["media"], row["seconds"], row["grids"], encoded_here),
                                   key=lambda entry: int(entry[0])):
        _, seconds, grids, here = zip(*entries)
        if seconds[0] and any(here):
            stops = np.cumsum([int(grid[0]) for grid in grids]).tolist()
            ranges = [range(stop - int(grid[0]), stop) for stop, grid in zip(stops, grids)]
            decoded = iter(decode_video(row["images"][number], processor,
                                        [steps for steps, needed in zip(ranges, here) if needed], stops[-1]))
            pixels += [next(decoded) if needed else None for needed in here]
        else:
            pixels += [decode(row["images"][number], processor) if needed else None for needed in here]
    return pixels
