"""How long a rank may stand still: many times what a layer takes, of packs and of images encoded apart from them."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from dhp_ray.config import load
from dhp_ray.planner import ClusterSpec, CostModel, Sample, plan_batch
from dhp_ray.runtime.driver.session import HANG_LAYERS, Session

COST = CostModel(0.0, 1e-3, 0.0, 0.0, {2: 1e9}, vision_linear_s=1.0)
SAMPLES = [Sample(str(number), 5, 5, ((1, 2, 500),)) for number in range(4)]


@pytest.mark.parametrize(("encoder", "longest_s"), [("group", 1000.01), ("world", 2 / 3 * 2000)])
def test_what_takes_longest_counts_wherever_images_are_encoded(encoder: str, longest_s: float) -> None:
    plan = plan_batch(SAMPLES, ClusterSpec(2, 2, 100), COST, encoder=encoder, planner="static")
    longest = max(group.predicted_time_s for group in plan.groups)
    assert longest < 1.0 if plan.vision.apart else longest >= longest_s - 1e-6
    session = SimpleNamespace(config=load([]), group=SimpleNamespace(num_layers=28),
                              history=SimpleNamespace(scale=SimpleNamespace(known=lambda: 1.0)))
    allowed_s = Session.stuck_s(cast(Any, session), plan)
    assert allowed_s >= 0.5 * HANG_LAYERS * longest_s / 28
    session.history.scale.known = lambda: None
    assert Session.stuck_s(cast(Any, session), plan) == session.config.comm.timeout_s
