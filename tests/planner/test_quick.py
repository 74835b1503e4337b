"""The last resort: near `dhp` whatever the batch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_dhp import ALL_TO_ALL, RING, bimodal

from dhp_ray.planner import LAST_RESORT, ClusterSpec, Sample, plan_batch
from dhp_ray.planner.cost.model import SYNCS

ALLOWED = 1.15


def ratio(samples, cluster, cost):
    """Predicted makespan over `dhp`'s for the same batch, with sync=step."""
    # each validates itself
    last_resort, plan = (plan_batch(samples, cluster, cost, planner=name) for name in (LAST_RESORT, "dhp"))
    return last_resort.predicted_time_s / plan.predicted_time_s


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 30_000), min_size=30, max_size=120), st.integers(60, 90), st.sampled_from([1, 4, 8]),
       st.sampled_from([8192, 32768, 131072]), st.sampled_from([ALL_TO_ALL, RING]), st.integers(0, 2**32 - 1))
def test_it_is_near_dhp(lengths, num_ranks, ranks_per_node, tokens_per_rank, cost, seed):
    random = np.random.default_rng(seed)
    speeds = tuple(random.uniform(0.9, 1.1, num_ranks)) if random.random() < 0.5 else ()
    samples = [Sample(str(row), length, 0, ((1, 16, 16),) * int(random.integers(0, 3)))
               for row, length in enumerate(lengths)]
    assert ratio(samples, ClusterSpec(num_ranks, ranks_per_node, tokens_per_rank, speeds), cost) <= ALLOWED


@pytest.mark.parametrize("tokens_per_rank", [8192, 32768, 131072])
@pytest.mark.parametrize("num_ranks", [2, 8, 64])
def test_it_is_near_dhp_for_few_and_many_sequences(num_ranks, tokens_per_rank):
    spread = tuple(np.clip(np.random.default_rng(1).normal(1.0, 0.05, num_ranks), 0.7, 1.3))
    one_slow = (1 / 3,) + (1.0,) * (num_ranks - 1)
    for each, speeds in ((0.5, ()), (1.5, spread), (4, ()), (4, one_slow), (16, ())):
        samples = bimodal(max(1, int(each * num_ranks)), num_ranks)
        assert ratio(samples, ClusterSpec(num_ranks, 8, tokens_per_rank, speeds), ALL_TO_ALL) <= ALLOWED


@pytest.mark.parametrize("sync", SYNCS)
def test_the_short_last_batch_of_an_epoch_runs_on_both_ranks(sync):
    """Three short sequences fit one rank's memory; packed there, the other rank would do nothing."""
    samples = [Sample("a", 900), Sample("b", 800), Sample("c", 700)]
    plan = plan_batch(samples, ClusterSpec(2, 2, 8192), RING, planner=LAST_RESORT, sync=sync)
    assert {rank for group in plan.groups for rank in group.ranks} == {0, 1}


def test_at_512_ranks_it_is_near_dhp():
    samples, random = bimodal(2048, 512), np.random.default_rng(1)
    spread = tuple(np.clip(random.normal(1.0, 0.05, 512), 0.7, 1.3))
    for speeds in ((), spread, tuple(random.uniform(0.4, 1.2, 512))):
        assert ratio(samples, ClusterSpec(512, 8, 32768, speeds), ALL_TO_ALL) <= ALLOWED
