"""The pictures of a report as bytes: curves, shares and histograms as SVG. They contain no text of a sample."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from typing import Any

import numpy as np

from dhp_ray.planner.plan.types import Sample

MAX_BARS, MAX_MARKS = 80, 200
Panel = tuple[str, tuple[float | None, float | None], dict[str, str]]
"""Curves that share an axis: its words and limits, and the label of each field of the metrics that is drawn."""
KINDS = ("text only", "with images", "with video")


@contextmanager
def svg(width: float, height: float, *shape: int) -> Iterator[tuple[Any, BytesIO]]:
    """Axes to draw on, and the stream that holds the picture afterwards; the same input gives the same bytes."""
    import matplotlib
    from matplotlib.figure import Figure

    figure, stream = Figure(figsize=(width, height), layout="constrained"), BytesIO()
    yield figure.subplots(*shape), stream
    with matplotlib.rc_context({"svg.hashsalt": "dhp_ray"}):
        figure.savefig(stream, format="svg", metadata={"Date": None})


def curves_picture(lines: Sequence[dict[str, Any]], panels: Sequence[Panel]) -> bytes:
    """Curves of a run's metrics over its steps, in panels one below the other."""
    with svg(10, 1.2 + 1.8 * len(panels), len(panels), 1) as (axes, stream):
        for place, (words, limits, curves) in zip(np.atleast_1d(axes), panels):
            for name, label in curves.items():
                points = [(line["step"], line[name]) for line in lines if line.get(name) is not None]
                place.plot([step for step, _ in points], [value for _, value in points], label=label, linewidth=1.2,
                           marker="." if len(points) <= MAX_MARKS else None)
            place.set(ylabel=words, ylim=limits)
            place.legend()
        place.set(xlabel="step")
    return stream.getvalue()


def degrees_picture(metrics: Sequence[dict[str, Any]]) -> bytes:
    """Packs of each degree as shares of a step's packs; if there are many steps, one bar shows several of them."""
    from matplotlib import colormaps

    degrees = sorted({int(degree) for line in metrics for degree in line["degrees"]})
    rows = np.linspace(0, len(metrics), min(len(metrics), MAX_BARS), endpoint=False).astype(int)  # each bar's first
    counts = np.array([[line["degrees"].get(str(degree), 0) for line in metrics] for degree in degrees])
    counts = np.add.reduceat(counts.reshape(-1, len(metrics)), rows, axis=1)
    shares = counts / np.maximum(counts.sum(axis=0), 1)
    edges = np.array([*(metrics[row]["step"] for row in rows), metrics[-1]["step"] + 1]) - 0.5
    with svg(10, 3.5) as (axes, stream):
        below = np.zeros(len(rows))
        for degree, share, place in zip(degrees, shares, np.linspace(0.05, 0.95, len(degrees))):
            axes.bar(edges[:-1], share, np.diff(edges), below, align="edge", color=colormaps["viridis"](place),
                     label=f"{degree}")
            below += share
        axes.set(xlabel="step", ylabel="share of packs", ylim=(0, 1), xlim=(edges[0], edges[-1]))
        if len(degrees) <= 16:
            axes.legend(title="degree", loc="center left", bbox_to_anchor=(1, 0.5))
    return stream.getvalue()


def lengths_picture(samples: Sequence[Sample]) -> bytes:
    """Histograms of lengths: all tokens by kind of sample, and the tokens of each modality (text, images, videos)."""
    with svg(10, 6, 2, 1) as ((above, below), stream):
        edges = np.geomspace(1, max(2, *(sample.num_tokens for sample in samples)) * 1.01, 41)
        by_kind = {kind: [sample.num_tokens for sample in samples if kind_of(sample) == kind] for kind in KINDS}
        present = {kind: lengths for kind, lengths in by_kind.items() if lengths}
        above.hist(list(present.values()), edges, stacked=True,
                   label=[f"{kind} ({len(lengths)})" for kind, lengths in present.items()])
        text = [sample.text_tokens for sample in samples if sample.text_tokens]
        images = [sample.vision_tokens for sample in samples if kind_of(sample) == KINDS[1]]
        videos = [sample.vision_tokens for sample in samples if kind_of(sample) == KINDS[2]]
        for lengths, label in ((text, "text"), (images, "images"), (videos, "video")):
            if lengths:
                below.hist(lengths, edges, histtype="step", linewidth=1.5, label=f"{label}: {sum(lengths)} tokens")
        above.set(xscale="log", ylabel="samples", title="tokens of a sample")
        below.set(xscale="log", xlabel="tokens", ylabel="samples", title="its tokens of each modality")
        above.legend()
        below.legend()
    return stream.getvalue()


def kind_of(sample: Sample) -> str:
    """The kind of a sample; a grid of more than one step in time is that of a video."""
    if not sample.vision_grids:
        return KINDS[0]
    return KINDS[2] if any(time > 1 for time, _, _ in sample.vision_grids) else KINDS[1]
