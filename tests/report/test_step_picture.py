from __future__ import annotations

from io import BytesIO
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from dhp_ray.planner import ClusterSpec, CostModel, Sample, plan_batch
from dhp_ray.planner.timeline import apart_timeline
from dhp_ray.report.step_picture import draw_plan, draw_planned
from tests.report.runs import plan_of, results_of


@pytest.mark.parametrize("sync", ["step", "micro_batch"])
def test_plan_and_measured_times_are_drawn(sync: str) -> None:
    plan = plan_of(1, sync=sync)
    stream = BytesIO()
    draw_plan(plan, stream, results_of(plan, 1))
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
        draw_plan(plan, stream, results_of(plan, 3))
        picture = np.asarray(Image.open(stream).convert("RGB")).astype(int)
        orange = (abs(picture - np.array([255, 127, 14])).max(axis=2) < 8).mean(axis=1)
        shares.append([half.mean() for half in np.array_split(orange, 2)])
    assert max(shares[0]) == 0.0
    assert min(shares[1]) > 0.001


def test_no_results_leave_the_lower_half_empty() -> None:
    stream = BytesIO()
    draw_plan(plan_of(1), stream, [])
    assert Image.open(stream).size[0] > 500


def test_a_plan_goes_to_a_file_and_to_a_stream(tmp_path: Path) -> None:
    plan, stream = plan_of(1), BytesIO()
    draw_plan(plan, tmp_path / "plan.png")
    draw_plan(plan, stream)
    assert np.array_equal(np.asarray(Image.open(tmp_path / "plan.png")), np.asarray(Image.open(stream)))
    draw_plan(plan, tmp_path / "plan.svg")
    assert (tmp_path / "plan.svg").read_text().startswith("<?xml")


@pytest.mark.parametrize("vision_forward", [1 / 3, 1.0])
def test_phases_of_the_encoder_are_drawn_where_the_plan_has_them(vision_forward: float) -> None:
    cost = CostModel(0.0, 1.0, 0.0, 3.0, {2: 1e9}, vision_linear_s=1.0, vision_forward=vision_forward,
                     feature_bytes=1e9)
    plan = plan_batch([Sample("a", 1, 3, ((1, 1, 1), (1, 1, 2)))], ClusterSpec(2, 2, 4), cost, encoder="world")
    axes = Figure().subplots()
    draw_planned(axes, plan, lambda tokens: "red")
    apart = apart_timeline(plan)
    assert apart is not None
    (phases,) = [collection for collection in axes.collections if collection.get_label() == "encoder"]
    drawn = sorted((path.vertices[:, 1].min() + 0.5, path.vertices[:, 0].min(), path.vertices[:, 0].max())
                   for path in phases.get_paths())
    spans = [(rank, 3.0 + begin, 3.0 + end) for begins, ends in (((0.0, 0.0), apart.encoded_s),
                                                                 (apart.backward_s, apart.end_s))
             for rank, (begin, end) in enumerate(zip(begins, ends))]
    assert np.array(drawn).ravel() == pytest.approx(np.array(sorted(spans)).ravel())
    assert sum(end - begin for _, begin, end in drawn) == pytest.approx(3.0)
    assert max(apart.backward_s - apart.ended_s) > 0 or vision_forward == 1.0


@pytest.mark.parametrize(("sync", "encoder"), [*product(("step", "micro_batch"), ("group", "world"))])
def test_fixed_seconds_are_drawn(sync: str, encoder: str) -> None:
    """What stays blank in the picture is idle: of a rank that always works nothing is."""
    cost = CostModel(0.0, 1e-2, 1.0, 3.0, {2: 1e9}, vision_linear_s=1e-2)
    samples = [Sample("a", 100, 0, ((1, 10, 10),) * 2), Sample("b", 90)]
    plan = plan_batch(samples, ClusterSpec(1, 1, 100), cost, sync=sync, encoder=encoder)
    assert plan.vision.layout == encoder
    drawn: list[tuple[float, float]] = []
    figure = Figure()
    draw_planned(figure.subplots(), plan, lambda tokens: "red")
    for collection in figure.axes[0].collections:
        drawn += [(path.vertices[:, 0].min(), path.vertices[:, 0].max()) for path in collection.get_paths()]
    ends = [0.0, *(end for _, end in sorted(drawn))]
    assert [start for start, _ in sorted(drawn)] == pytest.approx(ends[:-1])
    assert ends[-1] == pytest.approx(plan.predicted_time_s)
