"""The picture beside a cost file: the predicted and the measured seconds of each pack."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

import numpy as np

from dhp_ray.measure.cost_file import Measured


def draw(measured: Measured, path: Path | BinaryIO) -> None:
    """Write a PNG: predicted against measured seconds of all packs, and the relative error of each."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.5), layout="constrained")
    both, errors = figure.subplots(1, 2)
    lowest = min(points.measured.min() for points in measured.points)
    highest = max(points.measured.max() for points in measured.points)
    both.plot([lowest, highest], [lowest, highest], color="0.7", linewidth=1)
    for points in measured.points:
        both.scatter(points.measured, points.predicted, s=14, label=points.kind)
        errors.scatter(points.measured, 100 * (points.predicted / points.measured - 1.0), s=14, label=points.kind)
    both.set(xscale="log", yscale="log", xlabel="measured, s", ylabel="predicted, s", title=measured.cost.name)
    errors.axhline(0.0, color="0.7", linewidth=1)
    median = 100 * np.median(np.concatenate([np.abs(points.predicted / points.measured - 1.0)
                                             for points in measured.points]))
    errors.set(xscale="log", xlabel="measured, s", ylabel="predicted - measured, %", title=f"median {median:.1f} %")
    both.legend()
    figure.savefig(path, format="png", dpi=110)
