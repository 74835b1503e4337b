"""Small measurements."""

from __future__ import annotations

from typing import Any

from dhp_ray.measure.loads import Sizes
from dhp_ray.measure.rounds import Spec

SIZES = Sizes(512, ((1, 4, 4), (1, 8, 12), (1, 16, 16)), 4)


def spec(num_ranks: int = 2, **changed: Any) -> Spec:
    return Spec(**{"sync": "step", "nodes": (0,) * num_ranks, "sizes": SIZES, "quick": True} | changed)
