"""Values that contradict one another; those of one key alone are in test_config.py."""

import pytest

from dhp_ray.config import load
from dhp_ray.schema import ConfigError


def test_images_are_encoded_apart_with_one_barrier_a_step_alone() -> None:
    for encoder in ("group", "auto"):
        assert load([f"planner.encoder={encoder}", "planner.sync=micro_batch"]).planner.encoder == encoder
    assert load(["planner.encoder=world", "planner.sync=auto"]).planner.encoder == "world"
    with pytest.raises(ConfigError) as raised:
        load(["planner.encoder=world", "planner.sync=micro_batch"])
    assert str(raised.value) == ("planner.encoder: got 'world' with planner.sync=micro_batch; allowed: group or auto, "
                                 "or world with planner.sync=step")
