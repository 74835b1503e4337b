"""Turns the payloads of a pack into the inputs of one of its ranks.

Every member computes the layout of the whole pack alike, from token ids and grids alone, so nothing has to be agreed
on:

    packed sequence   t t I I I t | t I I t t t    labels shifted and positions counted per sequence, before sharding
    member 0          ^ ^       ^   ^         ^        its intervals (PackLayout), in local order
    feature rows          0 1 2       3 4              encoded by the members that `RankPack.encoders` names
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import prod

import numpy as np
import torch
from torch import Tensor

from dhp_ray.model.adapter import EncoderArguments, ModelAdapter
from dhp_ray.model.attention import segments_of
from dhp_ray.model.dropout import token_keys
from dhp_ray.model.kernels import Segments
from dhp_ray.model.layout import PackLayout
from dhp_ray.model.loss import IGNORED, valid_tokens
from dhp_ray.planner.plan import Grid, RankPack, Sample


@dataclass(kw_only=True)
class Payload:
    """What one sample brings to a pack: token ids (L,) int32, labels (L,) int32 unshifted with -100 where masked, grids
    (N, 3), and for every image its patches (P, patch_dim) float32, or None where another rank encodes it.

    A grid is an image, or a piece of a video in time. `media` (N,) numbers what the grids are of, so that neighbours
    with one number are one video; `seconds` (N,) is what one step in time of a video lasts, and 0 for an image. Without
    the two, every grid is an image.

    `masked` makes it a placeholder: its tokens keep their place, its images are not encoded and it adds nothing to the
    loss. All ranks of the pack must agree on it.
    """

    input_ids: np.ndarray
    labels: np.ndarray
    grids: np.ndarray
    pixels: list[np.ndarray | Tensor | None]
    media: np.ndarray | None = None
    seconds: np.ndarray | None = None
    masked: bool = False

    def whole(self) -> tuple[np.ndarray, np.ndarray]:
        """Grids (M, 3) of whole images and videos, and seconds (M,)."""
        grids = np.asarray(self.grids, np.int64).reshape(-1, 3)
        if self.media is None or self.seconds is None:
            return grids, np.zeros(len(grids))
        first = np.flatnonzero(np.diff(self.media, prepend=-1))
        whole = grids[first]
        whole[:, 0] = np.add.reduceat(grids[:, 0], first) if len(first) else 0
        return whole, np.asarray(self.seconds, np.float64)[first]


@dataclass(kw_only=True)
class PackInputs:
    """One rank's part of a pack. L local tokens; P patches and N images that this rank encodes; K local image tokens.
    """

    index: int
    layout: PackLayout
    member: int
    token_ids: Tensor
    """(L,) int64."""
    labels: Tensor
    """(L,) int64, shifted, -100 where masked."""
    valid_index: Tensor
    """(number of labels that count,) int64: where they are among the local tokens."""
    segments: tuple[Segments, ...]
    """What this member's tokens see of every member's: `segments_of` the layout."""
    positions: Tensor
    """(3, L) int64."""
    pixels: Tensor
    """(P, patch_dim), fp32 or the type that the model computes in."""
    grids: tuple[Grid, ...]
    """Of the N images; on the host."""
    encoder: EncoderArguments
    """What the encoder takes from the grids; empty without an image."""
    vision_token_index: Tensor
    """(K,) int64: the local position of each received feature row, in the order of receipt."""
    send_index: list[Tensor]
    """For every member, the rows of my features that it needs, in its order of receipt."""
    receive_counts: list[int]
    """For every member, how many feature rows come from it."""
    num_images: int
    """Images that the whole pack encodes."""
    dropout_keys: Tensor | None = None
    """(max(L, 1),) int32: from which dropout is drawn; None: nothing is dropped."""
    predicts: bool = False
    """What is wanted of the valid tokens is the one that most likely follows each, and not their loss."""

    @property
    def num_valid_tokens(self) -> int:
        """Labels of this rank that count."""
        return len(self.valid_index)

    def map(self, change: Callable[[Tensor], Tensor]) -> PackInputs:
        """The same inputs with every tensor changed."""
        return replace(
            self, token_ids=change(self.token_ids), labels=change(self.labels), valid_index=change(self.valid_index),
            positions=change(self.positions), pixels=change(self.pixels),
            vision_token_index=change(self.vision_token_index), send_index=[change(rows) for rows in self.send_index],
            segments=tuple(segments.map(change) for segments in self.segments),
            dropout_keys=None if self.dropout_keys is None else change(self.dropout_keys),
            encoder={name: value.map(change) if isinstance(value, Segments) else change(value)
                     for name, value in self.encoder.items()})

    def to(self, device: torch.device) -> PackInputs:
        """The same inputs on a device."""
        return self.map(lambda tensor: tensor.to(device, non_blocking=True))


def encoded_images(pack: RankPack, rank: int) -> list[tuple[bool, ...]]:
    """For every sample of the pack, whether `rank` encodes each of its images."""
    member = pack.ranks.index(rank)
    encoders = iter(pack.encoders)
    return [tuple(next(encoders) == member for _ in sample.vision_grids) for sample in pack.samples]


def placeholder(sample: Sample) -> Payload:
    """A payload that keeps a sample's place when the sample cannot be used: as many tokens, none of which counts."""
    return Payload(input_ids=np.zeros(sample.num_tokens, np.int32),
                   labels=np.full(sample.num_tokens, IGNORED, np.int32),
                   grids=np.zeros((0, 3), np.int64), pixels=[], masked=True)


