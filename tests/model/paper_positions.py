"""M-RoPE as the paper writes it (Qwen2-VL, arXiv 2409.12191, section 2.1), token by token: a reference."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np


def paper_positions(
    is_vision: Sequence[bool], media: Iterable[tuple[tuple[int, int, int], float]]
) -> list[tuple[int, int, int]]:
    """Time, height and width of each token. `media` are the grid in tokens, and the positions between two steps in
    time, of each image and video. "When the input has several modalities, the position of each is the maximum position
    of the one before it, plus one."
    """
    found: list[tuple[int, int, int]] = []
    shown, start = iter(media), 0
    while len(found) < len(is_vision):
        if not is_vision[len(found)]:
            found.append((start, start, start))
            start += 1
            continue
        (time, height, width), interval = next(shown)
        found += [(start + int(np.float32(interval) * np.float32(step)), start + row, start + column)
                  for step in range(time) for row in range(height) for column in range(width)]
        start = max(map(max, found)) + 1
    assert next(shown, None) is None
    return found
