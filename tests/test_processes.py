"""The mark `processes` is found, not written: `make test-unit` leaves those tests out."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.processes import _starts
from tests.ranks import run_ranks


def started() -> None:
    subprocess.run([sys.executable, "-c", ""], check=True)


class Child:
    def end(self) -> None:
        started()


def test_a_test_of_this_file_starts_none(request: pytest.FixtureRequest) -> None:
    assert not request.node.get_closest_marker("processes")


def test_what_starts_a_process_by_way_of_others_is_found() -> None:
    assert _starts(started)
    assert _starts(lambda: started())
    assert _starts(Child)
    assert _starts(lambda: run_ranks)
    assert not _starts(lambda: sys.executable)