def check_payload(sample: Sample, payload: Payload, adapter: ModelAdapter, encoded_here: tuple[bool, ...] = ()) -> None:
    """Refuse a payload that is not what was planned; a rank calls it a batch ahead, before others depend on the sample.

    `encoded_here` says of each image whether this rank encodes it and so needs its pixels.

    Raises:
        ValueError: one line that names the sample.
    """
    ids, where = payload.input_ids, f"sample {sample.id}"
    if len(ids) != sample.num_tokens or len(payload.labels) != len(ids):
        raise ValueError(
            f"{where}: {len(ids)} token ids and {len(payload.labels)} labels; planned: {sample.num_tokens} of each"
        )
    if payload.masked:
        return
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < adapter.vocabulary_size:
        raise ValueError(
            f"{where}: token ids from {ids.min()} to {ids.max()}; the model has 0 to {adapter.vocabulary_size - 1}"
        )
    if adapter.longest_sequence is not None and len(ids) > adapter.longest_sequence:
        raise ValueError(
            f"{where}: {len(ids)} tokens; with rope_type dynamic the model has positions for "
            f"{adapter.longest_sequence} (max_position_embeddings)"
        )
    grids = tuple((int(time), int(height), int(width)) for time, height, width in payload.grids)
    if grids != tuple(sample.vision_grids) or len(payload.pixels) != len(grids):
        raise ValueError(
            f"{where}: {len(payload.pixels)} images of grids {grids}; planned: {tuple(sample.vision_grids)}"
        )
    tokens = (adapter.image_token_id, adapter.video_token_id)
    wanted = [(tokens[int(seconds > 0)], count) for grid, seconds in zip(*payload.whole())
              for count in adapter.vision_runs(grid.tolist(), seconds > 0)]
    runs = [(token, len(list(group))) for token, group in groupby(ids.tolist()) if token in tokens]
    if runs != wanted:
        raise ValueError(
            f"{where}: runs of {[count for _, count in runs]} image or video tokens; its images and videos take "
            f"{[count for _, count in wanted]}{', in another order' if sorted(runs) == sorted(wanted) else ''}"
        )
    for image, (needed, pixels, (time, height, width)) in enumerate(zip(encoded_here, payload.pixels, grids)):
        expected = (time * height * width, adapter.patch_dim)
        if needed and (pixels is None or pixels.shape != expected):
            raise ValueError(
                f"{where}: image {image} has patches {None if pixels is None else pixels.shape}; its grid takes "
                f"{expected}"
            )


def collate(
    pack: RankPack, payloads: Mapping[str, Payload], rank: int, adapter: ModelAdapter,
    pixel_type: torch.dtype = torch.float32, pinned: bool = False, step: int = 0,
) -> PackInputs:
    """The inputs of `rank`'s part of a pack of a `step`, on the CPU; `pinned`: with its pixels in pinned memory.

    Raises:
        ValueError: one line that names the sample whose payload is missing or not what was planned.
    """
    member, degree = pack.ranks.index(rank), len(pack.ranks)
    layout = PackLayout(tuple(sample.num_tokens for sample in pack.samples), degree)
    whole = _packed(pack, payloads, member, adapter)
    pixels = _joined(whole.patches, adapter.patch_dim, pixel_type, pinned)
    indices = [layout.index(other) for other in range(degree)]
    mine = indices[member]

    # feature_of[position] is the image token's row among the features of the member that encodes it; owner_of[position]
    # is that member.
    owner_of, feature_of = whole.owner_of, whole.feature_of
    send_index = [feature_of[index][owner_of[index] == member] for index in indices]
    received_from = [(owner_of[mine] == other).nonzero()[:, 0] for other in range(degree)]
    labels = whole.labels[mine]
    return PackInputs(
        index=pack.index, layout=layout, member=member, token_ids=whole.token_ids[mine], labels=labels,
        valid_index=valid_tokens(labels), segments=segments_of(layout, member), positions=whole.positions[:, mine],
        pixels=pixels, grids=whole.grids, encoder=adapter.encoder_arguments(whole.grids),
        vision_token_index=torch.cat(received_from), send_index=send_index,
        receive_counts=[len(rows) for rows in received_from],
        num_images=whole.num_images, dropout_keys=_dropout_keys(pack, mine, adapter, step))


