"""What a simulation prints, a line for each planner, and writes: results.json, a picture and a trace of a step."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dhp_ray.report.step_picture import draw_plan
from dhp_ray.report.trace import trace_of
from dhp_ray.simulate.run import Simulated

HEAD = ("planner", "step s", "tokens/s", "a rank", "samples/s", "of the first", "computing", "exchange", "update",
        "idle", "waits s", "memory", "faults", "again")
"""`of the first`: tokens/s over the first planner's. `waits s`: for plans, in all. `again`: steps that faults undid."""


def text_of(summaries: Sequence[dict[str, Any]]) -> str:
    """The table, and a line for each planner that could not go on."""
    rows: list[tuple[str, ...]] = [HEAD]
    first = summaries[0]["tokens_per_s"]
    for summary in summaries:
        shares = [f"{100 * summary['shares'].get(name, 0.0):.1f} %"
                  for name in ("compute", "exchange", "update", "idle")]
        rows.append((
            summary["planner"], f"{summary['step_s']:.4g}", f"{summary['tokens_per_s']:,.0f}",
            f"{summary['tokens_per_s_per_rank']:,.0f}", f"{summary['samples_per_s']:.4g}",
            f"{summary['tokens_per_s'] / first:.3f}" if first else "", *shares,
            f"{summary['plan_wait_s']:.3g}", f"{100 * summary['memory_share']:.0f} %",
            str(summary["faults"]), str(summary["steps_run_again"])))
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD))]
    lines = ["  ".join(cell.ljust(width) if column == 0 else cell.rjust(width)
                       for column, (cell, width) in enumerate(zip(row, widths))) for row in rows]
    lines += [f"{summary['planner']} could not go on after step {summary['steps']}: {summary['error']}"
              for summary in summaries if summary["error"]]
    return "\n".join(lines)


def write_results(simulation: Simulated, folder: Path) -> list[Path]:
    """Write everything; returns the files. OSError: the folder cannot be written."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(simulation.to_json(), indent=1))
    files = [folder / "results.json"]
    step = next((record.first for record in simulation.records if record.first), None)
    if step:
        results = step.results(1)
        draw_plan(step.plan, folder / "step.png", results, told="simulated")
        details = {"simulated": True, "planner": step.plan.planner, "step": 1}
        (folder / "trace.json").write_text(json.dumps(trace_of(step.plan, results) | {"otherData": details}))
        files += [folder / "step.png", folder / "trace.json"]
    return files
