"""The time of a plan in plain Python, whose images are encoded in its packs or apart from them: the slow, obvious
reference of `timeline_of` and of the prices of packs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from dhp_ray.planner import CostModel, Plan
from dhp_ray.planner.plan.types import Grid
from tests.planner.reference_cost import Batch

Factor = Callable[[str, int], float]
"""What an image's or a pack's seconds (`image`, `pack`) are multiplied by. Numbers say the same in every plan of a
batch: an image's is its place among the batch's images, a pack's is the first row of the batch that is in it."""


@dataclass
class Work:
    """What ranks encode apart from the packs, seconds at their own speeds: of images and parts; of each pass of a rank,
    with sync=micro_batch."""

    alone: dict[int, float]
    passes: dict[tuple[int, int], float] = field(default_factory=dict)

    def done(self, share: float, begin: dict[int, float]) -> dict[int, float]:
        """When each rank is done with a share of it, with sync=step."""
        return {rank: begin[rank] + share * self.alone[rank] for rank in begin}


def parts_of(seconds: float, grid: Grid, count: int) -> list[tuple[float, float]]:
    """(share of its rows, seconds) of each part of an image."""
    time = grid[0]
    steps = [time // count + (part < time % count) for part in range(count)]
    return [(own / time, seconds * own / time) for own in steps]


def timeline(plan: Plan, cost: CostModel, varied: Factor | None = None) -> float:
    """Seconds of the step."""
    cluster, ranks = plan.cluster, range(plan.cluster.num_ranks)
    factor = varied or (lambda kind, number: 1.0)
    batch = Batch([replace(sample, vision_grids=()) for sample in plan.samples], cluster, cost)
    first_image = [0]
    for sample in plan.samples:
        first_image.append(first_image[-1] + len(sample.vision_grids))
    free, work = dict.fromkeys(ranks, 0.0), Work(dict.fromkeys(ranks, 0.0))
    meets = {rank: {rank} for rank in ranks}
    sent, received = dict.fromkeys(ranks, 0.0), dict.fromkeys(ranks, 0.0)
    packs_s, encodings_s = [], []
    for group in plan.groups:
        encode_s, place = dict.fromkeys(group.ranks, 0.0), 0
        split = {found.image: found for found in group.splits}
        for row in group.sequences:
            sample = plan.samples[row]
            patches = sum(time * height * width for time, height, width in sample.vision_grids)
            for image, grid in enumerate(sample.vision_grids, first_image[row]):
                frame = grid[1] * grid[2]
                seconds = grid[0] * (cost.vision_quadratic_s * frame**2 + cost.vision_linear_s * frame)
                seconds *= factor("image", image)
                found, encoder = split.get(place), group.encoders[place]
                by = found.ranks if found else (encoder,)
                passes = (found.passes if found else group.passes[place : place + 1]) or (0,) * len(by)
                place += 1
                if not plan.vision.apart:
                    encode_s[encoder] += seconds / cluster.speeds[encoder]
                    continue
                for rank, number, (share, part_s) in zip(by, passes, parts_of(seconds, grid, len(by))):
                    part_s /= cluster.speeds[rank]
                    work.alone[rank] += part_s
                    work.passes[rank, number] = work.passes.get((rank, number), 0.0) + part_s
                    rows = share * sample.vision_tokens * grid[0] * frame / patches / len(group.ranks)
                    for member in group.ranks:
                        meets[member].add(rank)
                        meets[rank].add(member)
                        if member != rank:
                            sent[rank] += rows
                            received[member] += rows
        language_s = batch.pack_time_s(group.sequences, group.ranks) * factor("pack", min(group.sequences))
        encodings_s.append(max(encode_s.values()))
        if any(encode_s.values()):
            encodings_s[-1] += cost.encoder_pass_s / min(cluster.speeds[rank] for rank in group.ranks)
        packs_s.append(language_s + encodings_s[-1])
    exchange_s = {rank: max(sent[rank], received[rank]) * cost.feature_bytes / cost.slowest_bytes_per_s
                  for rank in ranks}
    pass_s = {rank: cost.encoder_pass_s / cluster.speeds[rank] for rank in ranks}
    work.passes = {(rank, number): seconds + pass_s[rank] for (rank, number), seconds in work.passes.items()}
    work.alone = {rank: seconds + (pass_s[rank] if any(rank == other for other, _ in work.passes) else 0.0)
                  for rank, seconds in work.alone.items()}
    share = 1.0 - cost.vision_forward + (0.0 if plan.vision.keeps or cost.vision_forward == 1.0
                                         else cost.vision_forward)
    if plan.sync == "micro_batch":
        encode_s = {group.micro_batch: 0.0 for group in plan.groups}
        rest_s = dict(encode_s)
        for group, seconds, encoding_s in zip(plan.groups, packs_s, encodings_s):
            encode_s[group.micro_batch] = max(encode_s[group.micro_batch], encoding_s)
            rest_s[group.micro_batch] = max(rest_s[group.micro_batch], seconds - encoding_s)
        end = sum(encode_s.values()) + sum(rest_s.values()) + plan.fixed_s * len(rest_s)
        if plan.vision.apart:
            passes_s = sum(max(cost.encoder_gather_s, *(work.passes.get((rank, number), 0.0) for rank in ranks))
                           for number in range(plan.vision.num_passes))
            end += (cost.vision_forward + share) * passes_s + max(exchange_s.values()) * (1 + (share > 0))
        return end + cost.update_s
    if plan.vision.apart:
        encoded = work.done(cost.vision_forward, free)
        free = {rank: max(encoded[other] for other in meets[rank]) + exchange_s[rank] for rank in ranks}
    for group, seconds in zip(plan.groups, packs_s):
        end = max(free[rank] for rank in group.ranks) + seconds
        free |= dict.fromkeys(group.ranks, end)
    if plan.vision.apart and share:
        free = work.done(share, {rank: max(free[other] for other in meets[rank]) + exchange_s[rank] for rank in ranks})
    return max(free.values()) + plan.fixed_s
