"""Whether ranks hold what images encoded apart from the packs take, and whether they keep it until its backward pass.

Of a rank, beside its resident state, with E bytes of a patch from its forward to its backward pass, F bytes of a
feature's row, and packs of `pack_bytes + language_bytes_per_token * t` for t tokens a rank:

    held    2 F rows        features of all its packs, and their gradients
    packs   held + the largest pack's bytes
    kept    packs + E patches of its images                  where this fits on every rank, activations are kept
    pass    held + B + E patches of the pass                 else images are encoded again, in passes that fit

B are the bytes of a pass that do not grow with it: with sync=micro_batch, parameters that have come from other ranks.

What fits is what a rank may hold of a pack that encodes its own images: `memory_bytes_per_token * tokens_per_rank`.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from dhp_ray.planner.cost import CostModel
from dhp_ray.planner.encoder_timeline import EncodedImages
from dhp_ray.planner.memory import LOGITS_HELD, SMALLEST_IMAGE, MemoryModel
from dhp_ray.planner.memory_terms import COMPUTE_BYTES, PackLoad
from dhp_ray.planner.plan import VisionPlan
from dhp_ray.planner.problem import Problem
from dhp_ray.planner.schedule import Schedule


def with_encoder_apart(cost: CostModel, memory: MemoryModel, tokens: int) -> CostModel:
    """A cost with what a model's memory says of images that are encoded apart from packs of at most `tokens` a rank.

    A pack's bytes are a maximum of straight lines over its tokens, but for logits, which grow up to two chunks. Between
    such places they are below the line through both ends, so a line that is above them there is above all. Those of a
    pass of the encoder are a maximum of straight lines over its patches, with a step for every SMALLEST_IMAGE of them:
    below the steepest of these lines, raised to where it is above the first step.
    """
    shape, settings = memory.shape, memory.settings
    if not shape.vision:
        return cost
    patches, chunk = tokens * shape.merge_area, max(1, LOGITS_HELD // shape.vocabulary_size)
    slope = (language_bytes(memory, tokens) - language_bytes(memory, 1)) / max(1, tokens - 1)
    above = [language_bytes(memory, length) - slope * length for length in (1, chunk, 2 * chunk, tokens)
             if length <= tokens]
    many = -(-patches // SMALLEST_IMAGE) * SMALLEST_IMAGE
    of_patch = (encoder_bytes(memory, 2 * many) - encoder_bytes(memory, many)) / many
    of_pass = max(encoder_bytes(memory, count) - of_patch * count for count in (1, SMALLEST_IMAGE))
    return replace(
        cost, vision_forward=1 / (3 + settings.recomputes) if settings.trains("vision") else 1.0,
        feature_bytes=float(COMPUTE_BYTES[settings.precision] * shape.width * shape.feature_levels),
        encoder_gather_s=gathered_bytes(memory) / cost.slowest_bytes_per_s,
        encoder_bytes_per_patch=of_patch, encoder_bytes=max(0.0, of_pass),
        language_bytes_per_token=slope, pack_bytes=max(0.0, *above))


def gathered_bytes(memory: MemoryModel) -> float:
    """Of the encoder's parameters that a rank receives for a pass, forward and backward, and of the gradients that it
    sends; 0 where it has all parameters."""
    shape, settings = memory.shape, memory.settings
    if settings.sync != "micro_batch":
        return 0.0
    trained = settings.trains("vision")
    bytes_ = COMPUTE_BYTES[settings.precision] * (1 + trained) + 4 * settings.trains_weights("vision")
    return bytes_ * shape.parameters_by_part()["vision"] * (settings.world_size - 1) / settings.world_size


def encoder_bytes(memory: MemoryModel, patches: int) -> float:
    """What a rank needs to encode images of so many patches apart from packs, forward and backward, with their features
    and the gradients of these. Nothing is there then of the language model."""
    shape, load = memory.shape, PackLoad(0, patches=patches, sequences=patches // SMALLEST_IMAGE + 1)
    gone = ("gathered: embedding, head", "gradient of the head")
    found = [sum(value for term, value in terms.items() if term not in gone)
             for name, terms in memory.moments(load).items() if name.startswith("vision")]
    width = shape.width * shape.feature_levels
    return max(found) + 2 * COMPUTE_BYTES[memory.settings.precision] * width * patches / shape.merge_area


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
    in_pass = held + cost.encoder_bytes
    if (held + pack > limit).any() or (in_pass + cost.encoder_bytes_per_patch * largest > limit).any():
        return None
    keeps = bool((np.maximum(held + pack, in_pass) + cost.encoder_bytes_per_patch * patches <= limit).all())
    pass_patches = max(1, int((limit - in_pass.max()) / cost.encoder_bytes_per_patch))
    return VisionPlan("world", keeps or cost.vision_forward == 1.0, pass_patches)
