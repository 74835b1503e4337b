"""Images that a rank encodes apart from its packs: its inputs, and the two phases of a step.

    encode     my images -> features -- exchange --> rows of my packs
    backward   gradients of my packs' rows -- exchange --> gradients of my features -> of the encoder

Activations are kept between the two phases, or the second one encodes again, pass by pass. If the encoder is frozen,
there is no second phase. With sync=micro_batch all ranks run equally many passes, in both phases: the units of the
encoder gather their parameters from all ranks, and reduce their gradients over them.

Both sides know the order of rows from the plan and the token ids alone, so nothing is negotiated:

    encoder     pass by pass; in each, images of the packs in `RankPlan.encoded`, in plan order: their rows are numbered
                as they come
    to a rank   the rows that its shards of these packs hold, pack by pack, in the shard's order
    from ranks  in ascending order; of each, pack by pack, in the shard's order
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from math import prod
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from dhp_ray.comm.pack_communicator import PackCommunicator, return_rows, send_rows
from dhp_ray.model.language_model import EncoderArguments, LanguageModel
from dhp_ray.model.tensor_fields import TensorFields
from dhp_ray.planner.plan.types import Grid, Pack, RankPlan, cut_in_time, encoding_ranks
from dhp_ray.train.collate import Payload, check_payload, image_tokens, joined, tokens_of_parts

Pixels = list[np.ndarray | Tensor | None]


@dataclass(kw_only=True)
class EncoderPass(TensorFields):
    """Images that are encoded together: `pixels` (P, patch_dim), the encoder's arguments from their grids, and the
    number of feature rows that they make.
    """

    pixels: Tensor
    grids: tuple[Grid, ...]
    encoder: EncoderArguments
    num_rows: int


@dataclass(kw_only=True)
class VisionInputs(TensorFields):
    """The vision inputs of one rank and step. `send_index`: by rank, the rows of this rank's features that go there."""

    passes: list[EncoderPass]
    send_index: dict[int, Tensor]


class PlannedImage(NamedTuple):
    """An image, or part `part` of `num_parts`, that a rank encodes: image `image` of sample `sample` of pack `pack` of
    `RankPlan.encoded`, in pass `number` of the rank.
    """

    pack: int
    sample: int
    image: int
    grid: Grid
    number: int
    part: int = 0
    num_parts: int = 1

    @property
    def own_grid(self) -> Grid:
        """The grid that is encoded: that of a part in time, which is an image of its own."""
        return cut_in_time(self.grid, self.num_parts)[self.part]


class ReadyImage(NamedTuple):
    """`pixels[planned.image]` becomes rows of its pass's pixels. `places`: where in their pack the tokens of its
    feature rows are, in the order of the rows.
    """

    planned: PlannedImage
    pixels: Pixels
    places: Tensor


def planned_images(plan: RankPlan) -> list[PlannedImage]:
    """Return the images that `plan.rank` encodes apart from the packs, in plan order.

    If the plan names passes, these are used (ranks run them in lockstep). Otherwise passes are filled in turn, with at
    most `VisionPlan.pass_patches` patches or one larger image.
    """
    found = [image for number, pack in enumerate(plan.encoded) for image in _images_of(plan, number, pack)]
    if plan.vision.num_passes:
        return found
    number, filled = 0, 0
    for place, image in enumerate(found):
        if filled and 0 < plan.vision.pass_patches < filled + prod(image.own_grid):
            number, filled = number + 1, 0
        filled += prod(image.own_grid)
        found[place] = image._replace(number=number)
    return found


def _images_of(plan: RankPlan, number: int, pack: Pack) -> Iterator[PlannedImage]:
    """Yield `planned_images` of a pack, in the passes of the plan."""
    ranks_of = encoding_ranks(pack.encoders, pack.splits)
    passes_of = encoding_ranks(pack.passes or (0,) * len(pack.encoders),
                               [replace(split, ranks=split.passes or (0,) * len(split.ranks)) for split in pack.splits])
    images = [(row, image, grid) for row, sample in enumerate(pack.samples)
              for image, grid in enumerate(sample.vision_grids)]
    for (row, image, grid), ranks, passes in zip(images, ranks_of, passes_of, strict=True):
        if plan.rank in ranks:
            part = ranks.index(plan.rank)
            yield PlannedImage(number, row, image, grid, passes[part], part, len(ranks))


