"""Recomputes layers of single packs (activation checkpointing, arXiv 1604.06174), as many as the plan says.

    share 0.5 of 6 layers   forward     0 1 2 3 4 5      layers 0 to 2 keep their input alone
                            backward    5 4 3 | 2 2 1 1 0 0

The first layers are recomputed: in the backward pass the others are over by then, so what one layer keeps while it runs
again comes in addition to inputs alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from dhp_ray.model.adapter import ModelAdapter


@contextmanager
def recomputing(adapter: ModelAdapter, share: float) -> Iterator[None]:
    """Put this around the forward pass of a pack of which this share of the layers is recomputed (0: as always)."""
    if not share or not torch.is_grad_enabled():
        yield
        return
    adapter.set_activation_checkpointing(share)
    try:
        yield
    finally:
        adapter.set_activation_checkpointing(0.0)
