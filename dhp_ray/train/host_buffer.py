"""Host memory that a rank's packs use one after the other, in chunks that are kept."""

from __future__ import annotations

import torch
from torch import Tensor

from dhp_ray.planner.memory.host import CHUNK_BYTES

ALIGNED_BYTES = 64
"""A tensor begins at a multiple of this: values of any type are aligned there."""


class HostBuffer:
    """Grows to the most that was in use at a time. `pinned`: so that a device copies to it and from it asynchronously.
    """

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self._chunks: list[Tensor] = []
        self.used_bytes = 0

    @property
    def num_bytes(self) -> int:
        """The bytes of all chunks."""
        return len(self._chunks) * CHUNK_BYTES

    def clear(self) -> None:
        """Use it from the start again. Users of earlier pieces must be done with them, or copy in the same stream."""
        self.used_bytes = 0

    def take(self, num_bytes: int) -> list[Tensor]:
        """Return pieces (bytes,) uint8 that together have `num_bytes`, each of them aligned."""
        begin = -(-self.used_bytes // ALIGNED_BYTES) * ALIGNED_BYTES
        self.used_bytes = end = begin + num_bytes
        while self.num_bytes < end:
            self._chunks.append(self._chunk())
        return [self._chunks[place][max(0, begin - place * CHUNK_BYTES):end - place * CHUNK_BYTES]
                for place in range(begin // CHUNK_BYTES, -(-end // CHUNK_BYTES))]

    def _chunk(self) -> Tensor:
        return torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=self._pinned)
