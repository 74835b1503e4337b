"""A plan as a picture: ranks down, time across, packs as boxes coloured by their longest sequence, what stays blank is idle."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from dhp_ray.planner import starts_of
from dhp_ray.planner.plan import GroupPlan, Plan


def draw_plan(plan: Plan, fixed_s: float, path: str | Path) -> None:
    """Write the picture to `path` (its ending names the format); `fixed_s` is the cost file's fixed time."""
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.collections import PatchCollection
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    starts, makespan = starts_of(plan.groups, plan.cluster.num_ranks, plan.sync, fixed_s)
    longest = [max(plan.samples[row].num_tokens for row in group.pack.sequences) for group in plan.groups]
    norm, colours = LogNorm(min(longest), max(max(longest), min(longest) + 1)), colormaps["viridis"]
    boxes, faces = [], []
    for group, start, length in zip(plan.groups, starts, longest):
        for first, height in runs_of(group):
            boxes.append(Rectangle((start, first - 0.5), group.predicted_time_s, height))
            faces.append(colours(norm(length)))
    figure = Figure(figsize=(11, min(3 + plan.cluster.num_ranks / 12, 14)), layout="constrained")
    axes = figure.subplots()
    axes.add_collection(PatchCollection(boxes, facecolors=faces, edgecolors="black", linewidths=max(0.1, min(0.6, 30 / plan.cluster.num_ranks))))
    axes.axvline(plan.lower_bound_s, color="crimson", linestyle="--", label=f"lower bound {plan.lower_bound_s:.4g} s")
    axes.axvline(makespan, color="black", label=f"makespan {makespan:.4g} s")
    axes.set(xlim=(0, max(makespan, plan.lower_bound_s) * 1.02), ylim=(plan.cluster.num_ranks - 0.5, -0.5), xlabel="time [s]", ylabel="rank",
             title=f"{plan.planner}, sync={plan.sync}: {len(plan.samples)} sequences in {len(plan.groups)} packs on {plan.cluster.num_ranks} ranks")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=2, frameon=False)
    figure.colorbar(ScalarMappable(norm, colours), ax=axes, label="longest sequence of the pack [tokens]")
    figure.savefig(path, dpi=120)


def runs_of(group: GroupPlan) -> list[tuple[int, int]]:
    """(first rank, number of ranks) of each run of neighbouring ranks of a group."""
    ranks = sorted(group.ranks)
    cuts = [0, *(place + 1 for place, (left, right) in enumerate(pairwise(ranks)) if right != left + 1), len(ranks)]
    return [(ranks[low], high - low) for low, high in pairwise(cuts)]
