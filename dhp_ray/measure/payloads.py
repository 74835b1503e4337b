"""Random tokens and patches for the samples that are measured."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, zip_longest
from math import prod

import numpy as np

from dhp_ray.model.adapter import ModelAdapter
from dhp_ray.model.loss import IGNORED
from dhp_ray.planner.plan import Sample
from dhp_ray.train.payload import Payload


def payload_of(sample: Sample, adapter: ModelAdapter, encoded_here: Sequence[bool]) -> Payload:
    """Random tokens and patches for a sample: its images stand between pieces of the first half of its text; the second
    half has labels, like an answer.
    """
    drawn = np.random.default_rng(sum(map(ord, sample.id)))
    # the lowest ids are plain text in all tokenizers here
    plain = min(adapter.vocabulary_size, adapter.image_token_id, adapter.video_token_id)
    half = sample.text_tokens // 2
    pieces = np.array_split(drawn.integers(0, plain, half), max(1, len(sample.vision_grids)))
    images = [np.full(prod(grid) // adapter.merge_area, adapter.image_token_id) for grid in sample.vision_grids]
    answer = drawn.integers(0, plain, sample.text_tokens - half)
    ids = np.concatenate([*chain.from_iterable(zip_longest(pieces, images, fillvalue=answer[:0])), answer])
    labels = np.where(np.arange(len(ids)) < len(ids) - len(answer), IGNORED, ids)
    pixels = [drawn.standard_normal((prod(grid), adapter.patch_dim), dtype=np.float32) if here else None
              for grid, here in zip(sample.vision_grids, encoded_here)]
    return Payload(input_ids=ids.astype(np.int32), labels=labels.astype(np.int32),
                   grids=np.array(sample.vision_grids, np.int64).reshape(-1, 3), pixels=list(pixels))
