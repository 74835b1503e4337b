"""Turns the payloads of a pack into the inputs of one of its ranks.

Every member computes the layout of the whole pack alike, from token ids and grids alone, so nothing has to be agreed
on:

    packed sequence   t t I I I t | t I I t t t    labels shifted and positions counted per sequence, before sharding
    member 0          ^ ^       ^   ^         ^        its intervals (PackLayout), in local order
    feature rows          0 1 2       3 4              encoded by the members that `Pack.encoders` names
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, groupby
from math import prod

import numpy as np
import torch
from torch import Tensor

from dhp_ray.model.attention import segments_of
from dhp_ray.model.experts import Routing
from dhp_ray.model.language_model import EncoderArguments, LanguageModel
from dhp_ray.model.layout import PackLayout
from dhp_ray.model.lora import token_keys
from dhp_ray.model.loss import IGNORED, valid_tokens
from dhp_ray.model.pieces import Pieces, pieces_of
from dhp_ray.model.segment_attention import Segments
from dhp_ray.model.tensor_fields import TensorFields
from dhp_ray.model.window import Window, window_of
from dhp_ray.planner.plan.types import Grid, Pack, Sample, cut_in_time, encoding_ranks


@dataclass(kw_only=True)
class Payload:
    """The data of one sample for a pack: token ids (L,) int32, labels (L,) int32 unshifted with -100 where masked,
    grids (N, 3), and for every image its patches (P, patch_dim) float32, or None if another rank encodes it.

    A grid is an image, or a piece of a video in time. `media` (N,) has the number of each grid's image or video, so
    that neighbours with the same number are one video; `seconds` (N,) is the length of one step in time of a video, and
    0 for an image. Without the two, every grid is an image.

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
        """Return the grids (M, 3) of whole images and videos, and seconds (M,)."""
        grids = np.asarray(self.grids, np.int64).reshape(-1, 3)
        if self.media is None or self.seconds is None:
            return grids, np.zeros(len(grids))
        first = np.flatnonzero(np.diff(self.media, prepend=-1))
        whole = grids[first]
        whole[:, 0] = np.add.reduceat(grids[:, 0], first) if len(first) else 0
        return whole, np.asarray(self.seconds, np.float64)[first]


def placeholder(sample: Sample) -> Payload:
    """Return a payload that keeps the place of a sample that cannot be used: as many tokens, none of which counts."""
    return Payload(input_ids=np.zeros(sample.num_tokens, np.int32),
                   labels=np.full(sample.num_tokens, IGNORED, np.int32),
                   grids=np.zeros((0, 3), np.int64), pixels=[], masked=True)


