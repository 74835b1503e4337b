"""`train.deterministic`: the same plans on as many ranks give the same bits, by operators that all have an order."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.cases import SYNCS
from benchmarks.worlds import corpus_of, data_overrides, plans_of, train_world
from dhp_ray.config import load

NUM_RANKS, BATCH, STEPS = 3, 5, 2


@pytest.mark.parametrize("sync", [SYNCS[0], *(pytest.param(sync, marks=pytest.mark.slow) for sync in SYNCS[1:])])
def test_the_same_plans_give_the_same_bits(tmp_path: Path, sync: str) -> None:
    config = load([*data_overrides("", tmp_path, 2 * BATCH * STEPS), "run.dir=unused", "comm.timeout_s=60",
                   f"planner.sync={sync}", "train.deterministic=true"])
    corpus = corpus_of(config, BATCH * STEPS)
    batches = [corpus.samples[first : first + BATCH] for first in range(0, BATCH * STEPS, BATCH)]
    plans = plans_of(batches, NUM_RANKS, "dhp", sync)
    assert {degree for plan in plans for degree in plan.degrees()} >= {1, 3}
    one, other = [train_world(config, plans, corpus, NUM_RANKS) for _ in range(2)]
    assert [step.loss_sum for step in one.steps] == [step.loss_sum for step in other.steps]
    for name, values in one.parameters.items():
        assert np.array_equal(values, other.parameters[name]), name
