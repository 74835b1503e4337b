"""The data of a sample for the ranks that run or encode it, and the check that it is what was planned."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from math import prod

import numpy as np
import torch
from torch import Tensor

from dhp_ray.model.adapter import ModelAdapter
from dhp_ray.model.loss import IGNORED
from dhp_ray.planner.plan.types import Grid, Sample, cut_in_time


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


def tokens_of_parts(grid: Grid, num_parts: int, adapter: ModelAdapter) -> list[Tensor]:
    """Return which tokens of an image each of its parts makes, in the order of the part's feature rows; all of them for
    one part.
    """
    sizes = [prod(part) // adapter.merge_area for part in cut_in_time(grid, num_parts)]
    return list(torch.arange(sum(sizes)).split(sizes))


def image_tokens(payload: Payload, adapter: ModelAdapter) -> list[Tensor]:
    """Return where the tokens of each image or piece of a video are in their sample."""
    ids = torch.from_numpy(payload.input_ids)
    places = ((ids == adapter.image_token_id) | (ids == adapter.video_token_id)).nonzero()[:, 0]
    return list(places.split([int(np.prod(grid)) // adapter.merge_area for grid in payload.grids]))
