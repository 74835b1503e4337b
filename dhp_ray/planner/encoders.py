"""Which member of a group encodes which image: longest first, each to the member that would finish it first. Of images
that cost the same each member then takes neighbours: of a video that is cut in time it decodes one stretch.
"""

from __future__ import annotations

import numpy as np

from dhp_ray.planner.primitives.compiled import compiled
from dhp_ray.planner.primitives.sorting import ascending
from dhp_ray.planner.schedule import Schedule


@compiled
def encoders_of(
    schedule: Schedule, first_image: np.ndarray, all_image_s: np.ndarray, speeds: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(the rank that encodes each image, where each group's images begin, seconds of the member of each group that
    takes longest)

    `all_image_s`: cost of each image on a nominal rank, those of sequence i from `first_image[i]` on.
    Longest processing time first (Graham 1969), O(images x members); ties go to the earlier image and the lower
    member. Images of one cost then exchange members, which changes no member's seconds.
    """
    num_groups = len(schedule.first_row) - 1
    encoders, image_s = np.zeros(len(all_image_s), dtype=np.int64), np.zeros(len(all_image_s))
    first, longest_s = np.zeros(num_groups + 1, dtype=np.int64), np.zeros(num_groups)
    for group in range(num_groups):
        begin = end = first[group]
        for row in schedule.rows[schedule.first_row[group] : schedule.first_row[group + 1]]:
            for image in range(first_image[row], first_image[row + 1]):
                image_s[end] = all_image_s[image]
                end += 1
        first[group + 1] = end
        ranks = schedule.ranks[schedule.first_rank[group] : schedule.first_rank[group + 1]]
        busy = np.zeros(len(ranks))
        order = begin + ascending(-image_s[begin:end])
        for image in order:
            best = 0
            for member in range(1, len(ranks)):
                if (
                    busy[member] + image_s[image] / speeds[ranks[member]]
                    < busy[best] + image_s[image] / speeds[ranks[best]]
                ):
                    best = member
            encoders[image] = ranks[best]
            busy[best] += image_s[image] / speeds[ranks[best]]
        longest_s[group] = busy.max()
        alike = 0
        while alike < len(order):
            stop = alike
            while stop < len(order) and image_s[order[stop]] == image_s[order[alike]]:
                stop += 1
            members = encoders[order[alike:stop]]
            for place, member in zip(order[alike:stop], members[ascending(members.astype(np.float64))]):
                encoders[place] = member
            alike = stop
    return encoders, first, longest_s
