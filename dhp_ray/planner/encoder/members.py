"""Assigns images to the members of a group: each image goes to the member that would finish it first. Images come
longest first (Graham 1969) or, if that is more even, sequence by sequence, each one's longest first. Among images of
equal cost each member then takes neighbours: of a video that is cut in time it decodes one stretch.

Memory bounds what a member takes: at most as many patches as the mean and the largest image together (`worst_load` in
`memory.py`). A fast member, or one with small images, whose patches cost less each, would otherwise get more. The
member with the fewest patches always has room for one more image.

    images of 3, 3, 3, 2 and 2 s    members 0 to 3: |3|  |3|  |3|  |2|2|    the most loaded encodes for 4 s
                                                                            a quarter of all is 3.25 s
"""

from __future__ import annotations

import numpy as np

from dhp_ray.planner.primitives.compiled import compiled, inner
from dhp_ray.planner.primitives.sorting import ascending
from dhp_ray.planner.schedule import Schedule


@compiled
def encoders_of(
    schedule: Schedule, first_image: np.ndarray, all_image_s: np.ndarray, all_patches: np.ndarray, speeds: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(the rank that encodes each image, where each group's images begin, seconds of the most loaded member of each
    group)

    `all_image_s`, `all_patches`: cost of each image on a nominal rank, and its patches, those of sequence i from
    `first_image[i]` on. O(images x members); ties go to the earlier image and the lower member. Images of equal cost
    and size then exchange members, which changes no member's seconds.
    """
    num_groups = len(schedule.first_row) - 1
    encoders, first = np.zeros(len(all_image_s), dtype=np.int64), np.zeros(num_groups + 1, dtype=np.int64)
    longest_s = np.zeros(num_groups)
    for group in range(num_groups):
        rows = schedule.rows[schedule.first_row[group] : schedule.first_row[group + 1]]
        ranks = schedule.ranks[schedule.first_rank[group] : schedule.first_rank[group + 1]]
        image_s = _images_of(rows, first_image, all_image_s)
        patches = _images_of(rows, first_image, all_patches)
        first[group + 1] = first[group] + len(image_s)
        if len(ranks) == 1:
            encoders[first[group] : first[group + 1]] = ranks[0]
            longest_s[group] = image_s.sum() / speeds[ranks[0]]
            continue
        orders = _orders_of(rows, first_image, image_s)
        of_ranks = np.zeros(len(ranks))
        for place in range(len(ranks)):
            of_ranks[place] = speeds[ranks[place]]
        member, longest_s[group] = _dealt(image_s, patches, orders, of_ranks)
        order, alike = orders[0], 0
        while alike < len(order):
            stop = alike
            while (stop < len(order) and image_s[order[stop]] == image_s[order[alike]]
                   and patches[order[stop]] == patches[order[alike]]):
                stop += 1
            members = member[order[alike:stop]]
            for place, one in zip(order[alike:stop], members[ascending(members.astype(np.float64))]):
                encoders[first[group] + place] = ranks[one]
            alike = stop
    return encoders, first, longest_s


@compiled
def fullest_member_s(
    rows: np.ndarray, first: np.ndarray, first_image: np.ndarray, all_image_s: np.ndarray, all_patches: np.ndarray,
    most: int,
) -> np.ndarray:
    """(packs, most): seconds of the most loaded of 1, 2, ... `most` nominal members that encode the images of each
    pack, `rows[first[p]:first[p + 1]]`. O(images x most^2), less if a pack has fewer images.
    """
    found = np.zeros((len(first) - 1, most))
    for pack in range(len(found)):
        of_pack = rows[first[pack] : first[pack + 1]]
        image_s = _images_of(of_pack, first_image, all_image_s)
        if len(image_s) == 0 or image_s.max() == 0.0:
            continue
        longest_s, orders, patches = image_s.max(), np.zeros((0, 0), dtype=np.int64), image_s
        found[pack, 0], found[pack, 1:] = image_s.sum(), longest_s
        for degree in range(2, min(most, len(image_s) - 1) + 1):
            if image_s.min() == longest_s:  # all alike
                found[pack, degree - 1] = -(-len(image_s) // degree) * longest_s
                continue
            if len(orders) == 0:
                orders = _orders_of(of_pack, first_image, image_s)
                patches = _images_of(of_pack, first_image, all_patches)
            found[pack, degree - 1] = _dealt(image_s, patches, orders, np.ones(degree))[1]
    return found


@inner
def longest_member_s(
    rows: np.ndarray, first_image: np.ndarray, all_image_s: np.ndarray, all_patches: np.ndarray, speeds: np.ndarray
) -> float:
    """Seconds of the most loaded member of a group that encodes the images of these sequences, as `encoders_of`."""
    image_s = _images_of(rows, first_image, all_image_s)
    if len(speeds) == 1:
        return float(image_s.sum() / speeds[0])
    patches = _images_of(rows, first_image, all_patches)
    return _dealt(image_s, patches, _orders_of(rows, first_image, image_s), speeds)[1]


@inner
def _images_of(rows: np.ndarray, first_image: np.ndarray, of_image: np.ndarray) -> np.ndarray:
    """What `of_image` has (seconds, patches) for the images of some sequences, in order."""
    count, end = 0, 0
    for row in rows:
        count += first_image[row + 1] - first_image[row]
    found = np.zeros(count)
    for row in rows:
        for image in range(first_image[row], first_image[row + 1]):
            found[end] = of_image[image]
            end += 1
    return found


@inner
def _orders_of(rows: np.ndarray, first_image: np.ndarray, image_s: np.ndarray) -> np.ndarray:
    """Two orders of the images of some sequences: longest first and, with several sequences, sequence by sequence."""
    orders, end = np.zeros((2 if len(rows) > 1 else 1, len(image_s)), dtype=np.int64), 0
    for row in rows:
        begin, end = end, end + first_image[row + 1] - first_image[row]
        orders[-1, begin:end] = begin + ascending(-image_s[begin:end])
    orders[0] = ascending(-image_s)
    return orders


@inner
def _dealt(
    image_s: np.ndarray, patches: np.ndarray, orders: np.ndarray, speeds: np.ndarray
) -> tuple[np.ndarray, float]:
    """(the member that encodes each image, seconds of the most loaded member) for the best order."""
    best, best_s = np.zeros(len(image_s), dtype=np.int64), np.inf
    most = patches.sum() / len(speeds) + patches.max() if len(patches) else 0.0
    for order in orders:
        member, busy, held = np.zeros(len(image_s), dtype=np.int64), np.zeros(len(speeds)), np.zeros(len(speeds))
        for image in order:
            one, one_s = -1, np.inf  # the member with the fewest patches has room: `held` has whole numbers
            for other in range(len(speeds)):
                other_s = busy[other] + image_s[image] / speeds[other]
                if other_s < one_s and held[other] + patches[image] <= most:
                    one, one_s = other, other_s
            member[image], busy[one] = one, one_s
            held[one] += patches[image]
        if busy.max() < best_s:
            best, best_s = member, busy.max()
    return best, best_s