def vision_inputs(
    plan: RankPlan, payload_of: Callable[[str], Payload], adapter: LanguageModel,
    pixel_type: torch.dtype = torch.float32, pinned: bool = False,
) -> VisionInputs:
    """Return the inputs of the images that `plan.rank` encodes of `plan.encoded`, on the CPU.

    `payload_of` is called with the id of each sample with an image that the rank encodes, in plan order. Pixels of a
    payload become rows of their pass's pixels as soon as all images of the pass are there; of an image that several
    ranks encode, only the pixels of this rank's part. A pass without a usable image is left out, or, if ranks run
    passes in lockstep, has a smallest image whose features nobody takes.
    """
    planned = planned_images(plan)
    missing = Counter(image.number for image in planned)
    ready: dict[int, list[ReadyImage]] = {number: [] for number in range(plan.vision.num_passes)}
    passes: dict[int, EncoderPass] = {}
    for (pack_number, row), of_sample in groupby(planned, lambda image: (image.pack, image.sample)):
        pack, images = plan.encoded[pack_number], list(of_sample)
        payload = payload_of(pack.samples[row].id)
        come = [] if payload.masked else _ready(pack, payload, images, adapter)
        for image in images:
            of_pass = ready.setdefault(image.number, [])
            of_pass += [found for found in come if found.planned is image]
            missing[image.number] -= 1
            if of_pass and not missing[image.number]:
                passes[image.number] = _whole(of_pass, adapter, pixel_type, pinned)
    for number in range(plan.vision.num_passes):
        if number not in passes:
            tiny = torch.zeros(prod(adapter.smallest_grid), adapter.patch_dim, dtype=pixel_type)
            passes[number] = _pass(tiny, (adapter.smallest_grid,), adapter)
    return VisionInputs(passes=[passes[number] for number in sorted(passes)],
                        send_index=_send_index(plan, [ready[number] for number in sorted(passes)], adapter))


def _ready(
    pack: Pack, payload: Payload, images: Sequence[PlannedImage], adapter: LanguageModel
) -> list[ReadyImage]:
    """Return what this rank encodes of one sample, and remove the other patches from the payload."""
    row = images[0].sample
    sample, start = pack.samples[row], sum(other.num_tokens for other in pack.samples[:row])
    tokens = {image.image: tokens_of_parts(image.grid, image.num_parts, adapter)[image.part] for image in images}
    # if a payload is collated again, its parts have been cut out already
    whole = {image.image for image in images if image.num_parts == 1 or (pixels := payload.pixels[image.image]) is None
             or len(pixels) != len(tokens[image.image]) * adapter.merge_area}
    check_payload(sample, payload, adapter, tuple(image in whole for image in range(len(sample.vision_grids))))
    for image in images:
        if image.num_parts > 1 and image.image in whole:
            patches = (tokens[image.image][:, None] * adapter.merge_area + torch.arange(adapter.merge_area)).flatten()
            payload.pixels[image.image] = torch.as_tensor(payload.pixels[image.image])[patches]
    places = image_tokens(payload, adapter)
    return [ReadyImage(image, payload.pixels, start + places[image.image][tokens[image.image]]) for image in images]


def _whole(
    images: Sequence[ReadyImage], adapter: LanguageModel, pixel_type: torch.dtype, pinned: bool
) -> EncoderPass:
    """Return a pass: the patches of its images joined into one tensor, of which the payloads hold views afterwards."""
    patches = [image.pixels[image.planned.image] for image in images]
    whole = joined(cast("list[np.ndarray | Tensor]", patches), adapter.patch_dim, pixel_type, pinned)
    sizes = [len(image.places) for image in images]
    for image, rows in zip(images, whole.split([size * adapter.merge_area for size in sizes])):
        image.pixels[image.planned.image] = rows
    return _pass(whole, tuple(image.planned.own_grid for image in images), adapter)


