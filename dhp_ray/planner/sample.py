"""What the planner knows of one sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dhp_ray.planner.image_parts import Grid


@dataclass(frozen=True, slots=True)
class Sample:
    """Lengths of one sequence. `vision_tokens` are counted after the merger. `vision_grids` has one entry for each
    image (or video), in order: its patches as (time, height, width), before the merger.
    """

    id: str
    text_tokens: int
    vision_tokens: int = 0
    vision_grids: tuple[Grid, ...] = ()

    @property
    def num_tokens(self) -> int:
        return self.text_tokens + self.vision_tokens


def samples_to_json(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """The same as `dataclasses.asdict`, which takes 16 times as long; a plan file has every sample of a batch."""
    return [{"id": sample.id, "text_tokens": sample.text_tokens, "vision_tokens": sample.vision_tokens,
             "vision_grids": sample.vision_grids} for sample in samples]


def samples_from_json(rows: Sequence[dict[str, Any]]) -> tuple[Sample, ...]:
    return tuple(
        Sample(
            row["id"],
            row["text_tokens"],
            row["vision_tokens"],
            tuple((int(t), int(h), int(w)) for t, h, w in row["vision_grids"]),
        )
        for row in rows
    )
