"""Bytes that a rank keeps in the memory of its node, in addition to those on its device.

With T trained parameters on N ranks a version of a shard is 12 T / N bytes: values and both moments, fp32.

    replicas       2 versions of another rank's shard (`elastic.mirror_every_steps`)
    own shard      1 to send from, pinned (not on the CPU), each rounded up (`pinned_bytes`); 2 if not every version is
                   mirrored
    checkpoint     1, while it is written
    change         of the previous generation, until the next one has taken its first step: 2 of its own, 2 of the
                   replica, and the 2 that were mirrored last if not every version is mirrored
    pixels         decoded patches of a full pack of this step and of the next, in fp32; a rank that runs more packs
                   in a step keeps theirs as well, which is not counted
    activations    those that a pack moves there, pinned (not on the CPU), in chunks that stay
                   (`train/activation_offload.py`)

Each rank is assumed to keep one replica; on nodes of unequal size some keep more, and others none.

In the export a rank holds the file that it writes (`export_bytes`), while nothing of a change is kept. Ray's object
store is not included: it has its own limit, and spills to disk.
"""

from __future__ import annotations

import math

from dhp_ray.planner.memory.model import MemoryModel, MemorySettings, Terms
from dhp_ray.planner.memory.model_shape import ModelShape

CHANGE = "change of members"
ACTIVATIONS = "activations"

CHUNK_BYTES = 64 * 2**20
"""The memory for activations grows by this. A power of two: other sizes would take up to twice their bytes
(`pinned_bytes`).
"""

LARGEST_FILE_BYTES = 5 * 10**9
"""The largest file of an exported model, unless a single tensor is larger."""

SMALLEST_FILE_BYTES = 64 * 2**20
"""The smallest file of an exported model except the last: a rank has room for a slice of this size anyway."""


def host_terms(
    shape: ModelShape, settings: MemorySettings, tokens_per_rank: int, moved_bytes: float = 0.0
) -> Terms:
    """Bytes of each term, for packs with this many tokens a rank that move at most this many bytes of activations."""
    every = settings.mirror_every_steps if settings.world_size > 1 else "0"
    version = 12 * math.ceil(settings.num_trained(shape) / settings.world_size)
    on_device = settings.device != "cpu"
    own = {"0": 0, "1": int(on_device)}.get(every, 2)
    own_version = pinned_bytes(version) if on_device else version
    change = 0 if settings.world_size == 1 else (2 + 2 * (every != "0")) * version + 2 * (own == 2) * own_version
    pixels = tokens_per_rank * shape.merge_area * shape.patch_dim * 4
    activations = math.ceil(moved_bytes / CHUNK_BYTES) * CHUNK_BYTES
    return {"replicas": 2 * version if every != "0" else 0,
            "pinned, own shard" if on_device else "own shard": own * own_version,
            "checkpoint being written": version, CHANGE: change, "pixels": 2 * pixels,
            **({ACTIVATIONS: activations} if activations else {})}


def pinned_bytes(num_bytes: int) -> int:
    """Bytes that a tensor in pinned memory takes: torch's allocator rounds each request up to a power of two
    (CachingHostAllocator.h).
    """
    return int(1 << (num_bytes - 1).bit_length())


def node_terms(memory: MemoryModel, tokens: int, count: int, share: float = 0.0) -> Terms:
    """What `count` ranks keep in their node's memory, for packs with this many tokens a rank that move a share of their
    activations there.
    """
    settings = memory.settings
    moved_bytes = memory.moved_bytes(memory.worst_load(tokens, share)) if share else 0.0
    terms = {name: count * value for name, value in host_terms(memory.shape, settings, tokens, moved_bytes).items()}
    export = export_bytes(memory.shape, settings, count)
    if export > terms[CHANGE]:  # never at the same time
        terms["model, exported"] = export - terms[CHANGE]
    if settings.device == "cpu":
        terms["state"] = count * sum(memory.resident().values())
    return terms


def export_bytes(shape: ModelShape, settings: MemorySettings, count: int) -> int:
    """Memory that the export of the model takes on a node with `count` ranks: a different file for each
    (`model/export.py`), and once more the experts of a layer, which may have another form there; for adapters (LoRA)
    the single file.
    """
    if settings.adapters:
        return 4 * settings.num_trained(shape)
    world_size, whole = settings.world_size, 4 * shape.num_parameters()
    file = min(max(math.ceil(whole / (2 * world_size)), SMALLEST_FILE_BYTES), LARGEST_FILE_BYTES)
    experts = max(4 * 2 * layer.experts * layer.mlp_width * layer.width for layer in shape.language)
    return min(whole, count * max(file, 4 * shape.embedding_parameters, experts)) + count * experts
