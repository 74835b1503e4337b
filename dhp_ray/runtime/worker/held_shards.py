"""What a worker holds of the state, as it tells the driver."""

from __future__ import annotations

from collections.abc import Iterable

from dhp_ray.runtime.messages import HeldShards
from dhp_ray.train.state.reshard import LocalShard


def held_shards(shards: Iterable[tuple[int, int, LocalShard]]) -> tuple[HeldShards, ...]:
    """Shard versions by generation. Each shard comes with its generation and that one's number of ranks."""
    found: dict[tuple[int, int], dict[int, list[int]]] = {}
    for generation, world_size, shard in shards:
        found.setdefault((generation, world_size), {}).setdefault(shard.owner, []).append(shard.version)
    return tuple(HeldShards(generation, world_size, versions) for (generation, world_size), versions in found.items())
