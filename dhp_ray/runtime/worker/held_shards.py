"""The shards that a worker holds, as it reports them to the driver."""

from __future__ import annotations

from collections.abc import Iterable

from dhp_ray.runtime.messages import HeldShards
from dhp_ray.schema import MAX_MIRROR_STEPS
from dhp_ray.train.state.reshard import LocalShard

VERSIONS_KEPT = 3 * MAX_MIRROR_STEPS + 2
"""The number of state versions whose last step is remembered: those since the last mirrored one but one, even if a step
that was to be mirrored had no update, and more.
"""


def held_shards(shards: Iterable[tuple[int, int, LocalShard]]) -> tuple[HeldShards, ...]:
    """Return the shard versions by generation. Each shard comes with its generation and the world size of that
    generation.
    """
    found: dict[tuple[int, int], dict[int, list[int]]] = {}
    for generation, world_size, shard in shards:
        found.setdefault((generation, world_size), {}).setdefault(shard.owner, []).append(shard.version)
    return tuple(HeldShards(generation, world_size, versions) for (generation, world_size), versions in found.items())
