"""Values that contradict one another; those of one key alone are in test_config.py."""

import pytest

from dhp_ray.config import load
from dhp_ray.schema import ConfigError


@pytest.mark.parametrize("share", ["on", "0", "0.0", "1.5", "-0.5", "nan"])
def test_what_is_no_share_of_activations_is_refused(share: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load([f"train.activation_offload={share}"])
    assert str(raised.value) == (f"train.activation_offload: got {share!r}; allowed: off, auto, or a share above 0, up "
                                 "to 1")
    assert [load([f"train.activation_offload={good}"]).train.activation_offload
            for good in ("off", "auto", "1", "1.0", "0.25")] == ["off", "auto", "1", "1.0", "0.25"]


def test_images_are_encoded_apart_with_one_barrier_a_step_alone() -> None:
    for encoder in ("group", "auto"):
        assert load([f"planner.encoder={encoder}", "planner.sync=micro_batch"]).planner.encoder == encoder
    assert load(["planner.encoder=world", "planner.sync=auto"]).planner.encoder == "world"
    with pytest.raises(ConfigError) as raised:
        load(["planner.encoder=world", "planner.sync=micro_batch"])
    assert str(raised.value) == ("planner.encoder: got 'world' with planner.sync=micro_batch; allowed: group or auto, "
                                 "or world with planner.sync=step")
