"""The table of docs/memory.md is what benchmarks/memory.py prints."""

from __future__ import annotations

import pytest

from benchmarks.memory import DEVICES, MODELS, NUM_DEVICES, main, table, tokens_per_rank
from dhp_ray.planner.cost.model import SYNCS
from tests.readme import section


def test_the_page_has_the_table_that_the_script_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert table() in section("What fits")
    assert main(["--help"]) == 0
    assert "none of these devices has been measured" in capsys.readouterr().out


def test_more_devices_never_hold_less_and_all_ranks_together_never_less_than_one() -> None:
    for name in MODELS.values():
        for gibibytes in DEVICES:
            whole, sharded = ([tokens_per_rank(name, gibibytes, count, sync) for count in NUM_DEVICES]
                              for sync in SYNCS)
            for tokens in (whole, sharded):
                assert tokens == sorted(tokens)
            assert all(one <= other for one, other in zip(whole, sharded))
