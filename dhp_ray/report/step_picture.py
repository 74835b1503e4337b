"""A step as a picture: above what the plan predicted, below what the ranks measured; one row per rank, the same
colours.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from dhp_ray.planner.plan.types import Plan
from dhp_ray.report.plan_picture import ENCODER, colours_of, draw_planned, line_width, longest_of
from dhp_ray.train.results import StepResult


def draw_step(
    plan: Plan, results: Sequence[StepResult], target: str | Path | IO[bytes], dpi: int = 100, told: str = "measured"
) -> None:
    """Write the picture to `target`: a file whose ending names the format, or a stream, which gets a PNG.

    Each half has its own time axis: seconds of the cost model above, seconds of the clock below. `told`: where the
    times of the results come from.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, min(6 + plan.cluster.num_ranks / 6, 18)), layout="constrained")
    above, below = figure.subplots(2, 1)
    scale = colours_of(plan)
    draw_planned(above, plan, scale.to_rgba)
    draw_measured(below, plan, results, scale.to_rgba, told)
    figure.colorbar(scale, ax=[above, below], label="longest sequence of the pack [tokens]")
    figure.savefig(target, dpi=dpi)


def draw_measured(
    axes: Any, plan: Plan, results: Sequence[StepResult], colour: Any, told: str = "measured"
) -> None:
    """Measured times of each rank's packs, each on the rank's own clock from its start of the step. The seconds that
    the rank waited in exchanges are drawn pale at the end of the pack, because only their sum is known.
    """
    from matplotlib.collections import PatchCollection
    from matplotlib.colors import to_rgba
    from matplotlib.patches import Rectangle

    boxes, faces = [], []
    for result in results:
        for time in result.pack_times:
            red, green, blue, _ = colour(longest_of(plan, plan.groups[time.index]))
            blocked_s = min(time.blocked_s, time.end_s - time.start_s)
            boxes += [Rectangle((time.start_s, result.rank - 0.5), time.end_s - time.start_s - blocked_s, 1),
                      Rectangle((time.end_s - blocked_s, result.rank - 0.5), blocked_s, 1)]
            faces += [(red, green, blue, 1.0), (red, green, blue, 0.25)]
        for time in result.encoder_times:
            blocked_s = min(time.blocked_s, time.end_s - time.start_s)
            boxes += [Rectangle((time.start_s, result.rank - 0.5), time.end_s - time.start_s - blocked_s, 1),
                      Rectangle((time.end_s - blocked_s, result.rank - 0.5), blocked_s, 1)]
            faces += [to_rgba(ENCODER), to_rgba(ENCODER, 0.25)]
    axes.add_collection(PatchCollection(boxes, facecolors=faces, edgecolors="black", linewidths=line_width(plan)))
    end_s = max((result.step_time_s for result in results), default=0.0)
    last_s = max((time.end_s for result in results for time in (*result.pack_times, *result.encoder_times)),
                 default=0.0)
    axes.axvline(last_s, color="black", label=f"last pack or image {last_s:.4g} s")
    axes.axvline(end_s, color="gray", linestyle=":", label=f"updated {end_s:.4g} s")
    axes.set(xlim=(0, max(end_s, 1e-9) * 1.02), ylim=(plan.cluster.num_ranks - 0.5, -0.5), xlabel="time [s]",
             ylabel="rank")
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.set_title(f"{told}; pale: waiting in exchanges; orange: encoder", loc="left")
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False)
