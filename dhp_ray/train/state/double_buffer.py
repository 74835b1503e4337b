"""Two versions of a shard in host memory, of which one is whole at any moment."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from dhp_ray.train.state.buckets import Piece
from dhp_ray.train.state.optimizer import UNFINISHED, ShardState


@dataclass
class DoubleBuffer:
    """Two versions of one rank's shard: the front buffer stays as it is while the back buffer is filled."""

    pieces: tuple[Piece, ...]
    front: ShardState
    back: ShardState
    counts: Tensor = field(default_factory=lambda: torch.zeros(2, dtype=torch.int64))
    """The version that the back buffer will hold, and its `vision_updates`; they are sent along."""

    @classmethod
    def empty(cls, pieces: tuple[Piece, ...], size: int, pinned: bool = False, versions: int = 2) -> DoubleBuffer:
        """`versions`: 1 for a place to send from, which keeps nothing."""
        states = [ShardState.zeros(size, torch.device("cpu"), pinned) for _ in range(versions)]
        for state in states:
            state.version = UNFINISHED
        return cls(pieces, states[0], states[-1])

    def swap(self) -> None:
        """The back buffer is complete: it becomes the front buffer."""
        self.back.version, self.back.vision_updates = self.counts.tolist()
        self.front, self.back = self.back, self.front

    def complete(self) -> list[ShardState]:
        """Return the complete versions, oldest first."""
        found = {state.version: state for state in (self.back, self.front) if state.version != UNFINISHED}
        return [found[version] for version in sorted(found)]
