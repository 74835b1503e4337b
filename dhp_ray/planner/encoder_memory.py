"""Whether ranks hold what images encoded apart from the packs take, and whether they keep it until its backward pass.

Of a rank, beside its resident state, with E bytes of a patch from its forward to its backward pass, F bytes of a
feature's row, and packs of `pack_bytes + language_bytes_per_token * t` for t tokens a rank:

    held    2 F rows        features of all its packs, and their gradients
    packs   held + the largest pack's bytes
    kept    packs + E patches of its images                  where this fits on every rank, activations are kept
    pass    held + E patches of the pass                     else images are encoded again, in passes that fit

What fits is what a rank may hold of a pack that encodes its own images: `memory_bytes_per_token * tokens_per_rank`.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from dhp_ray.planner.cost import CostModel
from dhp_ray.planner.encoder_timeline import EncodedImages
from dhp_ray.planner.memory import LOGITS_HELD, MemoryModel
from dhp_ray.planner.memory_terms import COMPUTE_BYTES
from dhp_ray.planner.plan import VisionPlan
from dhp_ray.planner.problem import Problem
from dhp_ray.planner.schedule import Schedule


def with_encoder_apart(cost: CostModel, memory: MemoryModel, tokens: int) -> CostModel:
    """A cost with what a model's memory says of images that are encoded apart from packs of at most `tokens` a rank.

    A pack's bytes are a maximum of straight lines over its tokens, but for logits, which grow up to two chunks. Between
    such places they are below the line through both ends, so a line that is above them there is above all.
    """
    shape, settings = memory.shape, memory.settings
    if not shape.vision:
        return cost
    patches, chunk = tokens * shape.merge_area, max(1, LOGITS_HELD // shape.vocabulary_size)
    slope = (language_bytes(memory, tokens) - language_bytes(memory, 1)) / max(1, tokens - 1)
    above = [language_bytes(memory, length) - slope * length for length in (1, chunk, 2 * chunk, tokens)
             if length <= tokens]
    return replace(
        cost, vision_forward=cost.vision_forward if settings.trains("vision") else 1.0,
        feature_bytes=float(COMPUTE_BYTES[settings.precision] * shape.width * shape.feature_levels),
        encoder_bytes_per_patch=memory.encoder_bytes(patches) / patches,
        language_bytes_per_token=slope, pack_bytes=max(0.0, *above))


def language_bytes(memory: MemoryModel, tokens: int) -> float:
    """What a pack of so many tokens a rank adds where its images are encoded apart from it."""
    return sum(memory.memory(memory.worst_load(tokens)._replace(patches=0)).pack.values())


def world_within_memory(problem: Problem, schedule: Schedule, images: EncodedImages) -> VisionPlan | None:
    """How the images are encoded apart from the packs of a schedule; None where the ranks have no memory for that."""
    cost, cluster = problem.cost, problem.cluster
    limit = cost.memory_bytes_per_token * cluster.tokens_per_rank
    if cost.encoder_bytes_per_patch == 0.0 or limit == 0.0:
        return VisionPlan("world")
    tokens = np.add.reduceat(problem.items.tokens[schedule.rows], schedule.first_row[:-1])
    degrees = np.diff(schedule.first_rank)
    share = -(-tokens // degrees)
    of_pack = np.bincount(images.group, images.rows, len(degrees))
    pack, features = np.zeros(cluster.num_ranks), np.zeros(cluster.num_ranks)
    group = np.repeat(np.arange(len(degrees)), degrees)
    np.maximum.at(pack, schedule.ranks, (cost.pack_bytes + cost.language_bytes_per_token * share)[group])
    np.add.at(features, schedule.ranks, np.minimum(of_pack, share)[group])
    held = 2 * cost.feature_bytes * features
    patches = np.bincount(images.encoder, images.patches, cluster.num_ranks)
    largest = np.zeros(cluster.num_ranks)
    np.maximum.at(largest, images.encoder, images.patches)
    if (held + pack > limit).any() or (held + cost.encoder_bytes_per_patch * largest > limit).any():
        return None
    keeps = bool((held + pack + cost.encoder_bytes_per_patch * patches <= limit).all())
    pass_patches = max(1, int((limit - held.max()) / cost.encoder_bytes_per_patch))
    return VisionPlan("world", keeps or cost.vision_forward == 1.0, pass_patches)