def check_payload(
    sample: Sample, payload: Payload, adapter: LanguageModel, encoded_here: tuple[bool, ...] = ()
) -> None:
    """Refuse a payload that is not what was planned (ValueError); a rank calls it a batch ahead, before others depend
    on the sample. `encoded_here` says of each image whether this rank encodes it and so needs its pixels.
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
    tokens = adapter.vision_token_ids
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


def tokens_of_parts(grid: Grid, num_parts: int, adapter: LanguageModel) -> list[Tensor]:
    """Return which tokens of an image each of its parts makes, in the order of the part's feature rows."""
    sizes = [prod(part) // adapter.merge_area for part in cut_in_time(grid, num_parts)]
    return list(torch.arange(sum(sizes)).split(sizes))


def image_tokens(payload: Payload, adapter: LanguageModel) -> list[Tensor]:
    """Return where the tokens of each image or piece of a video are in their sample."""
    places = torch.from_numpy(np.isin(payload.input_ids, adapter.vision_token_ids)).nonzero()[:, 0]
    return list(places.split([int(np.prod(grid)) // adapter.merge_area for grid in payload.grids]))


@dataclass(kw_only=True)
class PackInputs(TensorFields):
    """One rank's part of a pack: L tokens, K of them of images; it encodes N images of P patches."""

    layout: PackLayout
    member: int
    token_ids: Tensor
    """(L,) int64."""
    labels: Tensor
    """(L,) int64, shifted, -100 where masked."""
    valid_index: Tensor
    """(number of labels that count,) int64: where they are among the local tokens."""
    segments: tuple[Segments, ...]
    """Which tokens of every member this member's tokens see: `segments_of` the layout."""
    positions: Tensor
    """(3, L) int64."""
    pixels: Tensor
    """(P, patch_dim), fp32 or the type that the model computes in."""
    grids: tuple[Grid, ...]
    """The grids of the N images; on the host."""
    encoder: EncoderArguments
    """The encoder's arguments from the grids; empty without an image."""
    vision_token_index: Tensor
    """(K,) int64: the local position of each received feature row, in the order of receipt."""
    send_index: list[Tensor]
    """For every member, the rows of my features that it needs, in its order of receipt."""
    receive_counts: list[int]
    """For every member, how many feature rows come from it."""
    num_images: int
    """Images that the whole pack encodes."""
    received_from: dict[int, int] = field(default_factory=dict)
    """If images are encoded apart from the pack: how many feature rows come from each rank, in order."""
    features: Tensor | None = None
    """(K, F), the received rows in their order, if images are encoded apart from the pack: a leaf, which gets a
    gradient if the encoder is trained.
    """
    pieces: Pieces | None = None
    """What layers that carry a state from token to token need to know; None: the model has none."""
    window: Window | None = None
    """What layers that attend within a sliding window need to know; None: the model has none."""
    dropout_keys: Tensor | None = None
    """(max(L, 1),) int32: from which dropout is drawn; None: nothing is dropped."""
    sequence_of: Tensor | None = None
    """(L,) int64: the place of each token's sequence in the pack; None: the model has no experts."""
    sequences: Tensor | None = None
    """(S, 2) int64: tokens and labels of each sequence of the pack, on all members."""
    routing: Routing | None = None
    """Where the routers of experts count, of a pack that is trained on."""
    offload: float = 0.0
    """Share of the layers whose activations go to host memory until the backward pass needs them."""
    recomputed: float = 0.0
    """Share of the layers that keep their input alone and run again in the backward pass."""
    predicts: bool = False
    """Whether the result is the most likely token after each valid token, and not the loss."""

    @property
    def num_valid_tokens(self) -> int:
        """Labels of this rank that count."""
        return len(self.valid_index)


def collate(
    pack: Pack, payloads: Mapping[str, Payload], rank: int, adapter: LanguageModel,
    pixel_type: torch.dtype = torch.float32, pinned: bool = False, step: int = 0, apart: bool = False,
) -> PackInputs:
    """Return the inputs of `rank`'s part of a pack of a `step`, on the CPU; `pinned`: with its pixels in pinned memory;
    `apart`: its images are encoded apart from it, and none here.
    """
    member, degree = pack.ranks.index(rank), len(pack.ranks)
    layout = adapter.layout([sample.num_tokens for sample in pack.samples], degree)
    columns, patches, grids, num_images = _packed(pack, payloads, rank, adapter, apart)
    indices = [layout.index(other) for other in range(degree)]
    mine = indices[member]
    token_ids, all_labels, owner_of, feature_of = columns[:4]
    sources = sorted({*chain(*encoding_ranks(pack.encoders, pack.splits))}) if apart else pack.ranks
    received = {other: (owner_of[mine] == other).nonzero()[:, 0] for other in sources}
    send_index = [] if apart else [feature_of[index][owner_of[index] == rank] for index in indices]
    labels = all_labels[mine]
    sequence_of, sequences = _sequences(pack, all_labels) if adapter.num_experts else (None, None)
    return PackInputs(
        layout=layout, member=member, token_ids=token_ids[mine], labels=labels,
        valid_index=valid_tokens(labels), segments=segments_of(layout, member), positions=columns[4:, mine],
        pixels=joined(patches, adapter.patch_dim, pixel_type, pinned), grids=grids,
        encoder=adapter.encoder_arguments(grids),
        vision_token_index=torch.cat([torch.empty(0, dtype=torch.int64), *received.values()]), send_index=send_index,
        receive_counts=[] if apart else [len(rows) for rows in received.values()],
        received_from={other: len(rows) for other, rows in received.items() if len(rows)} if apart else {},
        num_images=num_images, sequence_of=None if sequence_of is None else sequence_of[mine], sequences=sequences,
        pieces=None if adapter.looks_back is None else pieces_of(layout, member, adapter.looks_back),
        window=None if adapter.window is None else window_of(layout, member, adapter.window),
        dropout_keys=_dropout_keys(pack, mine, adapter, step), offload=pack.offload,
        recomputed=pack.recomputed)


def _dropout_keys(pack: Pack, index: Tensor, adapter: LanguageModel, step: int) -> Tensor | None:
    """Return the dropout keys of the tokens at `index` (L,) of the packed sequence; None: nothing is dropped."""
    lora = adapter.lora
    if lora is None or not lora.dropout:
        return None
    if not len(index):
        return torch.zeros(1, dtype=torch.int32)
    return torch.cat([token_keys(lora.seed, step, sample.id, sample.num_tokens) for sample in pack.samples])[index]


def _sequences(pack: Pack, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return each packed token's sequence, and tokens and labels of the sequences (`PackInputs.sequences`)."""
    lengths = torch.tensor([sample.num_tokens for sample in pack.samples])
    sequence_of = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    counts = torch.bincount(sequence_of[labels != IGNORED], minlength=len(lengths))
    return sequence_of, torch.stack((lengths, counts), 1)


def with_tiny_image(inputs: PackInputs, adapter: LanguageModel) -> PackInputs:
    """Return the inputs with a smallest image that no token uses, on the CPU: its gradient is zero."""
    grids = (adapter.smallest_grid,)
    return replace(inputs, grids=grids, pixels=inputs.pixels.new_zeros(prod(grids[0]), adapter.patch_dim),
                   encoder=adapter.encoder_arguments(grids))


def _packed(
    pack: Pack, payloads: Mapping[str, Payload], rank: int, adapter: LanguageModel, apart: bool
) -> tuple[Tensor, list[np.ndarray | Tensor], tuple[Grid, ...], int]:
    """Return a pack before sharding: columns (7, L) of its tokens, the patches and grids of the images that `rank`
    encodes, and how many images there are.

    A column has the token's id, its label, the rank that encodes it if it is an image's, its row among the features of
    that rank, and its positions on three axes.
    """
    columns: list[Tensor] = []
    needed: list[np.ndarray | Tensor] = []
    num_rows = dict.fromkeys(pack.encoders, 0)
    ranks_of = encoding_ranks(pack.encoders, pack.splits)
    grids: list[Grid] = []
    first_image = num_images = 0
    for sample in pack.samples:
        if sample.id not in payloads:
            raise ValueError(f"sample {sample.id}: no payload for pack {pack.index}")
        payload = payloads[sample.id]
        encoders = ranks_of[first_image:first_image + len(sample.vision_grids)]
        first_image += len(sample.vision_grids)
        if payload.masked:
            payload, encoders = placeholder(sample), []
        check_payload(sample, payload, adapter, () if apart else tuple(rank in ranks for ranks in encoders))
        ids = torch.from_numpy(payload.input_ids.astype(np.int64))
        shifted = np.full(len(ids), IGNORED, np.int64)
        shifted[:-1] = payload.labels[1:]
        owner, feature = torch.full_like(ids, -1), torch.full_like(ids, -1)
        places = image_tokens(payload, adapter) if encoders else []
        for place, grid, ranks, patches in zip(places, sample.vision_grids, encoders, payload.pixels):
            for encoder, tokens in zip(ranks, tokens_of_parts(grid, len(ranks), adapter)):
                owner[place[tokens]] = encoder
            if apart:
                continue
            (encoder,) = ranks
            feature[place] = torch.arange(num_rows[encoder], num_rows[encoder] + len(place))
            num_rows[encoder] += len(place)
            if encoder == rank:
                assert patches is not None  # check_payload
                needed.append(patches)
                grids.append(grid)
        num_images += len(encoders)
        positions = adapter.positions(ids, *map(torch.from_numpy, payload.whole()))
        columns.append(torch.stack((ids, torch.from_numpy(shifted), owner, feature, *positions)))
    return torch.cat(columns, 1), needed, tuple(grids), num_images


def joined(patches: Sequence[np.ndarray | Tensor], patch_dim: int, pixel_type: torch.dtype, pinned: bool) -> Tensor:
    """Return the patches (P, patch_dim) of all images, written once, to where the device copies them from."""
    pixels = torch.empty(sum(map(len, patches)), patch_dim, dtype=pixel_type, pin_memory=pinned)
    first = 0
    for part in patches:
        pixels[first:first + len(part)].copy_(torch.as_tensor(part))
        first += len(part)
    return pixels
