"""The planner beside its baselines at scale, simulated: one mode and one device memory a row, every baseline tuned.

    export DHP_RAY_TEST_DATA=FOLDER OMP_NUM_THREADS=1
    python benchmarks/scale.py [fair] [headline] [peers] [study] [sizes] [--quick]   (none: all)

fair       64 ranks in lockstep: images and recomputation alike for all planners; 8 samples a rank, and 1
headline   DHP's published ratios (arXiv 2602.21788: OpenVid 1.35, MSRVTT 1.14)     scale_headline.py
peers      `pow2` beside FlexSP's own solver, Megatron's rounds beside its own      scale_sizes.py
study      64 ranks: nine models, two devices, three mixes, both modes where they fit
sizes      8 to 4,096 ranks, and whether tokens a second and rank stay              scale_sizes.py

A row is the sum over one batch of each seed, 8 samples a rank, on nodes of 8. The mode's tokens a rank come from the
memory model, costs from the model's shape and the device's description; process groups are taken to be there. Images
are encoded in their packs, for all planners alike; `study` also has `dhp` as it runs by default, with `encoder=auto`.
`--quick`: one seed in `study`, and the models of QUICK in `study` and `fair`.

In `fair` every planner encodes images in its packs or apart from them, and recomputes no pack, all packs or each pack
as far as it must: whatever is shortest for it. One batch a row; `static` is left out, which `static_best` contains.

In `study` each planner has recomputation on or off, whichever is faster for it; `dhp` also plans it pack by pack, which
the systems that the baselines follow do not. `static` has one degree and one pack cap for all batches of a row, the
best for their sum; `static_best`, `pow2`, `dhp_paper` and `megatron` choose a cap (and degrees) for each batch. All
modelled.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.scale_cases import Case, batches_of, opened
from benchmarks.scale_headline import headline
from benchmarks.scale_sizes import peers, sizes
from dhp_ray.planner import warm_up

BASELINES = ("static", "static_best", "pow2", "dhp_paper", "megatron")
MODELS = ("qwen2_5_vl_3b", "qwen2_5_vl_7b", "qwen2_5_vl_32b", "qwen3_vl_2b", "qwen3_vl_8b", "qwen3_vl_32b",
          "internvl3_2b", "internvl3_8b", "internvl3_38b")
QUICK = ("qwen2_5_vl_3b", "internvl3_8b", "qwen3_vl_32b")
MIXES = ("video_heavy", "document_heavy", "caption_heavy")
FAIR = ("qwen2_5_vl_3b", "internvl3_8b", "qwen3_vl_2b", "qwen3_vl_32b")
FAIR_MIXES = {8: MIXES, 1: (*MIXES, "docqa_rl")}
"""Mixes of `fair` by samples a rank; docqa_rl: long-tailed documents, text alone, as in reinforcement learning."""
WANTED = 1.05
"""The ratio of the best baseline to `dhp` that was set beforehand."""


class Row(NamedTuple):
    """Modelled seconds of a case by planner, and what bounds them. `mode` and `tokens_per_rank`: those in which `dhp`
    is fastest. `auto_s`: `dhp` with `encoder=auto`. `plain_s`: `dhp` with recomputation of all packs or of none."""

    case: Case
    mode: str
    tokens_per_rank: int
    times_s: dict[str, float]
    auto_s: float
    plain_s: float
    bound_s: float

    @property
    def best(self) -> str:
        """The best baseline."""
        return min((name for name in self.times_s if name != "dhp"), key=lambda name: self.times_s[name])

    @property
    def gain(self) -> float:
        """The best baseline over dhp."""
        return self.times_s[self.best] / self.times_s["dhp"]

    @property
    def gain_auto(self) -> float:
        """The same of dhp with `encoder=auto`, while the baseline encodes images in its packs."""
        return self.times_s[self.best] / self.auto_s

    @property
    def gain_plain(self) -> float:
        """The same of dhp with recomputation of all packs or of none."""
        return self.times_s[self.best] / self.plain_s

    @property
    def most(self) -> float:
        """The best baseline over the lower bound: no planner gains more."""
        return self.times_s[self.best] / self.bound_s

    def over(self, planner: str) -> float:
        return self.times_s[planner] / self.times_s["dhp"]


def row_of(case: Case) -> Row | None:
    """None where the case does not fit."""
    batches = batches_of(case)
    plain = [one for again in ("false", "true") if (one := opened(replace(case, recomputes=again), batches))]
    if not plain:
        return None
    times_s = {name: min(one.planned(name).time_s for one in plain) for name in BASELINES}
    by_pack = opened(replace(case, recomputes="packs"), batches)
    found = [*plain, by_pack] if by_pack else plain
    planned = [one.planned("dhp") for one in found]
    place = min(range(len(found)), key=lambda place: planned[place].time_s)
    ours = found[place]
    bounds = [sum(plan.lower_bound_s for plan in one.plans) for one in planned]
    auto_s = min(one.planned("dhp", encoder="auto").time_s for one in found)
    plain_s = min(each.time_s for each in planned[: len(plain)])
    mode = f"{ours.place.mode}{', by pack' * (ours is by_pack)}"
    return Row(case, mode, ours.cluster.tokens_per_rank, times_s | {"dhp": planned[place].time_s}, auto_s, plain_s,
               min(bounds))


def study(quick: bool) -> None:
    print("\n## 64 ranks: the best baseline over dhp\n")
    print("A cell: the best baseline over dhp, over dhp with encoder=auto / over the lower bound with images in packs, "
          "above which no planner can gain (that baseline; static over dhp).\n")
    print(f"| model | device | mode | tokens a rank | {' | '.join(MIXES)} |\n|{'---|' * (4 + len(MIXES))}")
    rows: list[Row] = []
    for sync in ("step", "micro_batch"):
        for model in QUICK if quick else MODELS:
            for device in ("910B", "H100"):
                found = [row_of(Case(model, device, mix, sync, seeds=(0,) if quick else (0, 1, 2))) for mix in MIXES]
                if any(found):
                    print(line_of(found), flush=True)
                rows += [row for row in found if row]
    explain(rows)


def line_of(found: Sequence[Row | None]) -> str:
    rows = [row for row in found if row]
    modes = " / ".join(dict.fromkeys(row.mode for row in rows))
    room = " / ".join(dict.fromkeys(f"{row.tokens_per_rank:,}" for row in rows))
    return (f"| {rows[0].case.model} | {rows[0].case.device} | {modes} | {room} | "
            f"{' | '.join(cell_of(row) if row else 'does not fit' for row in found)} |")


def cell_of(row: Row) -> str:
    return f"{row.gain:.3f}, {row.gain_auto:.3f} / {row.most:.3f} ({row.best}; {row.over('static'):.2f})"


def fair(quick: bool) -> None:
    print("\n## All planners alike, 64 ranks, sync=micro_batch: the best baseline over dhp\n")
    columns = [(each, mix) for each, mixes in FAIR_MIXES.items() for mix in mixes]
    print(f"| model | device | {' | '.join(f'{mix}, {each} a rank' for each, mix in columns)} |\n"
          f"|{'---|' * (2 + len(columns))}")
    gains: dict[tuple[int, str], list[float]] = {column: [] for column in columns}
    for model in QUICK if quick else FAIR:
        for device in ("910B", "H100"):
            cells = []
            for each, mix in columns:
                gain, baseline = fair_gain(Case(model, device, mix, seeds=(0,), samples=64 * each))
                gains[each, mix].append(gain)
                cells.append(f"{gain:.3f} ({baseline})")
            print(f"| {model} | {device} | {' | '.join(cells)} |", flush=True)
    print(f"\n| mix | {' | '.join(f'{each} a rank' for each in FAIR_MIXES)} |\n|{'---|' * (1 + len(FAIR_MIXES))}")
    for mix in dict.fromkeys(mix for _, mix in columns):
        print(f"| {mix} | {' | '.join(spread_of(gains.get((each, mix), [])) for each in FAIR_MIXES)} |")
    all_of = [[gain for (found, _), values in gains.items() if found == each for gain in values] for each in FAIR_MIXES]
    print(f"| all | {' | '.join(map(spread_of, all_of))} |")


def spread_of(gains: Sequence[float]) -> str:
    if not gains:
        return "-"
    return f"{geometric_mean(gains):.3f} ({min(gains):.3f} to {max(gains):.3f}), {len(gains)} cases"


def fair_gain(case: Case) -> tuple[float, str]:
    """The best baseline over dhp, each at its best recomputation and encoding, and that baseline."""
    batches = batches_of(case)
    found = [one for again in ("false", "true", "packs") if (one := opened(replace(case, recomputes=again), batches))]
    times_s = {name: min(one.planned(name, encoder="auto").time_s for one in found)
               for name in (*BASELINES, "dhp") if name != "static"}
    ours_s = times_s.pop("dhp")
    best = min(times_s, key=lambda name: times_s[name])
    return times_s[best] / ours_s, best


def explain(rows: Sequence[Row]) -> None:
    gains = [row.gain for row in rows]
    print(f"\n{len(rows)} rows, geometric mean {geometric_mean(gains):.3f}, least {min(gains):.3f}; "
          f"{sum(gain < WANTED for gain in gains)} under {WANTED}, {sum(gain < 1 for gain in gains)} under 1. The "
          f"best baseline over the lower bound: {geometric_mean([row.most for row in rows]):.3f}.")
    auto = [row.gain_auto for row in rows]
    print(f"With encoder=auto for dhp alone: geometric mean {geometric_mean(auto):.3f}, least {min(auto):.3f}; "
          f"{sum(gain < WANTED for gain in auto)} under {WANTED}, {sum(gain < 1 for gain in auto)} under 1.")
    plain = [row.gain_plain for row in rows]
    print(f"With recomputation of all packs or of none for dhp too: geometric mean {geometric_mean(plain):.3f}, least "
          f"{min(plain):.3f}; {sum(gain < WANTED for gain in plain)} under {WANTED}.")
    for planner in BASELINES:
        print(f"- over {planner}: {geometric_mean([row.over(planner) for row in rows]):.3f}")
    for mix in MIXES:
        mixed = [row for row in rows if row.case.workload == mix]
        over = [row.over("static") for row in mixed]
        print(f"- {mix}: over the best baseline {geometric_mean([row.gain for row in mixed]):.3f}, over static "
              f"{geometric_mean(over):.3f} ({min(over):.2f} to {max(over):.2f})")
    few = sum(row.gain < WANTED and row.most < WANTED for row in rows)
    print(f"\nOf the rows under {WANTED}, {few} have a bound that leaves no more.")


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(math.fsum(map(math.log, values)) / len(values)) if values else math.nan


TABLES: dict[str, Callable[[bool], object]] = {"fair": fair, "headline": headline, "peers": peers, "study": study,
                                               "sizes": sizes}


def main(words: Sequence[str]) -> int:
    if {"-h", "--help"} & set(words):
        print(__doc__)
        return 0
    names = [word for word in words if word != "--quick"]
    unknown = [word for word in names if word not in TABLES]
    if unknown:
        print(f"scale.py: {unknown[0]}: no such table; allowed: {', '.join(TABLES)}, --quick", file=sys.stderr)
        return 2
    warm_up()
    for name in names or TABLES:
        begin = time.perf_counter()
        TABLES[name]("--quick" in words)
        print(f"\n{name}: {time.perf_counter() - begin:.0f} s, load {os.getloadavg()[0]:.1f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
