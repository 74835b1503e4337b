"""The report of a run: one HTML page that contains everything, runs no script and fetches nothing.

What comes from samples (ids, reasons, messages) is untrusted: `text` escapes it, and the page's own policy admits only
embedded pictures and styles.
"""

from __future__ import annotations

import base64
import html
import statistics
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from io import BytesIO
from typing import Any

from dhp_ray.credentials import masked
from dhp_ray.planner.plan.types import Plan, Sample
from dhp_ray.report import figures
from dhp_ray.report.gains import OTHERS, RUN, Gains, compare, spread
from dhp_ray.report.run_files import RunFiles
from dhp_ray.report.step_picture import draw_plan

MAX_COMPARED, MAX_PLANS_READ, MAX_ROWS = 32, 200, 200
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1b1f24; background: #fff; max-width: 62rem; margin: 2rem auto;
       padding: 0 1rem; }
h1 { font-size: 1.6rem; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin-top: 2.5rem; border-bottom: 1px solid #d5dae1; }
dl { display: grid; grid-template-columns: repeat(auto-fit, minmax(11rem, 1fr)); gap: .8rem; }
dl div { background: #f4f6f9; border-radius: .4rem; padding: .6rem .8rem; }
dt { color: #57606a; font-size: .85rem; }
dd { margin: 0; font-size: 1.25rem; }
img { max-width: 100%; height: auto; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; }
th, td { text-align: left; padding: .2rem .8rem .2rem 0; border-bottom: 1px solid #e6e9ee; }
td { overflow-wrap: anywhere; vertical-align: top; }
.number { text-align: right; font-variant-numeric: tabular-nums; }
pre { background: #f4f6f9; padding: 1rem; overflow-x: auto; }
.note { color: #57606a; font-size: .9rem; }
"""


def page(run: RunFiles) -> str:
    """The whole page. The run has at least one step."""
    plans = [Plan.from_json(run.plan(step)) for step in sorted(spread(run.plan_steps, MAX_PLANS_READ))]
    samples = [sample for plan in plans for sample in plan.samples]
    gains = compare(spread(run.plan_steps, MAX_COMPARED), run.plan)
    parts = [summary(run, gains), curves(run), planning(run, gains), degrees(run, plans),
             data(run, samples, len(plans)), events(run),
             section("Configuration", f"<pre>{text(run.config)}</pre>")]
    written = f"Written {datetime.now(UTC):%Y-%m-%d %H:%M} UTC by dhp_ray's jobs/report.py."
    return document(f"Run {run.folder.uri}", written, parts)


def document(title: str, written: str, parts: Sequence[str]) -> str:
    """A page of these parts. `written` says when it was written and by what."""
    title = text(title)
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    head = (f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{policy}">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<title>{title}</title><style>{STYLE}</style>")
    body = f"<h1>{title}</h1>\n<p class=note>{text(written)}</p>\n" + "\n".join(parts) + "\n"
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head>\n<body>{body}</body></html>\n'


def summary(run: RunFiles, gains: Gains) -> str:
    last = run.metrics[-1]
    losses = (line["loss"] for line in reversed(run.metrics) if line["loss"] is not None)
    rates = [line["num_tokens"] / line["step_time_s"] for line in run.metrics if line["step_time_s"]]
    cells = [("steps", f"{last['step']}"), ("samples", f"{sum(line['num_samples'] for line in run.metrics):,}"),
             ("tokens", f"{sum(line['num_tokens'] for line in run.metrics):,}"),
             ("last loss", _number(next(losses, None))),
             ("tokens a second, median", f"{statistics.median(rates):,.0f}" if rates else "unknown"),
             ("idle, median", f"{100 * statistics.median(line['idle_fraction'] for line in run.metrics):.0f} %"),
             ("ranks", f"{last['num_ranks']}"),
             ("samples left out", f"{len(run.skipped)}")]
    evaluated = [line["eval_loss"] for line in run.metrics if line.get("eval_loss") is not None]
    if evaluated:
        cells.append(("last held-out loss", _number(evaluated[-1])))
    scored = [line for line in run.metrics if "eval_exact_match" in line]
    if scored:
        names = {"exact match": "eval_exact_match", "ANLS": "eval_anls", "F1": "eval_f1"}
        cells.append(("last answers", ", ".join(f"{words} {scored[-1][name]:.3f}" for words, name in names.items())))
    errors = [line["cost_error"] for line in run.metrics if line.get("cost_error") is not None]
    if errors:
        cells.append(("costs of packs off by, median", f"{100 * statistics.median(errors):.0f} %"))
    best = gains.best_baseline()
    if best:
        ratio = gains.total_s(best) / gains.total_s(RUN)
        cells.append((f"best baseline ({best}), modelled", f"{ratio:.2f} times as long"))
    shown = "".join(f"<div><dt>{text(name)}</dt><dd>{text(value)}</dd></div>" for name, value in cells)
    return f"<dl>{shown}</dl>"


def curves(run: RunFiles) -> str:
    lines = [line | {"rate": line["num_tokens"] / line["step_time_s"] if line["step_time_s"] else None}
             for line in run.metrics]
    evaluated = {"eval_loss": "held out"} if any(line.get("eval_loss") is not None for line in lines) else {}
    loss = picture(figures.curves_picture(lines, [
        ("loss a token", (None, None), {"loss": "training"} | evaluated)]), "loss of each step")
    throughput = picture(figures.curves_picture(lines, [
        ("tokens/s", (0, None), {"rate": "tokens a second"}),
        ("idle share", (0, 1), {"idle_fraction": "idle share of rank time"})]),
        "tokens a second and idle share of each step")
    prediction = picture(figures.curves_picture(lines, [
        ("makespan [s]", (0, None), {"measured_makespan_s": "measured", "predicted_makespan_s": "predicted"}),
        ("cost error", (0, None), {"cost_error": "median error of a pack"})]),
        "predicted and measured makespan of each step")
    note = ("<p class=note>Idle is rank time without a pack, or blocked in an exchange. "
            "Predicted is what the plan said, without the reduction and update at the step's end. Cost error: of "
            "the parts of a step's packs, predicted compute against measured, waiting left out.</p>")
    return section("Loss", loss) + section("Throughput", throughput + prediction + note)


def planning(run: RunFiles, gains: Gains) -> str:
    if not gains.ran:
        return section("What planning gained", "<p>This run's folder holds no plans.</p>")
    planners, ran = gains.planners(), gains.ran
    modes = ", ".join(sorted({plan.sync for plan in ran}))
    memory = ", ".join(f"{tokens:,}" for tokens in sorted({plan.cluster.tokens_per_rank for plan in ran}))
    most = max(plan.cluster.most_tokens_per_rank for plan in ran)
    if most > min(plan.cluster.tokens_per_rank for plan in ran):
        how = "activations in host memory" if any(plan.cluster.offload.share for plan in ran) else "recomputed layers"
        memory += f", up to {most:,} of one pack with {how},"
    own = gains.total_s(RUN)
    by = ", ".join(f"{count} by {name}" for name, count in Counter(plan.planner for plan in ran).items())
    rows = [(name, OTHERS.get(name, by), _number(gains.total_s(name)), f"{gains.total_s(name) / own:.2f}",
             f"{100 * gains.idle(name):.0f} %")
            for name in planners]
    rows.append(("lower bound", "no plan is shorter", _number(gains.lower_bound_s()),
                 f"{gains.lower_bound_s() / own:.2f}", ""))
    missing = sorted(name for name in OTHERS if name not in planners and any(gains.plans[name]))
    note = (
        f"<p>Modelled: {len(ran)} of {len(run.plan_steps)} batches, spread over the run, planned again by each "
        f"baseline at its best pack cap: on the same ranks, in the same mode (sync={text(modes)}), with the same "
        f"memory ({memory} tokens a rank), under the same cost model. These are the model's seconds; none of the "
        "baselines has run. The run's own row has the plans that ran, late ones included.</p>"
    )
    if missing:
        note += f"<p class=note>Not for every batch, and so not shown: {text(', '.join(missing))}.</p>"
    times = table(("planner", "which is", "seconds, modelled", "of this run's", "idle"), rows, numbers=(2, 3, 4))
    return section("What planning gained", note + times + measured(run))


def measured(run: RunFiles) -> str:
    """The measured times of the plans that ran, with on-time and late plans in separate rows."""
    lines: dict[tuple[str, bool], list[dict[str, Any]]] = {}
    for line in run.metrics:
        lines.setdefault((line.get("planner") or "not recorded", bool(line.get("late"))), []).append(line)
    rows = []
    for (planner, late), those in lines.items():
        predicted = sum(line["predicted_makespan_s"] or 0.0 for line in those)
        clock = sum(line["measured_makespan_s"] or 0.0 for line in those)
        rows.append((planner, "late" if late else "in time", len(those),
                     _number(sum(line["step_time_s"] for line in those)), _number(clock),
                     f"{clock / predicted:.2f}" if predicted else ""))
    words = ("<p>Measured: every step of the run, by the planner whose plan it ran on. "
             "Where a plan came too late for its step, the step ran on a quick planner's, and counts as late.</p>")
    head = ("planner", "plans", "steps", "seconds, measured", "of them in packs", "packs over their prediction")
    return words + table(head, rows, numbers=(2, 3, 4, 5))


def degrees(run: RunFiles, plans: Sequence[Plan]) -> str:
    shown = picture(figures.degrees_picture(run.metrics), "share of packs of each degree")
    if plans:
        stream, plan = BytesIO(), plans[-1]
        draw_plan(plan, stream)
        shown += f"<p>The plan of step {run.plan_steps[-1]}:</p>"
        shown += picture(stream.getvalue(), "ranks down, time across, packs as boxes")
    return section("Degrees", "<p>How many ranks the packs ran on.</p>" + shown)


def data(run: RunFiles, samples: Sequence[Sample], num_plans: int) -> str:
    if not samples:
        return section("Data", "<p>This run's folder holds no plans, so the lengths of its samples are not known.</p>")
    rows = []
    for kind in figures.KINDS:
        lengths = sorted(sample.num_tokens for sample in samples if figures.kind_of(sample) == kind)
        if lengths:
            images = sum(len(sample.vision_grids) for sample in samples if figures.kind_of(sample) == kind)
            rows.append((kind, f"{len(lengths):,}", f"{images:,}", f"{sum(lengths):,}",
                         f"{lengths[len(lengths) // 2]:,}", f"{lengths[-1]:,}"))
    seen = f"<p>Lengths of the samples of {num_plans} of {len(run.plan_steps)} batches, spread over the run.</p>"
    by_kind = table(("kind", "samples", "images or videos", "tokens", "median", "longest"), rows,
                    numbers=(1, 2, 3, 4, 5))
    lengths_shown = picture(figures.lengths_picture(samples), "histograms of lengths by modality")
    left_out = "<p>No sample was left out.</p>"
    if run.skipped:
        cells = [[line.get(name) for name in ("id", "reason", "step")] for line in run.skipped[:MAX_ROWS]]
        left_out = f"<p>{len(run.skipped)} left out:</p>" + table(("sample", "reason", "step"), cells)
        if len(run.skipped) > MAX_ROWS:
            left_out += f"<p class=note>and {len(run.skipped) - MAX_ROWS} more</p>"
    return section("Data", seen + lengths_shown + by_kind + left_out)


def events(run: RunFiles) -> str:
    last, num_earlier = run.events[-MAX_ROWS:], len(run.events[:-MAX_ROWS])
    details = [", ".join(f"{name}={value}" for name, value in line.items() if name not in ("time", "kind"))
               for line in last]
    rows = [(line.get("time"), line.get("kind"), words) for line, words in zip(last, details)]
    shown = table(("time", "event", "details"), rows)
    if num_earlier:
        shown += f"<p class=note>{num_earlier} earlier ones are in events.jsonl.</p>"
    return section("Events", shown)


def section(title: str, content: str) -> str:
    return f"<section><h2>{text(title)}</h2>\n{content}</section>"


def table(head: Sequence[str], rows: Sequence[Sequence[Any]], numbers: Sequence[int] = ()) -> str:
    """A table of untrusted cells; the columns in `numbers` are aligned to the right."""
    mark = [" class=number" if column in numbers else "" for column in range(len(head))]
    top = "".join(f"<th{kind}>{text(name)}</th>" for name, kind in zip(head, mark))
    body = "".join("<tr>" + "".join(f"<td{kind}>{text(cell)}</td>" for cell, kind in zip(row, mark)) + "</tr>\n"
                   for row in rows)
    return f"<div class=scroll><table><thead><tr>{top}</tr></thead><tbody>\n{body}</tbody></table></div>"


def picture(content: bytes, words: str) -> str:
    """An image embedded in the page. As an <img>, an SVG runs no script and fetches nothing."""
    kind = "png" if content.startswith(b"\x89PNG") else "svg+xml"
    return f'<p><img alt="{text(words)}" src="data:image/{kind};base64,{base64.b64encode(content).decode()}"></p>'


def text(value: Any) -> str:
    """Any value as text of the page, escaped, without credentials and control characters."""
    plain = "".join(sign if sign.isprintable() or sign in "\n\t" else "\N{REPLACEMENT CHARACTER}"
                    for sign in masked(str(value)))
    return html.escape(plain, quote=True)


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"
