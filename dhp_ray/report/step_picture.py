"""A plan as a picture, and a step beside its plan: above what was predicted, below what the ranks measured.

Ranks are down, time across. Packs are boxes coloured by their longest sequence, fixed seconds are hatched, images
encoded apart from the packs are orange, waiting in exchanges is pale, and idle time is blank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

import numpy as np

from dhp_ray.errors import counted
from dhp_ray.planner import plan_starts
from dhp_ray.planner.plan.types import Pack, Plan
from dhp_ray.planner.timeline import apart_timeline, fixed_starts
from dhp_ray.train.results import StepResult, last_end_s

ENCODER = "tab:orange"  # colour of images encoded apart from the packs, and of their backward pass
FIXED = "gainsboro"  # colour of what every rank pays once: reduction, gather, update


def draw_plan(
    plan: Plan, target: str | Path | IO[bytes], results: Sequence[StepResult] | None = None, told: str = "measured"
) -> None:
    """Write the picture to `target`: a file whose ending names the format, or a stream, as PNG. `results`: of the step,
    drawn below the plan, in seconds of the clock, not of the cost model; `told`: where they come from.
    """
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    num_ranks, alone = plan.cluster.num_ranks, results is None
    height = min(3 + num_ranks / 12, 14) if alone else min(6 + num_ranks / 6, 18)
    figure = Figure(figsize=(11, height), layout="constrained")
    axes = figure.subplots(1 if alone else 2, 1, squeeze=False)[:, 0]
    longest = [_longest(plan, group) for group in plan.groups]
    scale: Any = ScalarMappable(LogNorm(min(longest), max(max(longest), min(longest) + 1)), "viridis")
    draw_planned(axes[0], plan, scale.to_rgba)
    if results is not None:
        _draw_measured(axes[1], plan, results, scale.to_rgba, told)
    figure.colorbar(scale, ax=list(axes), label="longest sequence of the pack [tokens]")
    figure.savefig(target, dpi=120 if alone else 100)


def _longest(plan: Plan, group: Pack) -> int:
    return max(plan.samples[row].num_tokens for row in group.sequences)


def draw_planned(axes: Any, plan: Plan, colour: Callable[[int], Any]) -> None:
    """Draw the times of the plan on `axes`, with its lower bound and its makespan."""
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Rectangle

    starts, makespan = plan_starts(plan)
    boxes, faces = [], []
    for group, start in zip(plan.groups, starts):
        for first, height in _runs(group):
            boxes.append(Rectangle((start, first - 0.5), group.predicted_time_s, height))
            faces.append(colour(_longest(plan, group)))
    axes.add_collection(PatchCollection(boxes, facecolors=faces, edgecolors="black", linewidths=_line_width(plan)))
    if apart := apart_timeline(plan):
        spans = [(np.zeros(plan.cluster.num_ranks), apart.forward_busy_s),
                 (apart.backward_s, apart.backward_s + apart.backward_busy_s)]
        phases = [Rectangle((plan.fixed_s + begin, rank - 0.5), end - begin, 1)
                  for begins, ends in spans for rank, (begin, end) in enumerate(zip(begins, ends))]
        axes.add_collection(PatchCollection(phases, facecolors=ENCODER, edgecolors="black",
                                            linewidths=_line_width(plan), label="encoder"))
    if plan.fixed_s:
        fixed = [Rectangle((start, -0.5), plan.fixed_s, plan.cluster.num_ranks) for start in fixed_starts(plan)]
        axes.add_collection(PatchCollection(fixed, facecolors=FIXED, edgecolors="gray", hatch="//", linewidths=0,
                                            label=f"fixed {plan.fixed_s:.4g} s"))
    axes.axvline(plan.lower_bound_s, color="crimson", linestyle="--", label=f"lower bound {plan.lower_bound_s:.4g} s")
    axes.axvline(makespan, color="black", label=f"makespan {makespan:.4g} s")
    _label(axes, plan, max(makespan, plan.lower_bound_s), f"{plan.planner}, sync={plan.sync}: "
           f"{counted(len(plan.samples), 'sequence')} in {counted(len(plan.groups), 'pack')} on "
           f"{counted(plan.cluster.num_ranks, 'rank')}", 3)


def _draw_measured(
    axes: Any, plan: Plan, results: Sequence[StepResult], colour: Callable[[int], Any], told: str
) -> None:
    """Each rank's packs on its own clock. Of waiting in exchanges only a pack's sum is known, drawn pale at its end."""
    from matplotlib.collections import PatchCollection
    from matplotlib.colors import to_rgba
    from matplotlib.patches import Rectangle

    boxes, faces = [], []
    for result in results:
        for time in result.times:
            face = to_rgba(colour(_longest(plan, plan.groups[time.index])) if time.index >= 0 else ENCODER)
            blocked_s = min(time.blocked_s, time.end_s - time.start_s)
            boxes += [Rectangle((time.start_s, result.rank - 0.5), time.end_s - time.start_s - blocked_s, 1),
                      Rectangle((time.end_s - blocked_s, result.rank - 0.5), blocked_s, 1)]
            faces += [face, (*face[:3], 0.25)]
    axes.add_collection(PatchCollection(boxes, facecolors=faces, edgecolors="black", linewidths=_line_width(plan)))
    end_s = max((result.step_time_s for result in results), default=0.0)
    last_s = last_end_s(results)
    axes.axvline(last_s, color="black", label=f"last pack or image {last_s:.4g} s")
    axes.axvline(end_s, color="gray", linestyle=":", label=f"updated {end_s:.4g} s")
    _label(axes, plan, max(end_s, 1e-9), f"{told}; pale: waiting in exchanges; orange: encoder", 2)


def _label(axes: Any, plan: Plan, end_s: float, title: str, columns: int) -> None:
    axes.set(xlim=(0, end_s * 1.02), ylim=(plan.cluster.num_ranks - 0.5, -0.5), xlabel="time [s]", ylabel="rank")
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.set_title(title, loc="left")
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=columns, frameon=False)


def _line_width(plan: Plan) -> float:
    """Width of the edge of a box: thinner with many ranks, where edges would cover the boxes."""
    return max(0.1, min(0.6, 30 / plan.cluster.num_ranks))


def _runs(group: Pack) -> list[tuple[int, int]]:
    """(first rank, number of ranks) of each run of neighbouring ranks of a group."""
    ranks = sorted(group.ranks)
    cuts = [0, *(place + 1 for place, (left, right) in enumerate(pairwise(ranks)) if right != left + 1), len(ranks)]
    return [(ranks[low], high - low) for low, high in pairwise(cuts)]
