"""What mode `auto` takes, beside what `dhp` makes of each: modelled, 64 devices, a batch of a workload.

    python benchmarks/modes.py                  four models, two devices, three mixes
    python benchmarks/modes.py --models qwen2_5_vl_3b

Each mode is what its memory leaves room for. The last columns: the step in the mode that auto takes, over the step in
the best mode; the same where executed packs take longer or shorter than predicted, by 5 % at random, the median of nine
draws. Below the table the same means where `micro_batch` counts for more than it is predicted to take.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.scale_cases import Case, opened  # noqa: E402
from dhp_ray.planner import warm_up  # noqa: E402
from dhp_ray.planner.cost.model import SYNCS  # noqa: E402
from dhp_ray.planner.mode import Offer, allowed_modes, choose, timed  # noqa: E402
from dhp_ray.planner.problem import problem_of  # noqa: E402
from dhp_ray.simulate.step import simulate_step  # noqa: E402

MODELS = ("qwen2_5_vl_3b", "internvl3_8b", "qwen3_vl_2b", "qwen3_vl_32b")
MIXES = ("video_heavy", "document_heavy", "caption_heavy")
SPREAD, DRAWS = 0.05, 9
SURCHARGES = (1.0, 1.02, 1.04, 1.1)


class Found(NamedTuple):
    """A mode that holds the batch: as `auto` sees it, and what `dhp` takes there, as predicted and with errors."""

    offer: Offer
    exact_s: float
    spread_s: float


def found_in(case: Case) -> list[Found]:
    found = []
    for sync in SYNCS:
        for again in ("packs", "selective", "true"):
            one = opened(Case(case.model, case.device, case.workload, sync, seeds=(0,), recomputes=again))
            if one is None:
                continue
            plan, limits = one.planned("dhp").plans[0], one.place.limits
            offer = Offer(one.place.mode, limits.tokens, one.cost, one.cost.gather_s, limits.offload,
                          limits.recomputation)
            [offer] = timed([offer], 1, plan.samples, one.cluster.nodes)
            problem = problem_of(plan.samples, plan.cluster, one.cost, plan.sync)
            drawn = np.random.default_rng(0).normal(0.0, SPREAD, (DRAWS, len(plan.groups)))
            spread_s = statistics.median(simulate_step(plan, problem, stretch=np.exp(row)).time_s for row in drawn)
            found.append(Found(offer, plan.predicted_time_s, spread_s))
    return found


def taken(found: Sequence[Found], surcharge: float = 1.0) -> Found:
    """As `choose` takes one, where lockstep costs so many times its prediction."""
    charged = [replace(one.offer, step_s=one.offer.step_s * (
        surcharge if one.offer.mode.sync == "micro_batch" else 1.0)) for one in found]
    return found[charged.index(choose(charged, 0))]


def row(case: Case, found: Sequence[Found]) -> str:
    chosen, least_s = taken(found), min(one.exact_s for one in found)
    by_mode = {one.offer.mode: one for one in found}
    cells = [f"{by_mode[mode].exact_s:.3g}" if mode in by_mode else "-"
             for mode in allowed_modes("auto", "auto")]
    return (f"| {case.model}, {case.device}, {case.workload} | {' | '.join(cells)} | {chosen.offer.mode} | "
            f"{chosen.exact_s / least_s:.3f} | {chosen.spread_s / min(one.spread_s for one in found):.3f} |")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    models = parser.parse_args(argv).models.split(",")
    warm_up()
    columns = [f"{sync}, {again}" for sync in SYNCS for again in ("by pack", "but attention", "all")]
    print(f"| 64 devices, one batch | {' | '.join(columns)} | auto takes | over the best | with errors |\n|"
          + "---|" * (len(columns) + 4))
    every = []
    for case in (Case(model, device, mix) for model in models for device in ("910B", "H100") for mix in MIXES):
        if found := found_in(case):
            every.append(found)
            print(row(case, found), flush=True)
    print("\n| micro_batch counts for | mean over the best (worst) | with errors |\n|---|---|---|")
    for surcharge in SURCHARGES:
        exact = [taken(found, surcharge).exact_s / min(one.exact_s for one in found) for found in every]
        spread = [taken(found, surcharge).spread_s / min(one.spread_s for one in found) for found in every]
        print(f"| {surcharge:g} | {statistics.geometric_mean(exact):.4f} ({max(exact):.3f}) | "
              f"{statistics.geometric_mean(spread):.4f} ({max(spread):.3f}) |")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
