from __future__ import annotations

import pytest

from benchmarks.offload import QWEN_7B, Case, main, mixed
from dhp_ray.planner import plan_batch


def test_a_plan_with_it_is_no_longer_than_one_without() -> None:
    """On a small cluster, of each mix: in the modes where copies are hidden and where they are not."""
    for recomputes in (False, True):
        case = Case(*QWEN_7B, "micro_batch", 8, recomputes)
        found = case.training()
        for long_share in (0.05, 0.5):
            batch = mixed(48, 8 * found.tokens_per_rank, 0, long_share)
            off, auto = (plan_batch(batch, case.cluster(found, offload), found.cost, sync=case.sync)
                         for offload in (False, True))
            assert auto.predicted_time_s <= off.predicted_time_s * 1.001


def test_unknown_parts_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan"]) == 2
    assert capsys.readouterr().err == "offload.py: plan: no such part; allowed: plans, sequence\n"
