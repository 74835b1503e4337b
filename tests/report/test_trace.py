from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from dhp_ray.planner.plan.types import SplitImage, encoding_ranks
from dhp_ray.report.trace import trace_of
from tests.report.runs import plan_of, results_of


def slices(trace: dict[str, Any], rank: int, *names: str) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == "X" and event["pid"] == rank + 1
            and event["name"].split()[0] in names]


@pytest.mark.parametrize("sync", ["step", "micro_batch"])
def test_each_rank_shows_what_it_measured(sync: str) -> None:
    plan = plan_of(3, sync=sync)
    results = results_of(plan, 3)
    trace = json.loads(json.dumps(trace_of(plan, results)))
    for result in results:
        packs = slices(trace, result.rank, "pack")
        members = [list(plan.groups[time.index].ranks) for time in result.pack_times]
        assert [event["args"]["ranks"] for event in packs] == members
        compute = sum(event["dur"] for event in slices(trace, result.rank, "compute"))
        exchange = sum(event["dur"] for event in slices(trace, result.rank, "exchange"))
        assert exchange == pytest.approx(1e6 * sum(time.blocked_s for time in result.pack_times), abs=1)
        busy_s = sum(time.end_s - time.start_s for time in result.pack_times)
        assert compute + exchange == pytest.approx(1e6 * busy_s, abs=1)
        row = sorted(slices(trace, result.rank, "pack", "wait", "update"), key=lambda event: event["ts"])
        assert all(first["ts"] + first["dur"] <= second["ts"] + 1e-3 for first, second in pairwise(row))
        assert row[-1]["name"] == "update"
        assert sum(event["dur"] for event in row) == pytest.approx(1e6 * result.step_time_s, rel=0.01)


def test_images_encoded_apart_are_slices_of_their_own() -> None:
    plan = plan_of(3, encoder="world")
    results = results_of(plan, 3)
    trace = trace_of(plan, results)
    for result in results:
        before, after = slices(trace, result.rank, "encoder", "encoder,")
        assert (before["name"], after["name"]) == ("encoder", "encoder, backward")
        packs = slices(trace, result.rank, "pack")
        assert all(before["ts"] + before["dur"] <= pack["ts"] + 1e-3 for pack in packs)
        assert all(pack["ts"] + pack["dur"] <= after["ts"] + 1e-3 for pack in packs)
        encoded = sum(group.encoders.count(result.rank) for group in plan.groups)
        assert (before["args"]["num_images"], before["args"]["sent_bytes"]) == (encoded, 1000)
        row = sorted(slices(trace, result.rank, "pack", "wait", "update", "encoder", "encoder,"),
                     key=lambda event: event["ts"])
        assert all(first["ts"] + first["dur"] <= second["ts"] + 1e-3 for first, second in pairwise(row))


def test_the_images_of_all_ranks_are_counted_in_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, packs = plan_of(3, encoder="world"), []
    monkeypatch.setattr("dhp_ray.report.trace.encoding_ranks",
                        lambda *arguments: packs.append(arguments) or encoding_ranks(*arguments))
    trace_of(plan, results_of(plan, 3))
    assert len(packs) == len(plan.groups)


def test_an_image_in_parts_is_one_of_each_rank_s() -> None:
    plan = plan_of(3, encoder="world")
    index, image = next((index, image) for index, group in enumerate(plan.groups) for image, grid in enumerate(
        grid for row in group.sequences for grid in plan.samples[row].vision_grids) if grid[0] > 1)
    first = plan.groups[index].encoders[image]
    changed = replace(plan.groups[index], splits=(SplitImage(image, (first, (first + 1) % 4)),))
    split = replace(plan, groups=(*plan.groups[:index], changed, *plan.groups[index + 1:]))
    split.validate()
    more = []
    for shown in (plan, split):
        trace = trace_of(shown, results_of(plan, 3))
        more.append([slices(trace, rank, "encoder", "encoder,")[0]["args"]["num_images"] for rank in range(4)])
    assert [after - before for before, after in zip(*more)] == [int(rank == (first + 1) % 4) for rank in range(4)]


def test_a_frozen_encoder_has_one_slice() -> None:
    plan = plan_of(3, encoder="world")
    results = [result._replace(encoder_times=result.encoder_times[:1]) for result in results_of(plan, 3)]
    trace = trace_of(plan, results)
    for rank in range(4):
        assert [event["name"] for event in slices(trace, rank, "encoder", "encoder,")] == ["encoder"]


def test_a_rank_that_only_encodes_waits_between_its_phases() -> None:
    plan = plan_of(3, encoder="world")
    result = results_of(plan, 3)[0]
    before, after = result.encoder_times
    trace = trace_of(plan, [result._replace(pack_times=())])
    row = slices(trace, result.rank, "encoder", "encoder,", "wait", "update", "pack")
    assert [event["name"] for event in row] == ["encoder", "wait", "encoder, backward", "update"]
    assert row[1]["dur"] == pytest.approx(1e6 * (after.start_s - before.end_s), abs=0.01)


@pytest.mark.parametrize("encoder", ["group", "world"])
def test_the_parts_of_a_pack_lie_inside_it(encoder: str) -> None:
    """And those of the encoder's phases, of which every second is one or the other."""
    plan = plan_of(3, encoder=encoder)
    results = results_of(plan, 3)
    trace = trace_of(plan, results)
    for rank in range(4):
        assert sum(event["dur"] for event in slices(trace, rank, "compute", "exchange")) == pytest.approx(sum(
            event["dur"] for event in slices(trace, rank, "pack", "encoder", "encoder,")))
        packs = [(event["ts"], event["ts"] + event["dur"])
                 for event in slices(trace, rank, "pack", "encoder", "encoder,")]
        for part in slices(trace, rank, "compute", "exchange"):
            assert any(start <= part["ts"] and part["ts"] + part["dur"] <= end + 1e-9 for start, end in packs)


def test_every_sequence_is_in_one_pack() -> None:
    plan = plan_of(3)
    trace = trace_of(plan, results_of(plan, 3))
    seen = {tuple(event["args"]["sample_ids"]) for rank in range(4) for event in slices(trace, rank, "pack")}
    assert sorted(name for names in seen for name in names) == sorted(sample.id for sample in plan.samples)
    assert {event["pid"]: event["args"]["name"] for event in trace["traceEvents"]
            if event["name"] == "process_name"} == {
        rank + 1: f"rank {rank}" for rank in range(4)}
    assert all(event["pid"] > 0 and event["tid"] > 0 for event in trace["traceEvents"])  # 0 is Perfetto's own


def test_a_rank_without_packs_waits_and_updates() -> None:
    plan = plan_of(3, num_samples=1, num_ranks=4)
    results = results_of(plan, 3)
    trace = trace_of(plan, results)
    idle = next(result.rank for result in results if not result.pack_times)
    assert [event["name"] for event in slices(trace, idle, "pack", "wait", "update")] == ["wait", "update"]
