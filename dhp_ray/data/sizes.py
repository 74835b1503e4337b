"""Estimates the bytes of a data set's rows, mostly without reading them."""

from __future__ import annotations

import numpy as np

from dhp_ray.data.formats import read_rows
from dhp_ray.data.fragments import Fragments
from dhp_ray.data.media import file_bytes

NUM_FRAGMENTS, ROWS_OF_EACH = 16, 4
MEDIA_WITHIN_BYTES = 16 * 2**10
"""If rows have at least this many bytes on average, they hold their images and videos themselves; if fewer, a few rows
are read.
"""


def mean_file_bytes(fragments: Fragments, image_root: str) -> int:
    """Mean bytes of the image and video files that a row names, over a few rows from everywhere in the set. What cannot
    be read counts as 0.
    """
    if fragments.num_bytes.sum() >= MEDIA_WITHIN_BYTES * fragments.num_rows:
        return 0
    found = []
    for number in sorted({int(place) for place in np.linspace(0, len(fragments) - 1, NUM_FRAGMENTS)}):
        fragment = fragments[number]
        if fragment.kind == "tar":
            return 0
        try:
            rows = read_rows(fragment, range(min(ROWS_OF_EACH, fragment.num_rows)))
            found += [file_bytes(row.fields, image_root) for row in rows]
        except Exception:  # the file is gone or damaged, of which reading its rows will say more
            continue
    return int(np.mean(found)) if found else 0
