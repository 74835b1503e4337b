"""What a simulation prints, a line for each planner, and what it writes to its folder: results.json, a picture of a
step, a trace for Perfetto, and a page.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from dhp_ray.report.figures import svg
from dhp_ray.report.page import document, picture, section, table, text
from dhp_ray.report.step_picture import draw_step
from dhp_ray.report.trace import trace_of_steps
from dhp_ray.simulate.planning import LAYOUT_BATCHES
from dhp_ray.simulate.run import RunRecord, Simulated

HEAD = ("planner", "step s", "tokens/s", "a rank", "samples/s", "of the first", "computing", "exchange", "update",
        "groups", "idle", "waits s", "memory", "faults", "again")
"""`of the first`: tokens per second relative to the first planner. `waits s`: total seconds of waiting for batches,
images and plans. `again`: steps that a fault undid.
"""
MAX_EVENTS = 100
COLOURS = {"compute": "tab:green", "exchange": "tab:red", "update": "gray", "groups": "tab:purple", "idle": "gainsboro"}


def rows_of(summaries: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """The cells below HEAD, as text."""
    first = summaries[0]["tokens_per_s"] if summaries else 0.0
    rows = []
    for summary in summaries:
        shares = [f"{100 * summary['shares'].get(name, 0.0):.1f} %"
                  for name in ("compute", "exchange", "update", "groups", "idle")]
        rows.append((
            summary["planner"], f"{summary['step_s']:.4g}", f"{summary['tokens_per_s']:,.0f}",
            f"{summary['tokens_per_s_per_rank']:,.0f}", f"{summary['samples_per_s']:.4g}",
            f"{summary['tokens_per_s'] / first:.3f}" if first else "", *shares,
            f"{summary['data_wait_s'] + summary['plan_wait_s']:.3g}", f"{100 * summary['memory_share']:.0f} %",
            str(summary["faults"]), str(summary["steps_run_again"])))
    return rows


def text_of(summaries: Sequence[dict[str, Any]]) -> str:
    """The table, and a line for each planner that could not go on."""
    rows = [HEAD, *rows_of(summaries)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD))]
    lines = ["  ".join(cell.ljust(width) if column == 0 else cell.rjust(width)
                       for column, (cell, width) in enumerate(zip(row, widths))) for row in rows]
    lines += [f"{summary['planner']} could not go on after step {summary['steps']}: {summary['error']}"
              for summary in summaries if summary["error"]]
    return "\n".join(lines)


def write_results(simulation: Simulated, folder: Path) -> list[Path]:
    """Write everything; returns the files.

    Raises:
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(simulation.to_json(), indent=1))
    files = [folder / "results.json"]
    drawn = next((record for record in simulation.records if record.kept), None)
    drawing = step_picture(drawn) if drawn else None
    if drawn and drawing:
        (folder / "step.png").write_bytes(drawing)
        steps = [(begin_s, step.plan, step.results(number)) for number, (begin_s, step) in drawn.kept.items()]
        details = {"simulated": True, "planner": drawn.planner, "steps": sorted(drawn.kept)}
        (folder / "trace.json").write_text(json.dumps(trace_of_steps(steps, details)))
        files += [folder / "step.png", folder / "trace.json"]
    (folder / "page.html").write_text(page(simulation, drawing))
    return [*files, folder / "page.html"]


def step_picture(record: RunRecord) -> bytes:
    """The first step of a run as a PNG: the plan above, the simulated step below."""
    number, (_, step) = next(iter(record.kept.items()))
    stream = BytesIO()
    draw_step(step.plan, step.results(number), stream, told="simulated")
    return stream.getvalue()


def page(simulation: Simulated, drawing: bytes | None) -> str:
    """One HTML page that contains everything, runs no script and fetches nothing. `drawing`: the first run's first
    step.
    """
    settings, first = simulation.settings, simulation.machine.first
    summaries = simulation.summaries()
    cluster = settings.cluster
    words = (f"{settings.model} on {cluster.num_ranks} {simulation.machine.device.name} of {cluster.memory_gib:g} GiB, "
             f"{cluster.ranks_per_node} a node; {first.mode}, {first.limits.tokens:,} tokens a rank; "
             f"{settings.global_samples} samples a batch, seed {settings.seed}. Every planner has the same batches, "
             "memory, speeds and faults; baselines are at their best pack cap, static at the best layout for the first "
             f"{LAYOUT_BATCHES} batches and the one with the longest sequence. All of it is modelled, nothing "
             "measured.")
    parts = [section("Planners", f"<p>{text(words)}</p>" + table(HEAD, rows_of(summaries), range(1, len(HEAD)))
                     + "".join(f"<p class=note>{text(row['planner'])}: {text(row['error'])}</p>"
                               for row in summaries if row["error"])
                     + picture(shares_picture(simulation), "what the ranks' time went into, by planner"))]
    parts.append(section("Steps", picture(steps_picture(simulation.records), "seconds of each step, by planner")))
    if drawing:
        planner = next(record.planner for record in simulation.records if record.kept)
        note = f"<p>The first step under {text(planner)}:</p>"
        parts.append(section("A step", note + picture(drawing, "ranks down, time across, packs as boxes")))
    for record in simulation.records:
        if record.events:
            rows = [(f"{event.time_s:.1f}", event.kind, event.text, f"{event.seconds:.1f}")
                    for event in record.events[:MAX_EVENTS]]
            more = len(record.events) - MAX_EVENTS
            parts.append(section(f"Events under {record.planner}",
                                 table(("second", "event", "details", "seconds lost"), rows, (0, 3))
                                 + (f"<p class=note>and {more} more</p>" if more > 0 else "")))
    parts.append(section("Settings", f"<pre>{text(yaml.safe_dump(simulation.to_json()['settings']))}</pre>"))
    return document(f"Simulation of {settings.model}", "Written by dhp_ray's jobs/simulate.py.", parts)


def shares_picture(simulation: Simulated) -> bytes:
    """One bar for each planner: what the time of its ranks was spent on."""
    summaries = [summary for summary in simulation.summaries() if summary["shares"]]
    with svg(10, 0.6 + 0.4 * max(1, len(summaries))) as (axes, stream):
        left = np.zeros(len(summaries))
        for name, colour in COLOURS.items():
            widths = np.array([100 * summary["shares"][name] for summary in summaries])
            axes.barh([summary["planner"] for summary in summaries], widths, left=left, label=name, color=colour)
            left = left + widths
        axes.invert_yaxis()
        axes.set(xlabel="share of the ranks' time in steps [%]", xlim=(0, 100))
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=5, frameon=False)
    return stream.getvalue()


def steps_picture(records: Sequence[RunRecord]) -> bytes:
    """Seconds of every step that was not undone, one line for each planner."""
    with svg(10, 3.5) as (axes, stream):
        for record in records:
            axes.plot([step.step for step in record.steps], [step.end_s - step.begin_s for step in record.steps],
                      label=record.planner, linewidth=1)
        axes.set(xlabel="step", ylabel="seconds", ylim=(0, None))
        axes.legend()
    return stream.getvalue()
