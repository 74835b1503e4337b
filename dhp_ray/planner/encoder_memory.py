"""Whether ranks have memory for images encoded apart from the packs, and for keeping their activations.

Bytes of a rank in addition to its resident state, if a patch takes E bytes from its forward to its backward pass and a
row of features F bytes, and a pack takes `pack_bytes + language_bytes_per_token * t` for t tokens a rank:

    held    2 F rows        features of all its packs, and their gradients
    packs   held + the largest pack's bytes                  with activations in host memory up to `most_pack_bytes`
    kept    packs + E patches of its images                  if this fits on every rank, activations are kept
    pass    held + B + E patches of the pass                 otherwise images are encoded again, in passes that fit

B are the bytes of a pass that do not grow with it: with sync=micro_batch, parameters gathered from other ranks.

The limit is what a rank may hold of a pack that encodes its own images: `memory_bytes_per_token * tokens_per_rank`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from dhp_ray.planner.cost import CostModel
from dhp_ray.planner.derived_cost import gathered_bytes, with_offload_bytes
from dhp_ray.planner.encoded_images import EncodedImages
from dhp_ray.planner.layer_share import NO_OFFLOAD, LayerShare
from dhp_ray.planner.memory import CHUNKS_HELD, LOGITS_HELD, SMALLEST_IMAGE, MemoryModel
from dhp_ray.planner.memory_terms import COMPUTE_BYTES, PackLoad
from dhp_ray.planner.plan import ClusterSpec, VisionPlan
from dhp_ray.planner.problem import Problem
from dhp_ray.planner.schedule import Schedule


def with_encoder_apart(
    cost: CostModel, memory: MemoryModel, tokens: int, beyond: LayerShare = NO_OFFLOAD
) -> CostModel:
    """The cost with the constants, from a model's memory, for images encoded apart from packs of at most `tokens` a
    rank, or more `beyond` that with layers whose activations are moved or recomputed.

    A pack's bytes are a maximum of straight lines over its tokens, except for logits, which grow up to one chunk, and
    their gradients, up to several. Between such places they are below the line through both ends, so a line that is
    above them at these places is above them everywhere. The bytes of an encoder pass are a maximum of straight lines
    over its patches, with a step for every SMALLEST_IMAGE patches. They are below the steepest of these lines, raised
    until it is above the first step.
    """
    shape, settings = memory.shape, memory.settings
    if not shape.vision:
        return cost
    chunk, most = max(1, LOGITS_HELD // shape.vocabulary_size), max(tokens, beyond.tokens_per_rank)
    share = replace(beyond, share=float(beyond.share_of(tokens)))
    slope = (language_bytes(memory, tokens, share) - language_bytes(memory, 1, share)) / max(1, tokens - 1)
    above = [language_bytes(memory, length, share) - slope * length
             for length in (1, chunk, CHUNKS_HELD * chunk, tokens) if length <= tokens]
    many = SMALLEST_IMAGE << 20  # where the steepest line is above all others
    of_patch = (encoder_bytes(memory, 2 * many) - encoder_bytes(memory, many)) / many
    of_pass = max(encoder_bytes(memory, count) - of_patch * count for count in (1, SMALLEST_IMAGE))
    return replace(
        with_offload_bytes(cost, memory),
        vision_forward=cost.vision_forward if settings.trains("vision") else 1.0,
        feature_bytes=float(COMPUTE_BYTES[settings.precision] * shape.width * shape.feature_levels),
        encoder_gather_s=encoder_gather_s(cost, memory),
        encoder_bytes_per_patch=of_patch, encoder_bytes=max(0.0, of_pass),
        language_bytes_per_token=slope, pack_bytes=max(0.0, *above),
        most_pack_bytes=language_bytes(memory, most, beyond))


def encoder_gather_s(cost: CostModel, memory: MemoryModel) -> float:
    """Seconds to gather the encoder's parameters for a pass, forward and backward, and to reduce its gradients: its
    share of what the cost has for the layers of both parts. 0 if a rank has all parameters.
    """
    if memory.settings.sync != "micro_batch":
        return 0.0
    return cost.in_mode("micro_batch").gather_s * gathered_bytes(memory, ["vision"]) / gathered_bytes(memory)


def encoder_bytes(memory: MemoryModel, patches: int) -> float:
    """Bytes that a rank needs to encode images of `patches` patches apart from packs, forward and backward, with their
    features and the gradients of these. Nothing of the language model is on the device then.
    """
    shape, load = memory.shape, PackLoad(0, patches=patches, sequences=patches // SMALLEST_IMAGE + 1)
    gone = ("gathered: embedding, head", "gradient of the head")
    found = [sum(value for term, value in terms.items() if term not in gone)
             for name, terms in memory.moments(load).items() if name.startswith("vision")]
    width = shape.width * shape.feature_levels
    return max(found) + 2 * COMPUTE_BYTES[memory.settings.precision] * width * patches / shape.merge_area


def language_bytes(memory: MemoryModel, tokens: int, relieved: LayerShare = NO_OFFLOAD) -> float:
    """Bytes that a pack of `tokens` tokens a rank adds if its images are encoded apart from it and `relieved.share` of
    its layers is moved or recomputed.
    """
    load = memory.worst_load(tokens, **relieved.of_load(relieved.share))._replace(patches=0)
    return sum(memory.memory(load).pack.values())


class Room(NamedTuple):
    """Bytes of each rank for images, in addition to the features of its packs and their gradients. `alone`: while none
    of its packs runs, less the bytes of a pass that do not grow with it. `beside_packs`: while its largest pack runs.
    """

    alone: np.ndarray
    beside_packs: np.ndarray


def room_for_images(problem: Problem, schedule: Schedule, group_of_row: np.ndarray) -> Room | None:
    """The room of all ranks; None if some rank has no memory for its features with its largest pack, or with a pass."""
    cost, cluster = problem.cost, problem.cluster
    limit = cost.memory_bytes_per_token * cluster.tokens_per_rank
    if cost.encoder_bytes_per_patch == 0.0 or limit == 0.0:
        return Room(*np.full((2, cluster.num_ranks), np.inf))
    tokens = np.add.reduceat(problem.items.tokens[schedule.rows], schedule.first_row[:-1])
    degrees = np.diff(schedule.first_rank)
    share = -(-tokens // degrees)
    row = np.repeat(np.arange(len(problem.samples)), np.diff(problem.first_image))
    of_pack = np.bincount(group_of_row[row], problem.all_image_rows, len(degrees))
    pack, features = np.zeros(cluster.num_ranks), np.zeros(cluster.num_ranks)
    group = np.repeat(np.arange(len(degrees)), degrees)
    np.maximum.at(pack, schedule.ranks, _packs_bytes(cost, cluster, share)[group])
    np.add.at(features, schedule.ranks, np.minimum(of_pack, share)[group])
    left = limit - 2 * cost.feature_bytes * features
    room = Room(left - cost.encoder_bytes, left - pack)
    return room if (left >= pack).all() and (room.alone >= 0).all() else None


def within_room(images: EncodedImages, room: Room, cost: CostModel) -> VisionPlan | None:
    """How the images are encoded apart from the packs; None if that does not fit into the room of their ranks."""
    num_ranks = len(room.alone)
    all_bytes = np.bincount(images.encoder, images.activation_bytes, num_ranks)
    largest = np.zeros(num_ranks)
    np.maximum.at(largest, images.encoder, images.activation_bytes)
    if (largest > room.alone).any():
        return None
    if not np.isfinite(room.alone).all():
        return VisionPlan("world")
    if (all_bytes <= np.minimum(*room)).all():
        return VisionPlan("world", True, max(1, int(room.alone.min() / cost.encoder_bytes_per_patch)))
    # the features of each pass stay until all passes have run
    left = room.alone - cost.feature_bytes * np.bincount(images.encoder, images.rows, num_ranks)
    if (largest > left).any():
        return None
    return VisionPlan("world", cost.vision_forward == 1.0, max(1, int(left.min() / cost.encoder_bytes_per_patch)))


def _packs_bytes(cost: CostModel, cluster: ClusterSpec, tokens: np.ndarray) -> np.ndarray:
    """Bytes of packs with `tokens` tokens a rank. Beyond the tokens that a rank holds with all activations, the bytes
    on the device are interpolated linearly up to those of the largest pack.
    """
    held, most = cluster.tokens_per_rank, cluster.most_tokens_per_rank
    plain: np.ndarray = cost.pack_bytes + cost.language_bytes_per_token * np.minimum(tokens, held)
    if most == held:
        return plain
    full = cost.pack_bytes + cost.language_bytes_per_token * held
    return plain + (cost.most_pack_bytes - full) * np.maximum(0, tokens - held) / (most - held)
