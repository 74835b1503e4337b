"""Bandwidth by degree, as in cost files: a number or a table by degree; one for all links, or one inside nodes and one
across them.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

import numpy as np

from dhp_ray.planner.checks import PlanError

Bandwidth = dict[int, float]
"""Bytes per second by degree."""


def links_of(value: Any) -> tuple[Bandwidth, Bandwidth]:
    """Bandwidth inside a node and across nodes, from `bandwidth_bytes_per_s`.

    Raises:
        PlanError: names the part that is missing or is not a number above 0.
    """
    if isinstance(value, dict) and set(map(str, value)) & {"intra", "inter"}:
        for key in ("intra", "inter"):
            if key not in value:
                raise PlanError(f"bandwidth_bytes_per_s.{key}: missing")
        return (_table("bandwidth_bytes_per_s.intra", value["intra"]),
                _table("bandwidth_bytes_per_s.inter", value["inter"]))
    table = _table("bandwidth_bytes_per_s", value)
    return table, table


def by_degree(table: Bandwidth, max_degree: int) -> np.ndarray:
    """The bandwidth for each degree from 0 to `max_degree`. A degree between two rows takes the row above it; past the
    last row, the last.
    """
    rows = np.array(list(table))
    row = np.minimum(np.searchsorted(rows, np.arange(max_degree + 1)), len(rows) - 1)
    return np.array(list(table.values()))[row]


def constant(name: str, value: Any) -> float:
    """A number in a cost file that must be at least 0.

    Raises:
        PlanError: it is not.
    """
    if isinstance(value, str):  # YAML 1.1 reads 1e-9 as text
        with contextlib.suppress(ValueError):
            value = float(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
        raise PlanError(f"{name}: got {value!r}; allowed: a number of at least 0")
    return float(value)


def _table(name: str, value: Any) -> Bandwidth:
    if not isinstance(value, dict):
        value = {2: value}
    if not value:
        raise PlanError(f"{name}: got nothing; allowed: bytes per second by degree")
    table = {}
    for degree, rate in value.items():
        if not str(degree).isdigit() or int(degree) < 2:
            raise PlanError(f"{name}: got degree {degree!r}; allowed: whole numbers of at least 2")
        table[int(degree)] = constant(f"{name}.{degree}", rate)
        if table[int(degree)] == 0:
            raise PlanError(f"{name}.{degree}: got 0; allowed: more than 0")
    return dict(sorted(table.items()))