def _dropout_keys(pack: RankPack, index: Tensor, adapter: ModelAdapter, step: int) -> Tensor | None:
    """Of the tokens at `index` (L,) of the packed sequence."""
    lora = adapter.lora
    if lora is None or not lora.dropout:
        return None
    if not len(index):
        return torch.zeros(1, dtype=torch.int32)
    return torch.cat([token_keys(lora.seed, step, sample.id, sample.num_tokens) for sample in pack.samples])[index]


def with_tiny_image(inputs: PackInputs, adapter: ModelAdapter) -> PackInputs:
    """The inputs of a rank that encodes nothing, with a smallest image that nobody needs: its gradient is zero. On the
    CPU.
    """
    grids = (adapter.smallest_grid,)
    return replace(inputs, grids=grids, pixels=inputs.pixels.new_zeros(prod(grids[0]), adapter.patch_dim),
                   encoder=adapter.encoder_arguments(grids))


@dataclass(kw_only=True)
class _Whole:
    """A pack before sharding, with the pixels and grids of this rank's images alone."""

    token_ids: Tensor
    labels: Tensor
    positions: Tensor
    owner_of: Tensor
    feature_of: Tensor
    patches: list[np.ndarray | Tensor]
    grids: tuple[Grid, ...]
    num_images: int


def _packed(pack: RankPack, payloads: Mapping[str, Payload], member: int, adapter: ModelAdapter) -> _Whole:
    token_ids, labels, positions, owner_of, feature_of = [], [], [], [], []
    needed: list[np.ndarray | Tensor] = []
    num_rows = [0] * len(pack.ranks)
    grids: list[Grid] = []
    first_image = num_images = 0
    for sample in pack.samples:
        if sample.id not in payloads:
            raise ValueError(f"sample {sample.id}: no payload for pack {pack.index}")
        payload = payloads[sample.id]
        encoders = pack.encoders[first_image:first_image + len(sample.vision_grids)]
        first_image += len(sample.vision_grids)
        if payload.masked:
            payload, encoders = placeholder(sample), ()
        check_payload(sample, payload, adapter, tuple(encoder == member for encoder in encoders))
        ids = torch.from_numpy(payload.input_ids.astype(np.int64))
        shifted = np.full(len(ids), IGNORED, np.int64)
        shifted[:-1] = payload.labels[1:]
        owner, feature = torch.full_like(ids, -1), torch.full_like(ids, -1)
        is_vision = (ids == adapter.image_token_id) | (ids == adapter.video_token_id)
        start_of_image = is_vision.nonzero()[:, 0] if encoders else ids[:0]
        for grid, encoder, patches in zip(payload.grids, encoders, payload.pixels):
            count = int(np.prod(grid)) // adapter.merge_area
            place, start_of_image = start_of_image[:count], start_of_image[count:]
            owner[place] = encoder
            feature[place] = torch.arange(num_rows[encoder], num_rows[encoder] + count)
            num_rows[encoder] += count
            if encoder == member:
                assert patches is not None  # check_payload
                needed.append(patches)
                grids.append((int(grid[0]), int(grid[1]), int(grid[2])))
        num_images += len(encoders)
        token_ids.append(ids)
        labels.append(torch.from_numpy(shifted))
        whole_grids, seconds = payload.whole()
        positions.append(adapter.positions(ids, torch.from_numpy(whole_grids), torch.from_numpy(seconds)))
        owner_of.append(owner)
        feature_of.append(feature)
    return _Whole(
        token_ids=torch.cat(token_ids), labels=torch.cat(labels), positions=torch.cat(positions, 1),
        owner_of=torch.cat(owner_of),
        feature_of=torch.cat(feature_of), patches=needed,
        grids=tuple(grids), num_images=num_images)


def _joined(patches: Sequence[np.ndarray | Tensor], patch_dim: int, pixel_type: torch.dtype, pinned: bool) -> Tensor:
    """Patches (P, patch_dim) of all images, written once to where they are copied to the device from."""
    pixels = torch.empty(sum(map(len, patches)), patch_dim, dtype=pixel_type, pin_memory=pinned)
    first = 0
    for part in patches:
        pixels[first:first + len(part)].copy_(torch.as_tensor(part))
        first += len(part)
    return pixels
