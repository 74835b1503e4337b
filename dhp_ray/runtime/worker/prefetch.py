"""A rank's inputs of one step: rows of blocks, the pixels of the images that it encodes, collated packs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import partial
from itertools import accumulate, groupby, islice
from typing import Any, cast

import numpy as np
import torch

from dhp_ray.config import Config
from dhp_ray.credentials import shown
from dhp_ray.data.families.base import VisionFamily
from dhp_ray.data.images import decode
from dhp_ray.data.processor import Processor
from dhp_ray.data.video import decode_video
from dhp_ray.errors import first_line, named_line
from dhp_ray.model.language_model import LanguageModel
from dhp_ray.planner.plan.types import Pack, RankPlan, Sample, encoded_images, planned_samples
from dhp_ray.runtime.messages import RunError
from dhp_ray.train.collate import Payload, check_payload, placeholder
from dhp_ray.train.step_inputs import IDLE, StepInputs, packs_of

Patches = list[np.ndarray | None]
"""For each grid of an image or video, float32 of shape (P, patch_dim); None if another rank encodes it."""
Decoding = Callable[[], Patches]

DECODED_AHEAD = 2  # images that each decoder may be ahead of the pack that is collated: one under way, and a next one


def num_decoders(config: Config) -> int:
    """Return the number of a worker's decoding threads: as many as it has CPUs."""
    return max(1, int(config.cluster.cpus_per_worker))


def load_inputs(
    plan: RankPlan, rows: Iterable[dict[str, Any]], processor: Processor, adapter: LanguageModel,
    num_decoders: int = 1, precision: str = "fp32", pinned: bool = False,
    on_decoded: Callable[[], object] = lambda: None,
) -> tuple[StepInputs, dict[str, str]]:
    """Return the inputs of a plan's packs, and why samples that are placeholders here cannot be used. `rows`: those of
    the plan's samples, in any order. RunError: one is missing, or there is no memory to decode one.

    Images are decoded by `num_decoders` threads, in the order of the plan, while the pack before is collated; decoded
    patches are not held after that. `on_decoded` is called after each image or video.
    """
    row_of = {row["id"]: row for row in rows}
    for sample in planned_samples(plan):
        if sample.id not in row_of:
            raise RunError(f"step {plan.step}: sample {sample.id} is planned for rank {plan.rank}, "
                           f"but is not among the {len(row_of)} rows that were sent")
    inputs = StepInputs(plan, precision, pinned)
    failures: dict[str, str] = {}
    encoded = {sample.id: (sample, here, decodings(row_of[sample.id], here, processor)) for pack in plan.encoded
               for sample, here in zip(pack.samples, encoded_images(pack, plan.rank)) if any(here)}
    packs = [(pack, [(sample, here, decodings(row_of[sample.id], here, processor))
                     for sample, here in zip(pack.samples, encoded_in_pack(plan, pack)) if pack.index >= 0])
             for pack in packs_of(plan)]
    taken = [encoded.values(), *(samples for _, samples in packs)]
    calls = [call for samples in taken for *_, decoded_by in samples for call in decoded_by]

    def take(sample: Sample, here: tuple[bool, ...], decoded_by: Sequence[Decoding]) -> Payload:
        """Return the payload of a sample; to be called in the order in which samples are decoded."""
        own = list(islice(decoded, len(decoded_by)))
        for future in own:
            future.exception()  # waits for it
            on_decoded()
        try:
            payload = payload_of(row_of[sample.id], [future.result() for future in own])
            check_payload(sample, payload, adapter, here)
        except MemoryError as error:  # of the machine, not of the sample
            raise RunError(f"step {plan.step}: no memory to decode sample {sample.id}: {named_line(error)}") from None
        except Exception as error:  # whatever decoders raise on foreign bytes: the sample is bad, and reported
            failures[sample.id] = shown(first_line(error).removeprefix(f"sample {sample.id}: "))
            return placeholder(sample)
        return payload

    with ThreadPoolExecutor(num_decoders, "decoding", partial(torch.set_num_threads, 1)) as decoders:
        decoded = futures_of(calls, decoders, DECODED_AHEAD * num_decoders)
        if plan.vision.apart:
            inputs.add_encoded(lambda sample_id: take(*encoded[sample_id]), adapter)
        for pack, samples in packs:
            payloads = {sample.id: take(sample, here, decoded_by) for sample, here, decoded_by in samples}
            inputs.add(pack, {IDLE.id: placeholder(IDLE)} if pack.index < 0 else payloads, adapter)
    return inputs, failures


def encoded_in_pack(plan: RankPlan, pack: Pack) -> list[tuple[bool, ...]]:
    """For every sample of the pack, whether the rank encodes each of its images in the pack."""
    if plan.vision.apart:
        return [(False,) * len(sample.vision_grids) for sample in pack.samples]
    return encoded_images(pack, plan.rank)


def encoded_grids(plan: RankPlan) -> dict[str, tuple[bool, ...]]:
    """For every sample of which a rank needs a row, by id, whether the rank encodes each of its images."""
    return {sample.id: here for pack in (*plan.packs, *plan.encoded)
            for sample, here in zip(pack.samples, encoded_images(pack, plan.rank))}


def futures_of(calls: Sequence[Decoding], executor: Executor, ahead: int) -> Iterator[Future[Patches]]:
    """Yield the futures of calls, in order, of which at most `ahead` are submitted before they are taken."""
    waiting: deque[Future[Patches]] = deque()
    for number in range(len(calls)):
        for call in calls[number + len(waiting):number + 1 + ahead]:
            waiting.append(executor.submit(call))
        yield waiting.popleft()


def payload_of(row: dict[str, Any], decoded: Sequence[Patches]) -> Payload:
    """Return a row of a block as a payload, with what its `decodings` have returned."""
    return Payload(pixels=[patches for grids in decoded for patches in grids],
                   **{name: row[name] for name in ("input_ids", "labels", "grids", "media", "seconds")})


def decodings(row: dict[str, Any], encoded_here: Sequence[bool], processor: Processor) -> list[Decoding]:
    """Return for each image and video, in order, a call that decodes it to its grids' patches; a video once."""
    found: list[Decoding] = []
    family = cast(VisionFamily, processor.family)  # a text-only model's rows have no images
    for number, entries in groupby(zip(row["media"], row["seconds"], row["grids"], encoded_here),
                                   key=lambda entry: int(entry[0])):
        _, seconds, grids, here = zip(*entries)
        if not any(here):
            undecoded: Patches = [None] * len(here)
            found.append(undecoded.copy)
        elif seconds[0]:
            found.append(partial(_decode_pieces, row["images"][number], [int(grid[0]) for grid in grids], here, family))
        else:
            found.append(partial(_decode_image, row["images"][number], family))
    return found


def _decode_image(data: bytes, family: VisionFamily) -> Patches:
    return [decode(data, family)]


def _decode_pieces(data: bytes, lengths: Sequence[int], here: Sequence[bool], family: VisionFamily) -> Patches:
    """Return the patches of a video's pieces; `lengths`: the steps in time of each piece."""
    stops = list(accumulate(lengths))
    wanted = [range(stop - length, stop) for stop, length, needed in zip(stops, lengths, here) if needed]
    decoded = iter(decode_video(data, family, wanted, stops[-1]))
    return [next(decoded) if needed else None for needed in here]
