"""How many steps a run is expected to have, for its learning rate and its progress."""

from __future__ import annotations

import pytest

from dhp_ray.config import load
from dhp_ray.runtime.driver.start import batches_of


@pytest.mark.parametrize(("num_rows", "drop_last", "batches"), [
    (1000, False, 2), (1000, True, 1), (1024, True, 2), (1024, False, 2), (3, False, 1), (3, True, 1)])
def test_batches_of_an_epoch(num_rows: int, drop_last: bool, batches: int) -> None:
    config = load(["data.format=synthetic", "data.path=unused", "run.dir=unused", "batch.global_samples=512",
                   f"batch.drop_last={drop_last}"])
    assert batches_of(num_rows, config) == batches
