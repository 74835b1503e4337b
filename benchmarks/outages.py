"""Workers and nodes taken from a run, what each loss cost it, and the table of that: the part of benchmarks/recovery.py
that is the same for every way.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

NUM_RANKS, NODE_CPUS = 4, 3
LIMIT_S = 2.0
"""Seconds after detection within which the next group stands."""
DETECTION_S = 3.0


@dataclass(frozen=True)
class Loss:
    """What one loss cost; seconds. `kept` of `survivors` processes are in the group that goes on."""

    what: str
    goes_on_s: float
    kept: int
    survivors: int
    seen_s: float | None = None
    formed_s: float | None = None
    parts_s: dict[str, float] = field(default_factory=dict)  # what forming the group took its time for


def losses_of(way: Any, nodes: Any, repeats: int, draw: random.Random) -> list[Loss]:
    found = []
    try:
        for what in ("worker", "node") * repeats:
            until(way, lambda: len(way.pids) == NUM_RANKS)
            first = way.step
            until(way, lambda first=first: way.step[1] >= first[1] + 3 and len(way.pids) == NUM_RANKS)
            time.sleep(draw.uniform(0.0, 1.0))
            found.append(lose(way, nodes, what, draw))
            print(found[-1], flush=True)
            if what == "node":
                nodes.add(NODE_CPUS)
    finally:
        way.end()
    return found


def lose(way: Any, nodes: Any, what: str, draw: random.Random) -> Loss:
    from tests.integration.faults import kill

    before, group = way.pids, way.step[0]
    if what == "worker":
        lost = {draw.choice(before)}
        moment = kill(*lost)
    else:
        node = draw.choice(nodes.nodes)
        lost = set(nodes.pids(node)) & set(before)
        moment = nodes.vanish(node)
    until(way, lambda: way.step[0] > group)
    over = time.time() - moment
    seen, formed = way.times(moment)
    survivors = set(before) - lost
    return Loss(what, over, len(survivors & set(way.pids)), len(survivors), seen, formed, way.parts(moment))


def until(way: Any, what: Callable[[], object], timeout_s: float = 300.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not what():
        way.check()
        if time.monotonic() > deadline:
            raise SystemExit(f"{type(way).__name__}: not within {timeout_s:g} s; pids {way.pids}, step {way.step}")
        time.sleep(0.01)


def report(found: dict[str, list[Loss]]) -> int:
    print(
        "| medians, seconds | lost | seen after | group stands, after it was seen | goes on, after the loss | "
        "survivors in the same process |"
    )
    print("|---|---|---|---|---|---|")
    passed = True
    for way, losses in found.items():
        for what in dict.fromkeys(loss.what for loss in losses):
            here = [loss for loss in losses if loss.what == what]
            seen = [loss.seen_s for loss in here if loss.seen_s is not None]
            formed = [loss.formed_s - loss.seen_s for loss in here if loss.formed_s is not None
                      and loss.seen_s is not None]
            kept, survivors = sum(loss.kept for loss in here), sum(loss.survivors for loss in here)
            columns = seen, formed, [loss.goes_on_s for loss in here]
            words = [f"{statistics.median(values):.2f} (most {max(values):.2f})" if values else "-"
                     for values in columns]
            print(
                f"| {way} | {what}, {len(here)} times | {words[0]} | {words[1]} | {words[2]} | {kept} of {survivors} |"
            )
            if way == "dhp_ray":
                passed &= kept == survivors and max(seen) <= DETECTION_S and max(formed) <= LIMIT_S
    if "dhp_ray" in found:
        print(
            "ok  " if passed else "FAIL",
            f"seen within {DETECTION_S:g} s, a group within {LIMIT_S:g} s of that, "
            "every survivor in its process",
        )
    return int(not passed)
