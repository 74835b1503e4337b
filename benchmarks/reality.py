"""Predicted steps beside real ones: 1 and 2 ranks, one core each, on batches that no cost was measured on.

    export OMP_NUM_THREADS=1 DHP_RAY_TEST_DATA=FOLDER
    export MALLOC_MMAP_THRESHOLD_=33554432 MALLOC_TRIM_THRESHOLD_=17179869184 MALLOC_TOP_PAD_=67108864
    python benchmarks/reality.py [key=value ...]

    batches=50      real NLVR pictures (FOLDER) and synthetic clips, mixed
    runs=3          of each batch's step, in turns with all others; the median counts, and their spread stands beside
                    the error
    ranks=1,2       each with a cost file of its own, measured just before as jobs/measure.py does
    sync=step,micro_batch
    out=            write every plan and what its runs took, for others to compare with (JSON)

With these settings of MALLOC glibc keeps the memory of large tensors, as a device's allocator does. Without them each
one's pages are made anew, which takes part of every pack, of those on two ranks most, and more in some minutes.

Predicted is the plan's own `predicted_time_s`: packs, the step's end and, of a step with images apart, the encoder's
phases. In turns with it the other encoder layout runs: `world over group` compares both steps of a batch.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from benchmarks.worlds import Corpus, corpus_of, data_overrides
from dhp_ray.comm.device import CPU
from dhp_ray.config import Config, load
from dhp_ray.planner import ClusterSpec, CostModel, Plan, Sample, plan_batch
from dhp_ray.planner.cost.model import SYNCS
from dhp_ray.runtime.job.measuring import Request, measure_here
from dhp_ray.runtime.messages import Membership
from dhp_ray.runtime.worker.rank import Rank
from dhp_ray.train.step_inputs import collated
from tests.ranks import run_processes

DEFAULTS = {"batches": "50", "runs": "3", "ranks": "1,2", "sync": "step,micro_batch", "out": ""}
TOKENS = (4096, 1400)
"""Tokens that a rank holds, in turns: with the fewer ones long sequences need both ranks. A batch with a sequence
that does not fit on all ranks with the fewer uses the more."""
ALLOWED = {"ranks": ("1", "2"), "sync": SYNCS}
MOST_MEAN, MOST_OF_ONE = 0.05, 0.15
"""Errors allowed: of the mean (or twice the runs' own spread, if that is more), and of any one batch."""


class Case(NamedTuple):
    """A batch under one plan."""

    batch: int
    ranks: int
    layout: str
    plan: Plan


class Run(NamedTuple):
    """One rank's account of a step: its seconds, and of each phase and pack (group, begin, end, blocked)."""

    step_s: float
    packs: list[list[float]]


class Outcome(NamedTuple):
    """The runs of a case, by run and rank."""

    case: Case
    runs: list[tuple[Run, ...]]

    @property
    def seconds(self) -> list[float]:
        """Of every run: the slowest rank's."""
        return [max(rank.step_s for rank in run) for run in self.runs]

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    @property
    def error(self) -> float:
        return self.case.plan.predicted_time_s / self.median_s - 1.0

    @property
    def spread(self) -> float:
        return (max(self.seconds) - min(self.seconds)) / 2 / self.median_s


def mixed_corpus() -> Corpus:
    """Real pictures, and synthetic clips, documents and charts."""
    parts = []
    for test_data, count in ((os.environ.get("DHP_RAY_TEST_DATA", ""), 240), ("", 200)):
        with tempfile.TemporaryDirectory(prefix="dhp_ray_reality_") as folder:
            overrides = data_overrides(test_data, Path(folder), 400)
            parts.append(corpus_of(load(["model.preset=tiny", "run.dir=unused", *overrides]), count))
    first, second = parts
    patches = [np.load(part.patches) for part in parts]
    np.save(first.patches, np.concatenate(patches))
    return replace(first, samples=[*first.samples, *second.samples], payloads=first.payloads | second.payloads,
                   first_patch=first.first_patch | {name: place + len(patches[0])
                                                    for name, place in second.first_patch.items()})


def batches_of(samples: Sequence[Sample], count: int) -> list[list[Sample]]:
    """Batches of 2 to 7 samples."""
    drawn = random.Random(19)
    return [drawn.sample(samples, drawn.randint(2, 7)) for _ in range(count)]


def cases_of(
    batches: Sequence[Sequence[Sample]], num_ranks: int, sync: str, cost: CostModel
) -> list[Case]:
    found = []
    for number, batch in enumerate(batches):
        tokens = TOKENS[0] if num_ranks == 1 else TOKENS[number % len(TOKENS)]
        if max(sample.num_tokens for sample in batch) > num_ranks * tokens:
            tokens = TOKENS[0]
        for layout in ("group", "world") if sync == "step" and num_ranks > 1 else ("group",):
            plan = plan_batch(batch, ClusterSpec(num_ranks, num_ranks, tokens), cost, sync=sync,
                              encoder=layout)
            found.append(Case(number, num_ranks, layout, plan))
    return found


def measured(
    rank: int, port: int, config: Config, cases: Sequence[Case], corpus: Corpus, runs: int
) -> list[list[Run]]:
    """Of each case, this rank's runs."""
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    member = Rank(config, Membership(rank, cases[0].ranks, 1, "127.0.0.1", port), CPU)
    found = [list[Run]() for _ in cases]
    for wanted in range(1, runs + 1):  # what slows a machine for a while is not in all runs of a case
        for case, own in zip(cases, found):
            plan = case.plan.rank_plan(1, rank)
            inputs = collated(plan, corpus.rank_payloads(plan), member.adapter)
            member.stepper.run(inputs, 0.0)
            result = member.stepper.run(inputs, 0.0)
            own.append(Run(result.step_time_s,
                           [list(seen) for seen in (*result.encoder_times, *result.pack_times)]))
        if rank == 0:
            say(f"runs of {len(cases)} plans", f"{wanted} of {runs} times", wanted / runs)
    member.close()
    return found


def say(what: str, detail: str, share: float) -> None:
    """Print a line of progress. `share`: of the work of `what` that is done."""
    print(f"reality.py: {what}, {share:.0%}: {detail}", file=sys.stderr, flush=True)


def outcomes_of(cases: Sequence[Case], by_rank: Sequence[list[list[Run]]]) -> list[Outcome]:
    return [Outcome(case, list(zip(*(of_rank[number] for of_rank in by_rank)))) for number, case in enumerate(cases)]


def row(name: str, outcomes: Sequence[Outcome]) -> tuple[str, bool]:
    errors = [abs(outcome.error) for outcome in outcomes]
    spread = statistics.mean(outcome.spread for outcome in outcomes)
    mean, worst = statistics.mean(errors), max(errors)
    allowed = max(MOST_MEAN, 2 * spread)
    bias = statistics.mean(outcome.error for outcome in outcomes)
    cells = (f"{statistics.mean(outcome.median_s for outcome in outcomes):.3f}", f"{100 * mean:.1f}",
             f"{100 * bias:+.1f}", f"{100 * worst:.1f}", f"{100 * spread:.1f}", f"{100 * allowed:.1f}")
    return f"| {name} | {' | '.join(cells)} |", mean <= allowed and worst <= MOST_OF_ONE


def ratio_row(outcomes: Sequence[Outcome]) -> str:
    """World over group of the same batch, runs in turns: predicted beside measured."""
    both = {(outcome.case.batch, outcome.case.layout): outcome for outcome in outcomes}
    pairs = [(both[number, "group"], both[number, "world"]) for number, layout in both if layout == "world"]
    pairs = [(group, world) for group, world in pairs if world.case.plan.vision.apart]
    measured_ratio = [world.median_s / group.median_s for group, world in pairs]
    predicted = [world.case.plan.predicted_time_s / group.case.plan.predicted_time_s for group, world in pairs]
    errors = [abs(there / here - 1.0) for there, here in zip(predicted, measured_ratio)]
    return (f"world over group, {len(pairs)} batches: measured {statistics.mean(measured_ratio):.3f}, predicted "
            f"{statistics.mean(predicted):.3f}; error of a batch's ratio {100 * statistics.mean(errors):.1f} % in the "
            f"mean, {100 * max(errors):.1f} % at most")


def settings_of(words: Sequence[str]) -> dict[str, str]:
    found = dict(DEFAULTS)
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or name not in DEFAULTS:
            raise ValueError(f"{word}: not understood; allowed: {', '.join(f'{name}=' for name in DEFAULTS)}")
        found[name] = value
    for name, allowed in ALLOWED.items():
        if not set(found[name].split(",")) <= set(allowed):
            raise ValueError(f"{name}: got {found[name]}; allowed: {', '.join(allowed)}")
    for name in ("batches", "runs"):
        if not found[name].isdecimal() or int(found[name]) < 1:
            raise ValueError(f"{name}: got {found[name]}; allowed: a number above 0")
    return found


def main(words: Sequence[str]) -> int:
    if {"-h", "--help"} & set(words):
        print(__doc__)
        return 0
    try:
        settings = settings_of(words)
    except ValueError as error:
        print(f"reality.py: {error}", file=sys.stderr)
        return 2
    corpus, passed, written = mixed_corpus(), True, list[dict[str, Any]]()
    batches = batches_of(corpus.samples, int(settings["batches"]))
    print("| ranks, sync, layout | step s | mean error % | bias % | worst % | spread of runs % | "
          "mean allowed % |\n|" + "---|" * 7)
    for num_ranks in map(int, settings["ranks"].split(",")):
        config = load(["model.preset=tiny", "run.dir=unused", "planner.sync=auto"])
        cost = measure_here(config, Request("reality", num_ranks), partial(say, f"costs on {num_ranks} ranks")).cost
        for sync in settings["sync"].split(","):
            cases = cases_of(batches, num_ranks, sync, cost.in_mode(sync))
            one = replace(config, planner=replace(config.planner, sync=sync))
            by_rank = run_processes(measured, num_ranks, one, cases, corpus.shared(), int(settings["runs"]),
                                    timeout_s=3600)
            outcomes = outcomes_of(cases, by_rank)
            for layout in dict.fromkeys(case.layout for case in cases):
                line, fine = row(f"{num_ranks}, {sync}, {layout}",
                                 [outcome for outcome in outcomes if outcome.case.layout == layout])
                print(line, flush=True)
                passed = passed and fine
            if any(case.layout == "world" for case in cases):
                print(ratio_row(outcomes), flush=True)
            written += [outcome_json(outcome) for outcome in outcomes]
    if settings["out"]:
        Path(settings["out"]).write_text(json.dumps(written))
    return 0 if passed else 1


def outcome_json(outcome: Outcome) -> dict[str, Any]:
    """A plan as plan files have it, and of each run what every rank took: its step, and (group, begin, end, blocked) of
    phases (group -1) and packs.
    """
    return {"batch": outcome.case.batch, "layout": outcome.case.layout, "plan": outcome.case.plan.to_json(),
            "predicted_s": outcome.case.plan.predicted_time_s, "step_s": outcome.seconds,
            "runs": [[rank._asdict() for rank in run] for run in outcome.runs]}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
