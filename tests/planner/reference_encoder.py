"""The time of a plan in plain Python, whose images are encoded in its packs or apart from them: the slow, obvious
reference of `encoder_timeline` and of the prices of packs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from dhp_ray.planner import CostModel, Plan
from tests.planner.reference_cost import Batch

Factor = Callable[[str, int], float]
"""What an image's or a pack's seconds (`image`, `pack`) are multiplied by. Numbers say the same in every plan of a
batch: an image's is its place among the batch's images, a pack's is the first row of the batch that is in it."""


def timeline(plan: Plan, cost: CostModel, varied: Factor | None = None) -> float:
    """Seconds of the step, with `sync=step`."""
    cluster, ranks = plan.cluster, range(plan.cluster.num_ranks)
    factor = varied or (lambda kind, number: 1.0)
    batch = Batch([replace(sample, vision_grids=()) for sample in plan.samples], cluster, cost)
    first_image = [0]
    for sample in plan.samples:
        first_image.append(first_image[-1] + len(sample.vision_grids))
    free = dict.fromkeys(ranks, 0.0)
    busy = dict.fromkeys(ranks, 0.0)  # of encoding, at the ranks' own speeds
    meets = {rank: {rank} for rank in ranks}
    sent, received = dict.fromkeys(ranks, 0.0), dict.fromkeys(ranks, 0.0)
    packs_s = []
    for group in plan.groups:
        encode_s = dict.fromkeys(group.ranks, 0.0)
        encoders = iter(group.encoders)
        for row in group.pack.sequences:
            sample = plan.samples[row]
            patches = sum(time * height * width for time, height, width in sample.vision_grids)
            for image, (time, height, width) in enumerate(sample.vision_grids, first_image[row]):
                encoder, frame = next(encoders), height * width
                seconds = time * (cost.vision_quadratic_s * frame**2 + cost.vision_linear_s * frame)
                seconds *= factor("image", image) / cluster.speeds[encoder]
                if not plan.vision.apart:
                    encode_s[encoder] += seconds
                    continue
                busy[encoder] += seconds
                rows = sample.vision_tokens * time * frame / patches / len(group.ranks)
                for rank in group.ranks:
                    meets[rank].add(encoder)
                    meets[encoder].add(rank)
                    if rank != encoder:
                        sent[encoder] += rows
                        received[rank] += rows
        language_s = batch.pack_time_s(group.pack.sequences, group.ranks) * factor("pack", min(group.pack.sequences))
        if any(encode_s.values()):
            language_s += cost.encoder_pass_s / min(cluster.speeds[rank] for rank in group.ranks)
        packs_s.append(language_s + max(encode_s.values()))
    exchange_s = {rank: max(sent[rank], received[rank]) * cost.feature_bytes / cost.slowest_bytes_per_s
                  for rank in ranks}
    busy = {rank: seconds + (cost.encoder_pass_s / cluster.speeds[rank] if seconds else 0.0)
            for rank, seconds in busy.items()}
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
