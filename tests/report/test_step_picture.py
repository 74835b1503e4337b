from __future__ import annotations

from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from dhp_ray.planner import ClusterSpec, CostModel, Sample, plan_batch
from dhp_ray.report.plan_picture import draw_plan, draw_planned
from dhp_ray.report.step_picture import draw_step
from tests.report.runs import plan_of, results_of


@pytest.mark.parametrize("sync", ["step", "micro_batch"])
def test_plan_and_measured_times_are_drawn(sync: str) -> None:
    plan = plan_of(1, sync=sync)
    stream = BytesIO()
    draw_step(plan, results_of(plan, 1), stream)
    picture = np.asarray(Image.open(stream).convert("RGB"))
    above, below = np.array_split(picture, 2)
    for half in (above, below):
        assert len(np.unique(half.reshape(-1, 3), axis=0)) > 50
        saturation = half.max(axis=2).astype(int) - half.min(axis=2)
        assert (saturation > 60).mean() > 0.2, "boxes in colour cover a good part"


def test_images_encoded_apart_are_orange() -> None:
    stream, shares = BytesIO(), []
    for encoder in ("group", "world"):
        plan = plan_of(3, encoder=encoder)
        stream = BytesIO()
        draw_step(plan, results_of(plan, 3), stream)
        picture = np.asarray(Image.open(stream).convert("RGB")).astype(int)
        orange = (abs(picture - np.array([255, 127, 14])).max(axis=2) < 8).mean(axis=1)
        shares.append([half.mean() for half in np.array_split(orange, 2)])
    assert max(shares[0]) == 0.0
    assert min(shares[1]) > 0.001


def test_no_results_leave_the_lower_half_empty() -> None:
    stream = BytesIO()
    draw_step(plan_of(1), [], stream)
    assert Image.open(stream).size[0] > 500


def test_a_plan_goes_to_a_file_and_to_a_stream(tmp_path: Path) -> None:
    plan, stream = plan_of(1), BytesIO()
    draw_plan(plan, tmp_path / "plan.png")
    draw_plan(plan, stream)
    assert np.array_equal(np.asarray(Image.open(tmp_path / "plan.png")), np.asarray(Image.open(stream)))
    draw_plan(plan, tmp_path / "plan.svg")
    assert (tmp_path / "plan.svg").read_text().startswith("<?xml")


@pytest.mark.parametrize("sync", ["step", "micro_batch"])
def test_fixed_seconds_are_drawn(sync: str) -> None:
    """What stays blank in the picture is idle: of a rank that always works nothing is."""
    cost = CostModel(0.0, 1e-2, 1.0, 3.0, {2: 1e9})
    plan = plan_batch([Sample("a", 100), Sample("b", 90)], ClusterSpec(1, 1, 100), cost, sync=sync)
    drawn: list[tuple[float, float]] = []
    figure = Figure()
    draw_planned(figure.subplots(), plan, lambda tokens: "red")
    for collection in figure.axes[0].collections:
        drawn += [(path.vertices[:, 0].min(), path.vertices[:, 0].max()) for path in collection.get_paths()]
    ends = [0.0, *(end for _, end in sorted(drawn))]
    assert [start for start, _ in sorted(drawn)] == pytest.approx(ends[:-1])
    assert ends[-1] == pytest.approx(plan.predicted_time_s)
