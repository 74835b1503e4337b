"""Which process groups a bounded pool holds: only the decisions, so that a planner can predict what ranks will do.

    take(plan's groups)   hit ... create ... evict, create ... overflow      in the order in which ranks carry them out
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Literal

Key = tuple[int, ...]
"""The sorted ranks of a group."""
Change = tuple[Literal["hit", "create", "evict", "overflow"], Key]


class GroupCacheState:
    """The keys of at most `capacity` groups, least recently used first. Equal calls leave equal states on all ranks."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._keys: OrderedDict[Key, None] = OrderedDict()

    def held(self) -> list[Key]:
        """Return the keys, least recently used first."""
        return list(self._keys)

    def take(self, process_groups: Sequence[Sequence[int]]) -> Iterator[Change]:
        """Yield the changes that make a plan's groups ready; each is recorded as it is yielded.

        A group for which there is no room, because all others belong to the same plan, overflows.
        """
        wanted = dict.fromkeys(key_of(ranks) for ranks in process_groups if len(ranks) > 1)
        hits = {key: None for key in wanted if key in self._keys}
        for key in hits:
            self._keys.move_to_end(key)
            yield "hit", key
        for key in (key for key in wanted if key not in hits):
            if len(self._keys) >= self.capacity:
                oldest = next((other for other in self._keys if other not in wanted), None)
                if oldest is None:
                    yield "overflow", key
                    continue
                del self._keys[oldest]
                yield "evict", oldest
            self._keys[key] = None
            yield "create", key


def key_of(ranks: Sequence[int]) -> Key:
    """Return the key of a group. Packs that pass the same ranks in another ring order share a group."""
    return tuple(sorted(ranks))
