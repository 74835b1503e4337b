"""Cost files of worlds whose costs are known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from dhp_ray.measure.cost_file import Measured, MeasuredSession, measured_cost
from dhp_ray.planner import CostModel
from dhp_ray.planner.cost.model import links_of
from dhp_ray.planner.cost.origin import CostFile, Origin, difference, origin_of_run
from dhp_ray.planner.memory.model import MemoryModel, MemorySettings
from tests.measure.known_world import BESIDE_GATHERS_S, GATHER_S, TRUE, UPDATE_S, results_of, spec
from tests.published_configs import shape_of

MEMORY = MemoryModel(shape_of("3B", 3), MemorySettings(sync="step", world_size=2, precision="bf16", recomputes=False))
KNOWN = CostModel(1e-9, 1e-6, 1.0, 0.5, {"intra": 3e11, "inter": 4e10}, communication="ring", latency_s=0.25,
                  overlap=0.75, group_s=0.125)
SPEC = spec(sizes=spec().sizes._replace(max_tokens=2048))


def origin() -> Origin:
    return origin_of_run(MEMORY, "three", {}, {"kind": "cuda", "name": "NVIDIA H100", "count": 2})


def measured(*syncs: str, **changed: Any) -> Measured:
    specs = [replace(SPEC, sync=sync, **changed) for sync in syncs or ("step",)]
    return measured_cost([MeasuredSession(of, results_of(of, 0.02)) for of in specs], origin(), MEMORY, KNOWN, "known")


def test_a_file_that_is_written_is_read_as_it_was_fitted(tmp_path: Path) -> None:
    found = measured()
    found.write(tmp_path / "new" / "cost.yaml")
    assert (tmp_path / "new" / "cost.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "new" / "cost.png").stat().st_size > 10_000
    read = CostFile.load(tmp_path / "new" / "cost.yaml")
    assert read.origin is not None
    assert difference(read.origin, origin()) == ""
    for name in ("quadratic_s", "linear_s", "pack_s"):
        assert getattr(read.cost, name) == pytest.approx(getattr(TRUE, name), rel=0.2)
    assert read.cost.comm_bytes_per_token == 3 * 2 * 2 * 128 * (2 + 2 + 4)  # layers, keys and values, heads, widths
    assert read.cost.group_s == KNOWN.group_s
    assert not read.cost.estimated
    tree = yaml.safe_load((tmp_path / "new" / "cost.yaml").read_text())
    assert tree["measured"]["derived"] == ["bandwidth_bytes_per_s.inter", "forward", "vision_forward", "group_s"]
    inside, across = tree["bandwidth_bytes_per_s"]["intra"], tree["bandwidth_bytes_per_s"]["inter"]
    assert across == inside  # slower than what is known of those across
    assert 0 < tree["measured"]["spread"] < 0.1
    assert set(tree["errors"]["packs"]) == {"median", "mean", "worst"}
    assert tree["errors"]["packs"]["median"] < 0.05
    assert tree["errors"]["linear_s"] < 0.05
    assert tree["errors"]["rings"]["median"] < 0.05
    head = (tmp_path / "new" / "cost.yaml").read_text().splitlines()[:4]
    assert head == [f"# {line}" for line in found.summary()]
    assert head[0] == "# Measured by jobs/measure.py on 2 ranks of cuda NVIDIA H100"
    assert head[1].startswith("# packs on one rank: off by ")
    assert head[3].startswith(f"# {tree['measured']['packs']} packs; ")


def test_both_modes_in_one_file() -> None:
    found = measured("step", "micro_batch")
    assert found.cost.fixed_s_by_sync == {"step": found.cost.fixed_s, "micro_batch": pytest.approx(GATHER_S, rel=0.2)}
    assert found.cost.fixed_s == pytest.approx(TRUE.fixed_s, rel=0.01)
    assert found.cost.update_s == pytest.approx(UPDATE_S, rel=0.01)
    assert found.cost.latency_s_by_sync == {
        "step": found.cost.latency_s, "micro_batch": pytest.approx(found.cost.latency_s + BESIDE_GATHERS_S, rel=0.2)}
    alone = measured("micro_batch")
    assert alone.cost.latency_s == pytest.approx(found.cost.latency_s + BESIDE_GATHERS_S, rel=0.2)
    assert alone.cost.latency_s_by_sync == {}
    assert alone.cost.fixed_s == pytest.approx(GATHER_S, rel=0.2)
    assert alone.cost.fixed_s_by_sync == {}
    assert alone.cost.linear_s == pytest.approx(TRUE.linear_s, rel=0.2)


def test_one_rank_takes_what_it_cannot_measure_from_what_is_known() -> None:
    found = measured(nodes=(0,))
    cost = found.cost
    assert (links_of(cost.bandwidth_bytes_per_s), cost.latency_s, cost.overlap, cost.group_s) == (
        links_of(KNOWN.bandwidth_bytes_per_s), KNOWN.latency_s, KNOWN.overlap, KNOWN.group_s)
    assert found.sections["measured"]["derived"] == ["bandwidth_bytes_per_s.intra", "bandwidth_bytes_per_s.inter",
                                                     "forward", "vision_forward", "group_s", "latency_s", "overlap"]


def test_what_windows_exchange_is_known_and_no_latency() -> None:
    """1 ms of what two ranks wait for in a ring."""
    known = replace(KNOWN, window_s=1e-3)
    one, two = (measured_cost([MeasuredSession(of, results_of(of))], origin(), MEMORY, known, "known")
                for of in (replace(SPEC, nodes=(0,)), SPEC))
    assert (one.cost.window_s, one.cost.latency_s) == (1e-3, KNOWN.latency_s)
    without = measured_cost([MeasuredSession(SPEC, results_of(SPEC))], origin(), MEMORY, KNOWN, "known")
    assert (two.cost.window_s, two.cost.latency_s) == (1e-3, pytest.approx(without.cost.latency_s - 1e-3))
    assert two.sections["measured"]["derived"] == [*without.sections["measured"]["derived"], "window_s"]


def test_links_across_nodes_are_their_own() -> None:
    found = measured(nodes=(0, 0, 1, 1))
    assert found.cost.bandwidth_bytes_per_s["intra"][2] == pytest.approx(5e8, rel=0.1)
    assert found.cost.bandwidth_bytes_per_s["inter"][2] == pytest.approx(1e8, rel=0.1)
    assert found.sections["measured"]["derived"] == ["forward", "vision_forward", "group_s"]


@pytest.mark.parametrize(("intra", "inter", "over"), [(3e9, 2e8, 0.4), (1e8, 5e7, 0.1), (1e9, 1e9, 1.0)])
def test_links_across_nodes_that_were_not_measured_follow_from_the_device(
    intra: float, inter: float, over: float
) -> None:
    known = replace(KNOWN, bandwidth_bytes_per_s={"intra": intra, "inter": inter})
    found = measured_cost([MeasuredSession(SPEC, results_of(SPEC))], origin(), MEMORY, known, "known")
    measured_bytes_per_s = found.cost.bandwidth_bytes_per_s
    assert measured_bytes_per_s["intra"][2] == pytest.approx(5e8, rel=0.1)
    assert measured_bytes_per_s["inter"][2] / measured_bytes_per_s["intra"][2] == pytest.approx(over, rel=0.1)


def test_a_frozen_encoder_has_no_backward_pass() -> None:
    frozen = MemoryModel(MEMORY.shape, replace(MEMORY.settings, frozen=("vision",)))
    found = measured_cost([MeasuredSession(SPEC, results_of(SPEC))], origin(), frozen, KNOWN, "known")
    assert found.cost.vision_forward == 1.0


def test_shares_of_the_forward_pass_follow_from_the_passes() -> None:
    again = MemoryModel(MEMORY.shape, replace(MEMORY.settings, recomputes=True, frozen=("language",)))
    of_mode = replace(SPEC, sync="micro_batch")
    found = measured_cost([MeasuredSession(of_mode, results_of(of_mode))], origin(), again, KNOWN, "known")
    assert found.cost.forward == 1 / 3  # forward, again, and a backward pass without weights
    assert found.cost.vision_forward == 1 / 4
    assert found.sections["measured"]["derived"][-3:] == ["forward", "vision_forward", "group_s"]
