"""Fixtures of the whole session: one local Ray cluster, and the folder of real test data."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # a local ray.init would leave a token file behind that later clusters demand
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """A local cluster of 2 CPUs; entry points started as processes find it through RAY_ADDRESS."""
    import ray

    ray.init(num_cpus=2, include_dashboard=False, configure_logging=False, log_to_driver=False)
    os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
    yield
    del os.environ["RAY_ADDRESS"]
    ray.shutdown()


@pytest.fixture(scope="session")
def test_data() -> Path:
    """Real images, conversations and lengths; `DHP_RAY_TEST_DATA` names their folder."""
    if not os.environ.get("DHP_RAY_TEST_DATA"):
        pytest.skip("DHP_RAY_TEST_DATA names no folder with nlvr/, lengths/ and cost/")
    return Path(os.environ["DHP_RAY_TEST_DATA"])
