"""Which member of a group encodes which image: longest first, each to the member that would finish it first. Of images
that cost the same each member then takes neighbours: of a video that is cut in time it decodes one stretch.

    images of 3, 3, 3, 2 and 2 s    members 0 to 3: |3|  |3|  |3|  |2|2|    the fullest encodes for 4 s
                                                                            a quarter of all is 3.25 s

Longest processing time first: Graham 1969.
"""

from __future__ import annotations

import numpy as np

from dhp_ray.planner.primitives.compiled import compiled, inner
from dhp_ray.planner.primitives.sorting import ascending
from dhp_ray.planner.schedule import Schedule


@compiled
def encoders_of(
    schedule: Schedule, first_image: np.ndarray, all_image_s: np.ndarray, speeds: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(the rank that encodes each image, where each group's images begin, seconds of the member of each group that
    takes longest)

    `all_image_s`: cost of each image on a nominal rank, those of sequence i from `first_image[i]` on.
    O(images x members); ties go to the earlier image and the lower member. Images of one cost then exchange members,
    which changes no member's seconds.
    """
    num_groups = len(schedule.first_row) - 1
    encoders, first = np.zeros(len(all_image_s), dtype=np.int64), np.zeros(num_groups + 1, dtype=np.int64)
    longest_s = np.zeros(num_groups)
    for group in range(num_groups):
        rows = schedule.rows[schedule.first_row[group] : schedule.first_row[group + 1]]
        ranks = schedule.ranks[schedule.first_rank[group] : schedule.first_rank[group + 1]]
        image_s = _images_of(rows, first_image, all_image_s)
        first[group + 1] = first[group] + len(image_s)
        order, of_ranks = ascending(-image_s), np.zeros(len(ranks))
        for place in range(len(ranks)):
            of_ranks[place] = speeds[ranks[place]]
        member, busy = _dealt(image_s, order, of_ranks)
        longest_s[group] = busy.max()
        alike = 0
        while alike < len(order):
            stop = alike
            while stop < len(order) and image_s[order[stop]] == image_s[order[alike]]:
                stop += 1
            members = member[order[alike:stop]]
            for place, one in zip(order[alike:stop], members[ascending(members.astype(np.float64))]):
                encoders[first[group] + place] = ranks[one]
            alike = stop
    return encoders, first, longest_s


@compiled
def fullest_member_s(
    rows: np.ndarray, first: np.ndarray, first_image: np.ndarray, all_image_s: np.ndarray, most: int
) -> np.ndarray:
    """(packs, most): seconds of the fullest of 1, 2, ... `most` nominal members that encode the images of each pack,
    `rows[first[p]:first[p + 1]]`. O(images x most^2)."""
    found = np.zeros((len(first) - 1, most))
    for pack in range(len(found)):
        image_s = _images_of(rows[first[pack] : first[pack + 1]], first_image, all_image_s)
        if len(image_s) == 0 or image_s.max() == 0.0:
            continue
        order = ascending(-image_s)
        found[pack, 0], found[pack, 1:] = image_s.sum(), image_s[order[0]]
        for degree in range(2, min(most, len(image_s) - 1) + 1):
            found[pack, degree - 1] = _dealt(image_s, order, np.ones(degree))[1].max()
    return found


@inner
def _images_of(rows: np.ndarray, first_image: np.ndarray, all_image_s: np.ndarray) -> np.ndarray:
    """Seconds of the images of some sequences, in order."""
    count = 0
    for row in rows:
        count += first_image[row + 1] - first_image[row]
    image_s, end = np.zeros(count), 0
    for row in rows:
        for image in range(first_image[row], first_image[row + 1]):
            image_s[end] = all_image_s[image]
            end += 1
    return image_s


@inner
def _dealt(image_s: np.ndarray, order: np.ndarray, speeds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(the member that encodes each image, how long each member does)"""
    member, busy = np.zeros(len(image_s), dtype=np.int64), np.zeros(len(speeds))
    for image in order:
        best = 0
        for other in range(1, len(speeds)):
            if busy[other] + image_s[image] / speeds[other] < busy[best] + image_s[image] / speeds[best]:
                best = other
        member[image] = best
        busy[best] += image_s[image] / speeds[best]
    return member, busy
