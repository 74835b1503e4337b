"""What ranks would say that measure in a world of known costs: every pack takes what these say, with noise."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from dhp_ray.measure.member import MESSAGE_BYTES
from dhp_ray.measure.rounds import Exchanged, PartResult, Sizes, Spec, StepTiming
from dhp_ray.planner.cost.model import CostModel
from dhp_ray.planner.cost.work import work_of
from dhp_ray.planner.plan.types import Plan
from dhp_ray.train.results import PackTime

SIZES = Sizes(512, ((1, 4, 4), (1, 8, 12), (1, 16, 16)), 4)

TRUE = CostModel(4e-8, 5.5e-5, 4608.0, 0.012, {"intra": {2: 5e8}, "inter": {2: 1e8}}, communication="ring",
                 latency_s=2.5e-3, pack_s=6e-3, group_s=0.004, vision_quadratic_s=1.8e-8, vision_linear_s=2e-5,
                 encoder_pass_s=3e-3, vision_forward=0.3)
GATHER_S, UPDATE_S, FIRST_MESSAGE_S, REPEATS = 0.03, 0.007, 1e-4, 5
BESIDE_GATHERS_S = 0.02
"""By which a ring's step takes longer in lockstep."""


def spec(num_ranks: int = 2, **changed: Any) -> Spec:
    return Spec(**{"sync": "step", "nodes": (0,) * num_ranks, "sizes": SIZES} | changed)


def results_of(spec: Spec, noise: float = 0.0, seed: int = 0) -> dict[str, list[PartResult]]:
    """Of every part, by rank."""
    draw = np.random.default_rng(seed)
    found: dict[str, list[PartResult]] = {}
    for part in spec.parts():
        rounds = [_round(plan, spec, draw, noise) for plan in spec.rounds(part)]
        found[part] = [PartResult(rounds=[round_[rank] for round_ in rounds]) for rank in range(spec.num_ranks)]
    for rank in range(spec.num_ranks):
        if "exchanges" in found:
            found["exchanges"][rank] = PartResult(exchanged=_exchanged(spec, draw, noise))
    return found


def _exchanged(spec: Spec, draw: np.random.Generator, noise: float) -> list[Exchanged]:
    kinds = [(len(ring), True, 1e8) if len({spec.nodes[rank] for rank in ring}) > 1 else (len(ring), False, 5e8)
             for ring, *_ in spec.rings()]
    return [Exchanged(degree, across, {size: (FIRST_MESSAGE_S + size / rate) * (1 + noise * draw.normal())
                                       for size in MESSAGE_BYTES}) for degree, across, rate in kinds]


def _round(plan: Plan, spec: Spec, draw: np.random.Generator, noise: float) -> list[list[StepTiming]]:
    """The repeats of each rank."""
    plan = replace(plan, inputs={"cost": TRUE.to_json()})
    work, rate = work_of(plan), TRUE.rates(max(2, spec.num_ranks))
    busy_s = dict(zip(zip(work.rank.tolist(), work.group.tolist()), work.seconds(TRUE).tolist()))
    found: list[list[StepTiming]] = [[] for _ in range(spec.num_ranks)]
    for _ in range(REPEATS):
        for rank in range(spec.num_ranks):
            clock, packs = 0.001, []
            for (owner, group), seconds in busy_s.items():
                if owner != rank:
                    continue
                blocked_s = 0.0
                if group >= 0 and plan.groups[group].degree > 1:
                    degree = plan.groups[group].degree
                    across = plan.cluster.crosses(plan.groups[group].ranks)
                    tokens = sum(plan.samples[row].num_tokens for row in plan.groups[group].sequences)
                    lockstep_s = BESIDE_GATHERS_S * (spec.sync == "micro_batch")
                    blocked_s = ((degree - 1) * (TRUE.latency_s + lockstep_s)
                                 + tokens * float(rate[degree].across_s if across else rate[degree].inside_s))
                own_s = seconds * (1 + noise * draw.normal())
                blocked_s += GATHER_S * (spec.sync == "micro_batch")
                packs.append(PackTime(group, clock, clock + own_s + blocked_s, blocked_s))
                clock += own_s + blocked_s
            after_s = UPDATE_S if spec.sync == "micro_batch" else TRUE.fixed_s
            found[rank].append(StepTiming(clock - 0.001 + after_s, tuple(packs)))
    return found
