"""The part of a plan that one rank runs.

PlanSlices -> RankPlan -> RankPack ... the slices of neighbouring ranks, that of one rank, and a pack of it
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, chain

from dhp_ray.planner.sample import Sample
from dhp_ray.planner.vision_plan import IN_PACKS, SplitImage, VisionPlan


@dataclass(frozen=True, slots=True)
class RankPack:
    """A pack as one of its ranks sees it. `index`: the pack's place in the plan. `micro_batch` counts from 0 without
    gaps.
    """

    index: int
    ranks: tuple[int, ...]
    samples: tuple[Sample, ...]
    encoders: tuple[int, ...]
    predicted_time_s: float
    micro_batch: int = 0
    passes: tuple[int, ...] = ()
    splits: tuple[SplitImage, ...] = ()
    offload: float = 0.0
    recomputed: float = 0.0


@dataclass(frozen=True, slots=True)
class RankPlan:
    """One rank's ordered slice of a plan, and every process group of the plan (the same on all ranks, in plan order).

    encodes: for each micro-batch of a plan with sync=micro_batch, whether any rank's pack in it has an image; empty
    with sync=step. encoded: the packs, its own and others', with an image that this rank encodes apart from the packs
    (`vision`), in plan order. plan_id: names the plan among all that were sent in a run.
    """

    step: int
    rank: int
    process_groups: tuple[tuple[int, ...], ...]
    packs: tuple[RankPack, ...]
    encodes: tuple[bool, ...] = ()
    plan_id: str = ""
    vision: VisionPlan = IN_PACKS
    encoded: tuple[RankPack, ...] = ()

    @property
    def num_micro_batches(self) -> int:
        """Number of micro-batches of a plan with sync=micro_batch; 0 with sync=step."""
        return len(self.encodes)


@dataclass(frozen=True, slots=True)
class PlanSlices:
    """The slices of neighbouring ranks, with each pack once. (In RankPlans a pack would appear once for each of its
    ranks.)

    `own` and `encoded`: by rank from `first_rank` on, places in `packs`, which are in plan order.
    """

    step: int
    first_rank: int
    process_groups: tuple[tuple[int, ...], ...]
    packs: tuple[RankPack, ...]
    own: tuple[list[int], ...]
    encoded: tuple[list[int], ...]
    encodes: tuple[bool, ...] = ()
    plan_id: str = ""
    vision: VisionPlan = IN_PACKS

    def of(self, ranks: range) -> PlanSlices:
        """The slices of some of these ranks."""
        begin, end = ranks.start - self.first_rank, ranks.stop - self.first_rank
        own, encoded = self.own[begin:end], self.encoded[begin:end]
        used = sorted(set(chain(*own, *encoded)))
        place = {index: number for number, index in enumerate(used)}
        return replace(self, first_rank=ranks.start, packs=tuple([self.packs[index] for index in used]),
                       own=tuple([[place[index] for index in places] for places in own]),
                       encoded=tuple([[place[index] for index in places] for places in encoded]))

    def rank_plans(self) -> list[RankPlan]:
        """The slices in rank order."""
        return [
            RankPlan(self.step, rank, self.process_groups, tuple([self.packs[index] for index in own]), self.encodes,
                     self.plan_id, self.vision, tuple([self.packs[index] for index in encoded]))
            for rank, (own, encoded) in enumerate(zip(self.own, self.encoded), self.first_rank)
        ]


def encoded_images(pack: RankPack, rank: int) -> list[tuple[bool, ...]]:
    """For every sample of the pack, whether `rank` encodes each of its images, or a part of it."""
    here = [encoder == rank for encoder in pack.encoders]
    for split in pack.splits:
        here[split.image] = rank in split.ranks
    ends = list(accumulate(len(sample.vision_grids) for sample in pack.samples))
    return [tuple(here[begin:end]) for begin, end in zip([0, *ends], ends)]


def planned_samples(plan: RankPlan) -> Iterator[Sample]:
    """The samples of which a rank needs rows: those of its packs, and those with an image that it encodes apart from
    them. A sample may be in both.
    """
    for pack in plan.packs:
        yield from pack.samples
    for pack in plan.encoded:
        yield from (sample for sample, here in zip(pack.samples, encoded_images(pack, plan.rank)) if True in here)
