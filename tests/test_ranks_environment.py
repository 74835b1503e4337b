"""Ranks of a test are processes as the test would start them."""

from __future__ import annotations

import os

import pytest

from tests.ranks import run_processes


def variable(rank: int, port: int, name: str) -> str | None:
    return os.environ.get(name)


def test_ranks_have_the_environment_of_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    run_processes(variable, 1, "PATH")  # the server that forks them is there from now on
    monkeypatch.setenv("DHP_RAY_OF_A_TEST", "given")
    assert run_processes(variable, 2, "DHP_RAY_OF_A_TEST") == ["given", "given"]
