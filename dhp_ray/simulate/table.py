"""The table that a simulation prints: one line for each planner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

HEAD = ("planner", "step s", "tokens/s", "a rank", "samples/s", "of the first", "computing", "exchange", "update",
        "groups", "idle", "waits s", "memory", "faults", "again")
"""`of the first`: tokens per second relative to the first planner. `waits s`: total seconds of waiting for batches,
images and plans. `again`: steps that a fault undid.
"""


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
