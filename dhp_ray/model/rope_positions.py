"""M-RoPE: rotary positions in time, height and width (Qwen2-VL, arXiv 2409.12191, section 2.1)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def mrope_positions(is_vision: Tensor, grids: Sequence[Sequence[int]], intervals: Sequence[float]) -> Tensor:
    """The positions (3, L) of one sequence, int64, in time, height and width.

    Text counts on all axes alike. An image or video begins where the text before it ends, and the text behind it goes
    on after its largest position on any axis: behind a long video that is its time. This is how the published weights
    were trained, and what serving engines compute. transformers 5 goes on after the larger side of the picture.

    Args:
        is_vision: (L,) bool, the tokens of images and videos.
        grids: time, height and width in tokens of each image and video, in the order of the sequence.
        intervals: positions between two steps in time of each, as a fraction; the product with the step is cut off.
    """
    places = is_vision.nonzero()[:, 0].tolist()
    found, done, taken, position = [], 0, 0, 0
    for (time, height, width), interval in zip(grids, intervals, strict=True):
        num_text = places[taken] - done
        start = position + num_text
        steps = (torch.arange(time, dtype=torch.float32) * interval).long()
        block = torch.stack(torch.meshgrid(steps, torch.arange(height), torch.arange(width), indexing="ij"))
        found += [torch.arange(position, start).expand(3, -1), start + block.flatten(1)]
        position = start + int(block.max()) + 1
        done += num_text + time * height * width
        taken += time * height * width
    return torch.cat([*found, torch.arange(position, position + len(is_vision) - done).expand(3, -1)], 1)
