"""A step as a trace that Perfetto (and chrome://tracing) opens: one process per rank, with what it did and when.

    rank 0   pack 0: 3 sequences, degree 2            | wait | pack 4: ...
             | compute          | exchange            |      | compute ...   | wait | update |

Times are those of each rank's own clock, from its start of the step. The format is Chrome's JSON array of complete
events ("ph": "X"), in microseconds. Rank r is process r + 1, because Perfetto reserves number 0 of processes and of
threads for the system's idle ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from dhp_ray.planner.plan.types import Plan, encoding_ranks
from dhp_ray.train.results import PackTime, StepResult, last_end_s

GAP_S = 2e-6  # shorter gaps between packs are not shown


def trace_of(plan: Plan, results: Sequence[StepResult]) -> dict[str, Any]:
    """The trace of one step, ready for json.dump. Only the sum of a pack's exchanges is known: `exchange` is one slice
    at its end. `wait`: before and between packs, while inputs are put together, and until all ranks are done.
    """
    last_s = last_end_s(results)
    num_images = Counter(rank for group in plan.groups for ranks in encoding_ranks(group.encoders, group.splits)
                         for rank in set(ranks))
    events = [event for result in results for event in _rank_events(plan, result, last_s, num_images[result.rank])]
    step = results[0].step if results else 0
    return {"traceEvents": events, "displayTimeUnit": "ms",
            "otherData": {"step": step, "planner": plan.planner, "sync": plan.sync, "num_ranks": plan.cluster.num_ranks,
                          "predicted_makespan_s": plan.makespan_s, "measured_makespan_s": last_s}}


def _rank_events(plan: Plan, result: StepResult, last_s: float, num_images: int) -> Iterator[dict[str, Any]]:
    """`num_images`: those of which the rank encodes at least a part."""
    rank, free_s = result.rank, 0.0
    yield {"name": "process_name", "ph": "M", "pid": rank + 1, "tid": 1, "args": {"name": f"rank {rank}"}}
    yield {"name": "process_sort_index", "ph": "M", "pid": rank + 1, "tid": 1, "args": {"sort_index": rank}}
    yield {"name": "thread_name", "ph": "M", "pid": rank + 1, "tid": 1, "args": {"name": "step"}}
    before, after = result.encoder_times[:1], result.encoder_times[1:]
    for time in (*before, *result.pack_times, *after):
        if time.start_s - free_s > GAP_S:
            yield _slice(rank, "wait", "wait", free_s, time.start_s)
        blocked_s = min(time.blocked_s, time.end_s - time.start_s)
        if time in after:  # the bytes of the features' gradients are not reported
            yield _slice(rank, "encoder, backward", "encoder", time.start_s, time.end_s,
                         {"num_images": num_images, "blocked_s": time.blocked_s})
        elif time in before:
            yield _slice(rank, "encoder", "encoder", time.start_s, time.end_s,
                         {"num_images": num_images, "blocked_s": time.blocked_s, "sent_bytes": result.exchanged_bytes})
        else:
            group = plan.groups[time.index]
            name = f"pack {time.index}: {len(group.sequences)} sequences, degree {group.degree}"
            yield _slice(rank, name, "pack", time.start_s, time.end_s, _pack(plan, time))
        yield _slice(rank, "compute", "compute", time.start_s, time.end_s - blocked_s)
        if blocked_s > 0:
            yield _slice(rank, "exchange", "exchange", time.end_s - blocked_s, time.end_s)
        free_s = time.end_s
    done_s = min(max(last_s, free_s), result.step_time_s)
    if done_s - free_s > GAP_S:
        yield _slice(rank, "wait", "wait", free_s, done_s)
    if result.step_time_s > max(done_s, free_s):
        yield _slice(rank, "update", "update", max(done_s, free_s), result.step_time_s)


def _slice(
    rank: int, name: str, category: str, start_s: float, end_s: float, details: dict[str, Any] | None = None
) -> dict[str, Any]:
    # both are rounded before the subtraction, so that a slice inside a pack ends with the pack
    start_us, end_us = round(1e6 * start_s, 3), round(1e6 * end_s, 3)
    return {"name": name, "cat": category, "ph": "X", "pid": rank + 1, "tid": 1, "ts": start_us,
            "dur": round(end_us - start_us, 3), "args": details or {}}


def _pack(plan: Plan, time: PackTime) -> dict[str, Any]:
    group = plan.groups[time.index]
    samples = [plan.samples[row] for row in group.sequences]
    return {"ranks": list(group.ranks), "degree": group.degree, "micro_batch": group.micro_batch,
            "num_tokens": sum(sample.num_tokens for sample in samples),
            "sample_ids": [sample.id for sample in samples], "predicted_time_s": group.predicted_time_s,
            "blocked_s": time.blocked_s}
