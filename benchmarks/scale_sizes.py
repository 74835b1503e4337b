"""`pow2` and Megatron's rounds beside their own planners, and `dhp` from 8 to 4,096 ranks (tables of
benchmarks/scale.py).

peers      batches of benchmarks/planner.py, 8,192 tokens a rank, the published A800 costs
sizes      the same 4,096 samples at 8, 64 and 512 ranks, in batches of 8 a rank; at 4,096 eight times as many
"""

from __future__ import annotations

from benchmarks.planner import PEERS, bimodal, published_cost
from benchmarks.scale_cases import SAMPLES_PER_RANK, Case, Opened, batches_of
from dhp_ray.planner import ClusterSpec, Sample, checked_problem, plan_batch
from dhp_ray.planner.baselines.megatron import groups_as_packs, rounds_of
from dhp_ray.planner.timeline import time_of

TOKENS = 8192
SIZES = (8, 64, 512, 4096)
SETTINGS = (("qwen3_vl_2b", "step"), ("qwen2_5_vl_7b", "micro_batch"))


def peers(quick: bool) -> None:
    print("\n## Baselines beside the planners that they follow: modelled seconds, sync=micro_batch\n")
    print("| sequences/ranks | FlexSP | pow2 | pow2 over FlexSP | Megatron main | its rounds, as here | Megatron dev | "
          "its rounds, as here | megatron, tuned |\n|" + "---|" * 9)
    cost, ratios = published_cost(), []
    for (count, num_ranks), (main_s, dev_s, _, flexsp_s) in PEERS.items():
        samples = [Sample(str(row), int(length)) for row, length in enumerate(bimodal(count, num_ranks))]
        cluster = ClusterSpec(num_ranks, 8, TOKENS)
        problem = checked_problem(samples, cluster, cost, sync="micro_batch")
        rounds = [time_of(problem, groups_as_packs(problem, rounds_of(problem, TOKENS, packs)))
                  for packs in (False, True)]
        pow2_s, megatron_s = (plan_batch(samples, cluster, cost, planner=name, sync="micro_batch").predicted_time_s
                              for name in ("pow2", "megatron"))
        ratios.append(pow2_s / flexsp_s)
        print(f"| {count}/{num_ranks} | {flexsp_s:.2f} | {pow2_s:.2f} | {ratios[-1]:.3f} | {main_s:.2f} | "
              f"{rounds[0]:.2f} | {dev_s:.2f} | {rounds[1]:.2f} | {megatron_s:.2f} |", flush=True)
    print(f"\npow2 over FlexSP: {min(ratios):.3f} to {max(ratios):.3f}; {sum(ratio <= 1.03 for ratio in ratios)} of "
          f"{len(ratios)} rows at most 3 % above it.")


def sizes(quick: bool) -> None:
    print("\n## From 8 to 4,096 H100, the video-heavy mix: dhp\n")
    print("| model, mode | ranks | tokens a second and rank | of those on 8 | over the lower bound | dhp_paper over "
          "dhp |\n|" + "---|" * 6)
    for model, sync in SETTINGS:
        whole, first = batches_of(Case(model, "H100", "video_heavy", sync, 512, (0,)))[0], 0.0
        for num_ranks in SIZES:
            case = Case(model, "H100", "video_heavy", sync, num_ranks, (0,))
            each = SAMPLES_PER_RANK * num_ranks
            cut = [whole[begin : begin + each] for begin in range(0, len(whole), each)]
            batches = cut if num_ranks <= 512 else None
            found = Opened(case, batches)
            ours = found.planned("dhp")
            rate = found.num_tokens / ours.time_s / num_ranks
            first = first or rate
            over = ours.time_s / sum(plan.lower_bound_s for plan in ours.plans)
            paper = f"{found.planned('dhp_paper').time_s / ours.time_s:.3f}" if num_ranks <= 512 else "-"
            print(f"| {model}, {found.place.mode} | {num_ranks:,} | {rate:,.0f} | {100 * rate / first:.1f} % | "
                  f"{over:.3f} | {paper} |", flush=True)