def _pass(pixels: Tensor, grids: tuple[Grid, ...], adapter: LanguageModel) -> EncoderPass:
    return EncoderPass(pixels=pixels, grids=grids, encoder=adapter.encoder_arguments(grids),
                       num_rows=len(pixels) // adapter.merge_area)


def _send_index(
    plan: RankPlan, passes: Sequence[Sequence[ReadyImage]], adapter: LanguageModel
) -> dict[int, Tensor]:
    """Return `VisionInputs.send_index`; a pass without an image makes the rows of a smallest image."""
    row_of = [torch.full((sum(sample.num_tokens for sample in pack.samples),), -1) for pack in plan.encoded]
    num_rows = 0
    for images in passes:
        for image in images:
            row_of[image.planned.pack][image.places] = torch.arange(num_rows, num_rows + len(image.places))
            num_rows += len(image.places)
        num_rows += 0 if images else prod(adapter.smallest_grid) // adapter.merge_area
    send: dict[int, list[Tensor]] = {}
    for pack, row_of_token in zip(plan.encoded, row_of):
        layout = adapter.layout([sample.num_tokens for sample in pack.samples], len(pack.ranks))
        for member, rank in enumerate(pack.ranks):
            rows = row_of_token[layout.index(member)]
            send.setdefault(rank, []).append(rows[rows >= 0])
    found = {rank: torch.cat(rows) for rank, rows in sorted(send.items())}
    return {rank: rows for rank, rows in found.items() if len(rows)}


class EncoderPhases:
    """The phases of one rank and step: `encode` before the packs, `backward` after them. Every rank that encodes for
    another, or that another encodes for, calls both.

    `received_from`: for each pack of this rank, in order, the rows that come from each rank.
    """

    def __init__(
        self, adapter: LanguageModel, inputs: VisionInputs, keeps: bool,
        received_from: Sequence[Mapping[int, int]], device: torch.device,
    ) -> None:
        self._adapter, self._device = adapter, device
        self._passes, self._keeps = inputs.passes, keeps
        self._trains = torch.is_grad_enabled() and adapter.trains("vision")
        self._send_index = {rank: rows.to(device, non_blocking=True) for rank, rows in inputs.send_index.items()}
        self._receive_counts, self._rows_of = received_rows(received_from, device)
        self._encoded: list[Tensor] = []
        self._features: list[Tensor] = []
        self._like = torch.empty(0)  # has the type and the device of features

    def encode(self, link: PackCommunicator) -> list[Tensor]:
        """Return the features (K, F) of each pack of this rank; `backward` takes the gradients left in them."""
        for images in self._passes:
            with torch.set_grad_enabled(self._trains and self._keeps):
                self._encoded.append(self._encode(images))
        mine = (torch.cat([features.detach() for features in self._encoded]) if self._encoded
                else self._adapter.empty_features())
        received = send_rows(mine, self._send_index, self._receive_counts, link)
        self._like = mine[:0].clone()
        del mine
        self._encoded = self._encoded if self._trains and self._keeps else []
        self._features = [received[rows] for rows in self._rows_of]
        return self._features

    def backward(self, link: PackCommunicator) -> None:
        """Add the encoder's gradients to its parameters', once the backward pass of every pack has run."""
        if not self._trains:
            return
        gradient = self._received_gradient()
        sizes = [images.num_rows for images in self._passes]
        of_mine = return_rows(gradient, self._send_index, self._receive_counts, sum(sizes), link)
        del gradient
        for number, (images, stop) in enumerate(zip(self._passes, accumulate(sizes))):
            features = self._encoded[number] if self._keeps else self._encode(images)
            features.backward(of_mine[stop - images.num_rows:stop])  # type: ignore[no-untyped-call]
        self._encoded = []

    def _received_gradient(self) -> Tensor:
        """Return the gradient of all received rows, in the order of receipt; frees the packs' features."""
        gradient = self._like.new_zeros(sum(self._receive_counts.values()), self._adapter.feature_width)
        for features, rows in zip(self._features, self._rows_of, strict=True):
            if features.grad is not None:
                gradient.index_copy_(0, rows, features.grad)
        self._features = []
        return gradient

    def _encode(self, images: EncoderPass) -> Tensor:
        there = images.map(lambda tensor: tensor.to(self._device, non_blocking=True))
        return self._adapter.encode(there.pixels, there.encoder)


def received_rows(
    received_from: Sequence[Mapping[int, int]], device: torch.device
) -> tuple[dict[int, int], list[Tensor]]:
    """Return how many rows come from each rank, in the order of ranks, and for each pack the indices of its rows among
    them, made on the device.

    They come rank by rank, and from each rank pack by pack.
    """
    counts: dict[int, int] = {}
    for of_pack in received_from:
        for rank, count in of_pack.items():
            counts[rank] = counts.get(rank, 0) + count
    counts = dict(sorted(counts.items()))
    following = dict(zip(counts, accumulate(counts.values(), initial=0)))
    rows = []
    for of_pack in received_from:
        pieces = [torch.empty(0, dtype=torch.int64, device=device)]
        for rank, count in sorted(of_pack.items()):
            pieces.append(torch.arange(following[rank], following[rank] + count, device=device))
            following[rank] += count
        rows.append(torch.cat(pieces))
    return counts, rows
