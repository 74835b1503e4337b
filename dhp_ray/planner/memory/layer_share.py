"""How many tokens of a pack a rank holds if activations go to host memory or layers are recomputed, and the share of
layers that packs of any size then have.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

import numpy as np

from dhp_ray.planner.memory.model import CHUNKS_HELD, LOGITS_HELD, MemoryModel
from dhp_ray.planner.plan.cluster import NO_OFFLOAD, NO_RECOMPUTATION, LayerShare, Offload, Recomputation

PLACES = 16
"""Number of pack sizes that are checked to fit, in addition to those where a pack's bytes bend."""


def largest_offload(
    memory: MemoryModel, memory_bytes: float, tokens: int, most: int, has_room: Callable[[int, float], bool]
) -> Offload:
    """What packs move so that the largest possible pack, of at most `most` tokens, fits on a device with
    `memory_bytes`, if ranks plan with packs of `tokens`, which fit without moving.

    `has_room`: whether a node has room for what packs of this many tokens a rank move at this share. If it has no room
    for less, it has none for more.
    """
    count = sum(layer.count for layer in memory.shape.language)
    shares = [number / count for number in range(1, count + 1)]

    def held(share: float) -> int:
        return memory.tokens_that_fit(memory_bytes, share)

    shares = shares[:bisect_left(shares, True, key=lambda share: not has_room(min(held(share), most), share))]
    largest = min(held(shares[-1]), most) if shares else 0
    if largest <= tokens:
        return NO_OFFLOAD
    # the least share that is enough: a part's last two layers are on the device at some time in any case
    share = shares[bisect_left(shares, largest, key=held)]
    return Offload(share, from_tokens(memory, memory_bytes, tokens, largest, Offload(share, 0, largest)), largest,
                   tokens)


def largest_recomputation(memory: MemoryModel, memory_bytes: float, tokens: int, most: int) -> Recomputation:
    """The layers that packs recompute so that the largest possible pack, of at most `most` tokens, fits on a device
    with `memory_bytes`, if ranks plan with packs of `tokens`, which fit without recomputation.
    """
    largest = min(memory.tokens_that_fit(memory_bytes, recomputed=1.0), most)
    if largest <= tokens:
        return NO_RECOMPUTATION
    share = 1.0 if largest < most else _least_share(memory, memory_bytes, largest, Recomputation(1.0, 0, largest))
    return Recomputation(share, from_tokens(memory, memory_bytes, tokens, largest, Recomputation(share, 0, largest)),
                         largest, tokens)


def from_tokens(memory: MemoryModel, memory_bytes: float, tokens: int, largest: int, most: LayerShare) -> int:
    """`LayerShare.from_tokens`, such that packs of more than `tokens` up to `largest`, which have `most.share`, all
    fit: `tokens`, or fewer if a pack's bytes are not linear in its tokens.

    A pack's bytes are a maximum of lines, except for images, whose most loaded rank has one more than the others, and
    logits. The least share that fits is computed at the tokens where these bend, and at some between.
    """
    chunk, share = max(1, LOGITS_HELD // memory.shape.vocabulary_size), most.share
    places = {memory.settings.largest_image, memory.settings.image_limit or largest, chunk, CHUNKS_HELD * chunk,
              *np.geomspace(tokens, largest, PLACES).astype(int).tolist()}
    latest = float(tokens)
    for place in places:
        if tokens < place < largest:
            needed = _least_share(memory, memory_bytes, place, most)
            # share (1 - from / place) / (1 - from / largest) is at least this
            latest = min(latest, (share - needed) / (share / place - needed / largest))
    return max(0, int(latest))


def _least_share(memory: MemoryModel, memory_bytes: float, tokens: int, most: LayerShare) -> float:
    low, high = 0.0, most.share
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (low, middle) if memory.fits(memory_bytes, tokens, **most.of_load(middle)) else (middle, high)
    return high
