"""Plans that encode a batch's images apart from the packs, on any rank: packs are planned as if images were encoded
already, then images are balanced over the ranks.

    problem -> without_images -> a planner of PLANNERS -> schedule of packs -> world_of -> who encodes what, makespan

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

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from dhp_ray.planner.cost.model import CostModel
from dhp_ray.planner.encoder.images import EncodedImages, encoded_images, grid_of, parts_for_memory, parts_for_time
from dhp_ray.planner.plan.cluster import ClusterSpec
from dhp_ray.planner.plan.types import VisionPlan
from dhp_ray.planner.primitives.best_fit import OWNER, ROOM, add, first_with, rooms_for, shrink
from dhp_ray.planner.primitives.bisection import halve
from dhp_ray.planner.primitives.compiled import compiled, inner
from dhp_ray.planner.primitives.rebalancing import Loads, rebalance
from dhp_ray.planner.primitives.sorting import ascending
from dhp_ray.planner.problem import Problem
from dhp_ray.planner.schedule import Schedule, group_of_row
from dhp_ray.planner.timeline import timeline_of


@compiled
def lockstep_passes(
    seconds: np.ndarray, patches: np.ndarray, encoder: np.ndarray, num_ranks: int, most: int
) -> np.ndarray:
    """The pass of each image or part on its rank, from 0 on, if ranks run passes in lockstep: every rank runs the same
    number of passes, and what ranks encode in a pass should take the same time. `most` 0: no limit.

    There are as few passes as hold the images of every rank, `most` patches each or one larger image. Each rank's
    images are placed, longest first, into the pass with room that has least so far (longest processing time first,
    Graham 1969). Seconds are those of the ranks at their own speeds.

        at most 100 patches a pass, a second for ten      pass 0    pass 1    pass 2
        rank 0, images of 70, 60, 40, 30, 20 patches      70        60 20     40 30
        rank 1, images of 60, 60, 60                      60        60        60
        seconds of the pass                               7         8         7

    Two passes are not enough: rank 1 needs three.
    """
    passes = np.zeros(len(seconds), dtype=np.int64)
    if most == 0:
        return passes
    order, load = ascending(-seconds), np.zeros(num_ranks)
    for image in range(len(seconds)):
        load[encoder[image]] += min(patches[image], most)
    count = max(1, int(np.ceil(load.max() / most)))
    while not _fits(seconds, patches, encoder, num_ranks, most, count, order, passes):
        count += 1
    return passes


@inner
def _fits(
    seconds: np.ndarray, patches: np.ndarray, encoder: np.ndarray, num_ranks: int, most: int, count: int,
    order: np.ndarray, passes: np.ndarray,
) -> bool:
    """Fill `count` passes; return whether all images found room."""
    taken_s, filled = np.zeros((num_ranks, count)), np.zeros((num_ranks, count))
    for image in order:
        rank, best = encoder[image], -1
        for number in range(count):
            room = filled[rank, number] == 0 or filled[rank, number] + patches[image] <= most
            if room and (best < 0 or taken_s[rank, number] < taken_s[rank, best]):
                best = number
        if best < 0:
            return False
        passes[image] = best
        taken_s[rank, best] += seconds[image]
        filled[rank, best] += patches[image]
    return True


EVEN, FAR = 1e-3, 1e-2
"""Shares above the least time: within EVEN the ranks are balanced; beyond FAR another start is tried."""

PARTNERS = 128
"""Number of ranks with which the fullest rank tries to exchange images."""

AT_HOME, ANYWHERE, BEST_FIT = 0, 1, 2
"""The starts, in this order."""


@compiled
def balanced_encoders(
    image_s: np.ndarray, group_of_image: np.ndarray, ranks: np.ndarray, first_rank: np.ndarray, speeds: np.ndarray
) -> np.ndarray:
    """The rank that encodes each image, if any rank may: images are balanced over all ranks, but stay at home, on a
    rank of their own group, if that costs nothing.

    1. Longest processing time first (Graham 1969) with a preference. Let T be the least time that any assignment can
    take: the mean over all ranks, or the largest image on the fastest rank. Images come longest first. Each goes to a
    rank of its own group if one ends by T with it, otherwise to the rank of the whole cluster that ends first with it:

        images 6 (group of rank 0)  2 2 (rank 0)  2 (rank 1), T = 6    rank 0  |--6--|
                                                                       rank 1  |2|2|2|    two from rank 0's group

    2. If that ends later than T, the fullest rank and others exchange images until all end by T, or no exchange helps
    (`rebalancing`).

    3. If the result is far from T, both steps are repeated from another start, longest first without the preference,
    and then from best fit: images come largest first, each goes to the rank with the least room that holds it under a
    limit, and bisection finds the least limit under which all images find room (MULTIFIT, Coffman, Garey and Johnson
    1978; after LPT: Lee and Massey 1988). The best result is taken:

        images 5 3 2 2 2 2, 2 ranks, T = 8     longest first    rank 0  |--5--|-2-|-2-|    9 (no exchange helps)
                                                                rank 1  |--3--|-2-|-2-|    7

                                               best fit         rank 0  |--5--|--3--|          8
                                                                rank 1  |-2-|-2-|-2-|-2-|      8

    There is one heap of ranks for each speed, so an image costs O(speeds + its group's ranks + log ranks).

    `image_s`: seconds of each on a nominal rank. Group g has the ranks `ranks[first_rank[g]:first_rank[g + 1]]`.
    """
    encoder, num_ranks = np.zeros(len(image_s), dtype=np.int64), len(speeds)
    if len(image_s) == 0:
        return encoder
    order, least_s = ascending(-image_s), max(image_s.sum() / speeds.sum(), image_s.max() / speeds.max())
    loads = Loads(image_s, np.zeros(len(image_s), dtype=np.int64), speeds, 1, 0.0)
    no_tokens, nobody = np.zeros(num_ranks, dtype=np.int64), np.zeros(len(first_rank), dtype=np.int64)
    best, best_s = encoder, np.inf
    for start in (AT_HOME, ANYWHERE, BEST_FIT):
        if start == BEST_FIT:
            end_s = _fullest_first(image_s, order, speeds, least_s, best_s, encoder)
        else:
            homes = first_rank if start == AT_HOME else nobody
            end_s = _longest_first(image_s, order, group_of_image, ranks, homes, speeds, least_s, encoder)
        rebalance(loads, encoder, end_s, no_tokens, least_s * (1 + EVEN), PARTNERS)
        if end_s.max() < best_s:
            best, best_s = encoder.copy(), end_s.max()
        if best_s <= least_s * (1 + FAR):
            break
    return best


@inner
def _longest_first(
    image_s: np.ndarray, order: np.ndarray, group_of_image: np.ndarray, ranks: np.ndarray, first_rank: np.ndarray,
    speeds: np.ndarray, least_s: float, encoder: np.ndarray,
) -> np.ndarray:
    """When each rank ends; sets `encoder`."""
    num_ranks = len(speeds)
    heap = ascending(-speeds)  # ranks of one speed are neighbours, and a heap as long as all are free
    place, begin = np.empty(num_ranks, dtype=np.int64), np.empty(num_ranks, dtype=np.int64)
    ends = np.empty(num_ranks, dtype=np.int64)
    for position in range(num_ranks):
        place[heap[position]] = position
        begin[position] = position
        if position and speeds[heap[position]] == speeds[heap[position - 1]]:
            begin[position] = begin[position - 1]
    for position in range(num_ranks - 1, -1, -1):
        ends[position] = position + 1
        if position < num_ranks - 1 and begin[position + 1] == begin[position]:
            ends[position] = ends[position + 1]
    load = np.zeros(num_ranks)
    for image in order:
        group = group_of_image[image]
        best, best_s = -1, np.inf
        for member in ranks[first_rank[group] : first_rank[group + 1]]:
            if load[member] + image_s[image] / speeds[member] < best_s:
                best, best_s = member, load[member] + image_s[image] / speeds[member]
        if best_s > least_s * (1 + 1e-9):
            position = 0
            while position < num_ranks:  # the least loaded rank of each speed
                rank = heap[position]
                if load[rank] + image_s[image] / speeds[rank] < best_s:
                    best, best_s = rank, load[rank] + image_s[image] / speeds[rank]
                position = ends[position]
        encoder[image], load[best] = best, best_s
        _sift_down(heap, place, load, place[best], begin[place[best]], ends[place[best]])
    return load


@inner
def _sift_down(
    heap: np.ndarray, place: np.ndarray, load: np.ndarray, position: int, begin: int, end: int
) -> None:
    """Move a rank whose load has risen to its place in the heap at `heap[begin:end]`, which has the least loaded rank
    on top. `place`: the place of each rank.
    """
    rank = heap[position]
    while True:
        child = begin + 2 * (position - begin) + 1
        if child >= end:
            break
        if child + 1 < end and load[heap[child + 1]] < load[heap[child]]:
            child += 1
        if load[heap[child]] >= load[rank]:
            break
        heap[position] = heap[child]
        place[heap[position]] = position
        position = child
    heap[position] = rank
    place[rank] = position


@inner
def _fullest_first(
    image_s: np.ndarray, order: np.ndarray, speeds: np.ndarray, least_s: float, most_s: float, encoder: np.ndarray
) -> np.ndarray:
    """The same for the least limit under which best fit finds room for all images; infinite if that is not below
    `most_s`.
    """
    end_s, span = np.full(len(speeds), np.inf), np.array([least_s, most_s, 0.0])
    while halve(span, EVEN):
        span[int(_best_fit(image_s, order, speeds, span[2], encoder))] = span[2]
    if span[1] < most_s and _best_fit(image_s, order, speeds, span[1], encoder):
        end_s = np.zeros(len(speeds))
        for image in order:
            end_s[encoder[image]] += image_s[image] / speeds[encoder[image]]
    return end_s


@inner
def _best_fit(
    image_s: np.ndarray, order: np.ndarray, speeds: np.ndarray, limit_s: float, encoder: np.ndarray
) -> bool:
    """Whether best fit finds room for all images within a limit; sets `encoder`."""
    rooms, state = rooms_for(len(speeds))
    for rank in range(len(speeds)):
        add(rooms, state, limit_s * speeds[rank], rank)
    for image in order:
        place = first_with(rooms, state, image_s[image])
        if place < 0:
            return False
        encoder[image] = int(rooms[OWNER, place])
        shrink(rooms, state, place, rooms[ROOM, place] - image_s[image])
    return True


def one_part_more(problem: Problem, images: EncodedImages) -> np.ndarray | None:
    """The numbers of parts with one more for the image that takes the fullest rank longest; None if it already has the
    most.
    """
    seconds = images.seconds / problem.speeds[images.encoder]
    fullest = int(np.bincount(images.encoder, seconds).argmax())
    image = int(images.image[np.where(images.encoder == fullest, seconds, 0.0).argmax()])
    return with_one_more(problem, np.diff(images.first), image)


def with_one_more(problem: Problem, num_parts: np.ndarray, image: int) -> np.ndarray | None:
    """The numbers of parts with one more for an image; None if it already has the most."""
    if num_parts[image] >= min(problem.cluster.num_ranks, grid_of(problem, image)[0]):
        return None
    more = num_parts.copy()
    more[image] += 1
    return more


def ranks_of_images(problem: Problem, schedule: Schedule, images: EncodedImages) -> np.ndarray:
    """The rank of each image or part. Without vision costs patches are balanced instead of seconds."""
    costs = problem.all_image_s.any()
    seconds, speeds = (images.seconds, problem.speeds) if costs else (images.patches, np.ones(len(problem.speeds)))
    encoder = balanced_encoders(seconds, images.group, schedule.ranks, schedule.first_rank, speeds)
    load_s = np.bincount(encoder, seconds, len(speeds)) / speeds
    for image in images.split().tolist():
        _spread(encoder, load_s, seconds, speeds, images.parts(image))
    return encoder


def _spread(encoder: np.ndarray, load_s: np.ndarray, seconds: np.ndarray, speeds: np.ndarray, parts: slice) -> None:
    """Move the parts of an image to different ranks: a part that shares its rank goes to the rank that ends first with
    it, among those without a part.
    """
    taken = set[int]()
    for part in range(parts.start, parts.stop):
        rank = int(encoder[part])
        if rank in taken:
            load_s[rank] -= seconds[part] / speeds[rank]
            ends_s = load_s + seconds[part] / speeds
            ends_s[list(taken)] = np.inf
            rank = encoder[part] = int(ends_s.argmin())
            load_s[rank] = ends_s[rank]
        taken.add(rank)


class MemoryBudget(NamedTuple):
    """Bytes of each rank for images, in addition to the features of its packs and their gradients. `alone`: while none
    of its packs runs, less the bytes of a pass that do not grow with it. `beside_packs`: while its largest pack runs.
    """

    alone: np.ndarray
    beside_packs: np.ndarray


def room_for_images(problem: Problem, schedule: Schedule) -> MemoryBudget | None:
    """The room of all ranks; None if some rank has no memory for its features with its largest pack, or with a pass."""
    cost, cluster = problem.cost, problem.cluster
    limit = cost.memory_bytes_per_token * cluster.tokens_per_rank
    if cost.encoder_bytes_per_patch == 0.0 or limit == 0.0:
        return MemoryBudget(*np.full((2, cluster.num_ranks), np.inf))
    tokens = np.add.reduceat(problem.items.tokens[schedule.rows], schedule.first_row[:-1])
    degrees = np.diff(schedule.first_rank)
    share = -(-tokens // degrees)
    row = np.repeat(np.arange(len(problem.samples)), np.diff(problem.first_image))
    of_pack = np.bincount(group_of_row(schedule)[row], problem.all_image_rows, len(degrees))
    pack, features = np.zeros(cluster.num_ranks), np.zeros(cluster.num_ranks)
    group = np.repeat(np.arange(len(degrees)), degrees)
    np.maximum.at(pack, schedule.ranks, _packs_bytes(cost, cluster, share)[group])
    np.add.at(features, schedule.ranks, np.minimum(of_pack, share)[group])
    left = limit - 2 * cost.feature_bytes * features
    room = MemoryBudget(left - cost.encoder_bytes, left - pack)
    return room if (left >= pack).all() and (room.alone >= 0).all() else None


def within_room(images: EncodedImages, room: MemoryBudget, cost: CostModel) -> VisionPlan | None:
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


CUTS, FEW = 4, 32
"""The most additional parts that are tried, one at a time, after `parts_for_time`. Before that, if there are at most
FEW images, each of them is tried with one part more as long as ranks are uneven: halves of a small image may fill what
others leave.
"""


class World(NamedTuple):
    """`images` with the ranks that encode them. `passes`: the pass of each on its rank, with sync=micro_batch.
    `busy_s`: how long each rank encodes.
    """

    vision: VisionPlan
    images: EncodedImages
    passes: np.ndarray | None
    busy_s: np.ndarray
    makespan_s: float


def without_images(problem: Problem) -> Problem:
    """The batch without the costs of its images."""
    items = problem.items.copy()
    items.vision_s = items.image_s = items.fullest_s = 0.0
    items.host_s = problem.cost.host_s(items.tokens.astype(np.float64))
    return replace(problem, items=items, all_image_s=np.zeros_like(problem.all_image_s))


def world_of(problem: Problem, schedule: Schedule, times: np.ndarray) -> World | None:
    """The encoders of a batch's images if its packs run by this schedule, each for `times` seconds; None if the ranks
    have no memory for that. Without vision costs images are dealt out by their patches.

    Images are in parts (`images.py`) if memory requires it, and in more parts if that makes the step shorter: images
    that alone take longer than the mean of all ranks; any one if they are few; and then, one part after another, those
    that hold up the fullest rank.
    """
    room = room_for_images(problem, schedule)
    if room is None:
        return None
    num_ranks, cost = problem.cluster.num_ranks, problem.cost
    least = parts_for_memory(lambda image: grid_of(problem, image), problem.all_image_patches, float(room.alone.min()),
                             num_ranks, cost)
    if least is None:
        return None

    def at(num_parts: np.ndarray) -> World | None:
        images = encoded_images(problem, schedule, num_parts)
        return _world(problem, schedule, times, images.on_ranks(ranks_of_images(problem, schedule, images)), room)

    best = at(least)
    if not cost.cuts_images:
        return best
    more = parts_for_time(lambda image: grid_of(problem, image), problem.all_image_s, least, problem.speeds)
    if (more > least).any():
        best = _shortest([best, at(more)])
    if best and len(least) <= FEW and _is_uneven(problem, best):
        num_parts = np.diff(best.images.first)
        for image in range(len(least)):
            further = with_one_more(problem, num_parts, image)
            if further is not None and best and _is_uneven(problem, best):
                best = _shortest([best, at(further)])
    newest = best
    for _ in range(CUTS):  # also after a cut without gain: if two images hold up two ranks, both must be cut
        further = one_part_more(problem, newest.images) if newest and _is_uneven(problem, newest) else None
        if further is None:
            break
        newest = at(further)
        best = _shortest([best, newest])
    return best


def _shortest(worlds: Sequence[World | None]) -> World | None:
    """The shortest; the first if several are equal."""
    return min(filter(None, worlds), key=lambda world: world.makespan_s, default=None)


def _is_uneven(problem: Problem, world: World) -> bool:
    """Whether images keep the step from being shorter: the fullest rank encodes longer than the mean."""
    return (world.makespan_s > problem.lower_bound_s * (1 + FAR)
            and world.busy_s.max() > float((world.busy_s * problem.speeds).sum() / problem.speeds.sum()) * (1 + FAR))


def _world(
    problem: Problem, schedule: Schedule, times: np.ndarray, images: EncodedImages, room: MemoryBudget
) -> World | None:
    """The images on these ranks, if memory allows."""
    vision, passes, num_ranks = within_room(images, room, problem.cost), None, problem.cluster.num_ranks
    if vision is None:
        return None
    if problem.sync == "micro_batch":
        kept = vision.keeps and problem.cost.vision_forward < 1.0  # then memory holds all of them in one pass
        seconds = images.seconds / problem.speeds[images.encoder] if images.seconds.any() else images.patches
        passes = lockstep_passes(seconds, images.patches, images.encoder, num_ranks, 0 if kept else vision.pass_patches)
        vision = replace(vision, num_passes=int(passes.max()) + 1)
    timeline = timeline_of(problem, schedule, times, images, passes, vision.keeps)
    return World(vision, images, passes, timeline.forward_busy_s + timeline.backward_busy_s,
                 problem.cost.fixed_s + timeline.makespan_s)
