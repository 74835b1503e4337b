"""Losses of 20 steps and the parameters after them, against one rank: a subset of `benchmarks/parity.py` that has every
value of every axis, and its series of whole runs.

A few of the cases run their first steps in make test, all of them run whole in make test-all.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.cases import SITUATIONS, SYNCS, TRANSPORTS, Case, Matrix, Row
from benchmarks.job_series import job_series
from benchmarks.worlds import corpus_of, data_overrides
from dhp_ray.config import load

STEPS, FIRST_STEPS, BATCH, LONGEST = 20, 2, 4, 400
PLAIN = [Case(2, "static", "step", "pool"), Case(3, "dhp", "step", "parent"), Case(5, "dhp", "step", "pool"),
         Case(2, "dhp", "micro_batch", "parent"), Case(3, "static", "micro_batch", "pool"),
         Case(5, "dhp", "micro_batch", "parent")]
SPECIAL = [Case(3, "dhp", SYNCS[place % 2], TRANSPORTS[place // 2 % 2], situation)
           for place, situation in enumerate(list(SITUATIONS)[1:])]
QUICK = [case for case in SPECIAL if case.situation == "images apart"]


def name(case: Case) -> str:
    return str(case).replace(", ", "-").replace(" ", "_")


def matrix(test_data: Path, folder: Path, steps: int) -> Matrix:
    overrides = [*data_overrides(str(test_data), folder), "data.max_pixels=20000"]
    return Matrix(overrides, corpus_of(load(overrides), steps * BATCH, LONGEST), steps, BATCH)


@pytest.fixture(scope="module")
def whole(test_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    return matrix(test_data, tmp_path_factory.mktemp("data"), STEPS)


@pytest.fixture(scope="module")
def begun(test_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    return matrix(test_data, tmp_path_factory.mktemp("data"), FIRST_STEPS)


def assert_as_one_rank(matrix: Matrix, case: Case) -> None:
    row: Row = matrix.run(case)
    assert not row.faults, row
    if case.situation == "as they come":
        assert case.num_ranks in row.degrees  # 2, 3 and 5 among them


@pytest.mark.slow
@pytest.mark.parametrize("case", PLAIN + SPECIAL, ids=name)
def test_the_case_computes_what_one_rank_does(whole: Matrix, case: Case) -> None:
    assert_as_one_rank(whole, case)


@pytest.mark.parametrize("case", QUICK, ids=name)
def test_its_first_steps_are_those_of_one_rank(begun: Matrix, case: Case) -> None:
    assert_as_one_rank(begun, case)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_whole_runs_with_images_apart_have_the_losses_of_one_worker(
    ray_cluster: None, test_data: Path, tmp_path: Path
) -> None:
    for series in job_series(data_overrides(str(test_data), tmp_path), tmp_path, SYNCS):
        assert not series.faults, series
