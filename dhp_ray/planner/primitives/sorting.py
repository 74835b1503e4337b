"""Stable sorts for compiled loops (numpy's own take seconds to compile, and its default one is not stable)."""

from __future__ import annotations

import numpy as np

from dhp_ray.planner.primitives.compiled import inner


@inner
def ascending(values: np.ndarray) -> np.ndarray:
    """The order that sorts float64 values; equal ones keep their order. Bottom-up merge sort, O(n log n)."""
    count = len(values)
    order, merged = np.arange(count), np.zeros(count, dtype=np.int64)
    width = 1
    while width < count:
        for begin in range(0, count, 2 * width):
            middle, end = min(begin + width, count), min(begin + 2 * width, count)
            left, right = begin, middle
            for place in range(begin, end):
                if left < middle and (right == end or values[order[left]] <= values[order[right]]):
                    merged[place] = order[left]
                    left += 1
                else:
                    merged[place] = order[right]
                    right += 1
        order, merged = merged, order
        width *= 2
    return order


@inner
def insertion_sort(order: np.ndarray, begin: int, end: int, values: np.ndarray) -> None:
    """Sort order[begin:end] by ascending values. Fast if few values have changed since it was sorted."""
    for index in range(begin + 1, end):
        number, place = order[index], index
        while place > begin and values[order[place - 1]] > values[number]:
            order[place] = order[place - 1]
            place -= 1
        order[place] = number
