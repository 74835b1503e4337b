"""The time of a plan in plain Python, whose images are encoded in its packs or apart from them: the slow, obvious
reference of `encoder_timeline` and of the prices of packs."""

from __future__ import annotations

from collections.abc import Callable

from dhp_ray.planner import CostModel, Plan

Factor = Callable[[str, int], float]
"""What an image's or a pack's seconds (`image`, `pack`; its number in the plan) are multiplied by."""


def timeline(plan: Plan, cost: CostModel, varied: Factor = lambda kind, number: 1.0) -> float:
    """Seconds of the step, with `sync=step`."""
    cluster, ranks = plan.cluster, range(plan.cluster.num_ranks)
    free = dict.fromkeys(ranks, 0.0)
    busy = dict.fromkeys(ranks, 0.0)  # of encoding, at the ranks' own speeds
    meets = {rank: {rank} for rank in ranks}
    sent, received = dict.fromkeys(ranks, 0.0), dict.fromkeys(ranks, 0.0)
    packs_s, number = [], 0
    for index, group in enumerate(plan.groups):
        samples = [plan.samples[row] for row in group.pack.sequences]
        encode_s = dict.fromkeys(group.ranks, 0.0)
        encoders = iter(group.encoders)
        for sample in samples:
            patches = sum(time * height * width for time, height, width in sample.vision_grids)
            for (time, height, width), seconds in zip(sample.vision_grids, cost.image_s(sample)):
                encoder = next(encoders)
                seconds *= varied("image", number) / cluster.speeds[encoder]
                number += 1
                if not plan.vision.apart:
                    encode_s[encoder] += seconds
                    continue
                busy[encoder] += seconds
                rows = sample.vision_tokens * time * height * width / patches / len(group.ranks)
                for rank in group.ranks:
                    meets[rank].add(encoder)
                    meets[encoder].add(rank)
                    if rank != encoder:
                        sent[encoder] += rows
                        received[rank] += rows
        lengths = [sample.num_tokens for sample in samples]
        language_s = cost.pack_time_s(lengths, group.ranks, cluster) * varied("pack", index)
        packs_s.append(language_s + max(encode_s.values()))
    exchange_s = {rank: max(sent[rank], received[rank]) * cost.feature_bytes / cost.slowest_bytes_per_s
                  for rank in ranks}
    if plan.vision.apart:
        encoded = {rank: cost.vision_forward * busy[rank] for rank in ranks}
        free = {rank: max(encoded[other] for other in meets[rank]) + exchange_s[rank] for rank in ranks}
    for group, seconds in zip(plan.groups, packs_s):
        end = max(free[rank] for rank in group.ranks) + seconds
        free |= dict.fromkeys(group.ranks, end)
    if plan.vision.apart and cost.vision_forward < 1.0:
        share = 1.0 - cost.vision_forward + (0.0 if plan.vision.keeps else cost.vision_forward)
        free = {rank: max(free[other] for other in meets[rank]) + exchange_s[rank] + share * busy[rank]
                for rank in ranks}
    return max(free.values()) + plan.fixed_s
