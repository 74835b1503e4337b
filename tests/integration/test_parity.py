"""Losses of 20 steps and the parameters after them, against one rank: a subset of `benchmarks/parity.py` that has every value of every axis."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.cases import SITUATIONS, SYNCS, Case, Matrix, Row
from benchmarks.worlds import corpus_of, data_overrides
from dhp_ray.config import load

STEPS, BATCH, LONGEST = 20, 4, 400
PLAIN = [(2, "static", "pool"), (3, "dhp", "parent"), (5, "dhp", "pool"), (5, "static", "parent")]
SPECIAL = [Case(3, "dhp", SYNCS[place % len(SYNCS)], ("pool", "parent")[place // 2 % 2], situation) for place, situation in enumerate(list(SITUATIONS)[1:])]
CASES = [Case(num_ranks, planner, sync, transport) for num_ranks, planner, transport in PLAIN for sync in SYNCS] + SPECIAL


@pytest.fixture(scope="module")
def matrix(test_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    overrides = [*data_overrides(str(test_data), tmp_path_factory.mktemp("data")), "data.max_pixels=20000"]
    return Matrix(overrides, corpus_of(load(overrides), STEPS * BATCH, LONGEST), STEPS, BATCH)


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case).replace(", ", "-").replace(" ", "_"))
def test_the_case_computes_what_one_rank_does(matrix: Matrix, case: Case) -> None:
    row: Row = matrix.run(case)
    assert not row.faults, row
    if case.situation == "as they come":
        assert case.num_ranks in row.degrees  # 2, 3 and 5 among them
