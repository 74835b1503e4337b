"""benchmarks/experts.py: layouts of experts that are tied to attention groups, and its tables on the page."""

from __future__ import annotations

import re

import pytest

from benchmarks.experts import CASES, MIXTRAL, UnitCost, main, tied, units_of
from dhp_ray.planner import ClusterSpec, CostModel, Sample, plan_batch
from dhp_ray.planner.plan.cluster import Recomputation
from tests.test_comparisons import TABLES, table_after

COST = CostModel(1e-9, 1e-5, 1e5, 0.1, {"intra": 1e10, "inter": 1e9}, communication="ring", overlap=0.9, latency_s=1e-4,
                 pack_s=1e-3, gather_s=0.02)
CLUSTER = ClusterSpec(8, 4, 1000, recomputation=Recomputation(1.0, 1000, 4000, 1000))
BATCH = [Sample(str(length), length) for length in (20_000, 9_000, 4_000, 2_500, 900, 800, 700, 300, 200, 100)]


@pytest.mark.parametrize("sharing", [1, 2, 4])
def test_a_unit_costs_what_its_ranks_cost(sharing: int) -> None:
    units = plan_batch(BATCH, units_of(CLUSTER, sharing), UnitCost.of(COST, sharing), sync="micro_batch")
    plan = tied(BATCH, CLUSTER, COST, sharing)
    assert {group.degree % sharing for group in plan.groups} == {0}
    assert {group.ranks[0] % sharing for group in plan.groups} == {0}
    assert plan.predicted_time_s == pytest.approx(units.predicted_time_s)
    if sharing == 1:
        assert plan.groups == plan_batch(BATCH, CLUSTER, COST, sync="micro_batch").groups


def test_mixtral_on_the_page_is_what_is_computed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mixtral"]) == 0
    assert capsys.readouterr().out.partition("\n\n")[2] in TABLES
    assert MIXTRAL.num_parameters() == 140_620_634_112  # as published


def test_the_page_says_what_its_cells_say() -> None:
    """The best E of a row, folded and tied, makes its last column."""
    rows = table_after("`python benchmarks/experts.py qwen`")
    assert [row["model, ranks, workload"] for row in rows] == [
        f"{model}, {num_ranks} {device}, {workload}" for model, num_ranks, workload in CASES
        for device in ("H100", "910B")]
    for row in rows:
        cells = [re.match(r"([\d.]+) \(([\d.]+)\)", row[f"E={sharing}"]) for sharing in (1, 2, 4, 8)]
        pairs = [(float(cell[1]), float(cell[1]) * float(cell[2])) for cell in cells if cell]
        folded_s, tied_s = (min(seconds) for seconds in zip(*pairs))
        assert float(row["tied"]) == pytest.approx(tied_s / folded_s, abs=0.02)


def test_unknown_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nonsense"]) == 2
    assert capsys.readouterr().err == "experts.py: nonsense: no such table; allowed: qwen, mixtral\n"
