"""Random plans of small samples, and how what ranks compute under a plan is held against plain transformers."""

from __future__ import annotations

import faulthandler
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dhp_ray.comm.device import CPU
from dhp_ray.config import Config, load
from dhp_ray.planner.plan.cluster import ClusterSpec
from dhp_ray.planner.plan.types import Grid, Pack, Plan, Sample, VisionPlan
from dhp_ray.runtime.messages import Membership
from dhp_ray.runtime.worker.rank import Rank
from dhp_ray.train.collate import Payload
from dhp_ray.train.step_inputs import collated
from tests.packs import PRESETS, Film, make_sample, own_payloads, relative_errors, with_splits
from tests.ranks import run_processes
from tests.train.networks import whole

STEP = 3  # from which dropout is drawn
WATCHDOG_S = 60
TOLERANCE = 2e-5
PARTS: dict[str, list[int | Grid | Film]] = {
    "word": [2], "token": [1], "short": [7], "text": [40], "long": [150], "image": [20, (1, 4, 8), 30],
    "images": [9, (1, 4, 6), 40, (1, 4, 4), 2, (1, 8, 6), 5], "picture": [(1, 8, 8), 12], "first": [(1, 2, 2), 1],
    "clip": [(2, 4, 6), 3], "wide": [4, (1, 2, 20), 60],
    "film": [5, Film(0.5, ((2, 4, 4), (2, 4, 4), (1, 4, 4))), 30, (1, 4, 8), 9],
    "reel": [8, Film(1.5, ((3, 4, 6),)), 20], "poster": [3, (1, 12, 20), 9, (1, 4, 4)],
    "screen": [5, Film(1.0, ((2, 8, 20),)), 4], "masked": [50], "unseen": [10, (1, 4, 4), 10],
}
FIRST_LABEL = {"masked": 50, "unseen": 26}
SAMPLES = {preset: [make_sample(name, parts, FIRST_LABEL.get(name), preset) for name, parts in PARTS.items()]
           for preset in PRESETS}


@dataclass(frozen=True)
class World:
    """Ranks and settings under which plans run one after the other."""

    num_ranks: int
    sync: str
    transport: str
    recomputes: bool | str = False
    """Or another value of `train.activation_checkpointing`."""
    freeze: str = ""
    preset: str = "tiny"
    encoder: str = "group"
    splits: bool = False

    def __str__(self) -> str:
        frozen = f"-{self.freeze}_frozen" * bool(self.freeze)
        family = f"-{self.preset}" * (self.preset != "tiny")
        apart = f"-{self.encoder}" * (self.encoder != "group") + "-split" * self.splits
        again = {False: "", True: "-recomputed"}.get(self.recomputes, f"-{self.recomputes}")  # type: ignore[call-overload]
        return f"{self.num_ranks}-{self.sync}-{self.transport}{again}{frozen}{family}{apart}"


def random_plan(seed: int, world: World) -> Plan:
    """Groups of any ranks in any ring order, packs of one to three samples, each sample at most once, any encoders."""
    random, known = np.random.default_rng(seed), [sample for sample, _ in SAMPLES[world.preset]]
    places = [int(place) for place in random.permutation(len(known))]
    if seed % 5 == 0:  # some batches have no image at all
        places = [place for place in places if not known[place].vision_grids]
    if world.splits:  # those with several steps in time come first
        places.sort(key=lambda place: known[place].id not in ("reel", "screen"))
    samples: list[Sample] = []
    groups: list[Pack] = []
    micro_batch, busy = 0, set[int]()
    for _ in range(random.integers(1, 2 * world.num_ranks + 1)):
        taken, places = places[: (size := int(random.integers(1, 4)))], places[size:]
        if not taken:
            break
        ranks = tuple(
            int(rank) for rank in random.permutation(world.num_ranks)[: random.integers(1, world.num_ranks + 1)]
        )
        if busy & set(ranks) or random.random() < 0.2:
            micro_batch, busy = micro_batch + (len(busy) > 0), set()
        busy |= set(ranks)
        images = sum(len(known[place].vision_grids) for place in taken)
        allowed = range(world.num_ranks) if world.encoder == "world" else ranks
        encoders = tuple(allowed[place] for place in random.integers(0, len(allowed), images))
        groups.append(Pack(ranks, tuple(range(len(samples), len(samples) + len(taken))), 1.0, 0.0,
                                micro_batch if world.sync == "micro_batch" else 0,
                                encoders))
        samples += [known[place] for place in taken]
    plan = Plan("random", world.sync, ClusterSpec(world.num_ranks, world.num_ranks, 10_000), tuple(samples),
                tuple(groups), 1.0, 1.0)
    if world.encoder == "world" and (world.sync == "step" or any(group.encoders for group in groups)):
        # kept or not, in one pass or in several
        lockstep = world.sync == "micro_batch"
        plan = replace(plan, vision=VisionPlan("world", seed % 2 == 0, 0 if lockstep else (0, 40, 1)[seed % 3],
                                               (1, 2, 4)[seed % 3] if lockstep else 0))
        if lockstep:
            plan = replace(plan, groups=tuple(replace(group, passes=tuple(
                random.integers(0, plan.vision.num_passes, len(group.encoders)).tolist())) for group in groups))
    if world.splits:
        plan = with_splits(plan, random_splits(plan, world, random))
    plan.validate()
    return plan


def random_splits(plan: Plan, world: World, random: np.random.Generator) -> dict[int, tuple[int, ...]]:
    """Half of the images that can be cut, on any ranks."""
    found = {}
    grids = [grid for group in plan.groups for row in group.sequences for grid in plan.samples[row].vision_grids]
    for image, grid in enumerate(grids if plan.vision.apart else ()):
        most = min(world.num_ranks, grid[0])
        if most > 1 and random.random() < 0.5:
            ranks = random.permutation(world.num_ranks)[:random.integers(2, most + 1)]
            found[image] = tuple(int(rank) for rank in ranks)
    return found


def check(
    reference: Callable[[str], Path], world: World, plans: Sequence[Plan], *settings: str,
    tolerance: float = TOLERANCE, before: Callable[[], Any] = int,
) -> list[dict[str, int]]:
    """Run the plans at equal weights and hold each one's loss and gradients against the reference; the ranks' pool
    counters. Every rank calls `before` first.
    """
    folder = reference(world.preset)
    config = load([f"model.path={folder / 'model'}", "model.preset=", f"planner.sync={world.sync}",
                   f"comm.transport={world.transport}",
                   f"train.activation_checkpointing={str(world.recomputes).lower()}", f"train.freeze=[{world.freeze}]",
                   "comm.timeout_s=60", "run.dir=unused", "train.adam_beta1=0", "train.clip_norm=0", *settings])
    results = run_processes(run_plans, world.num_ranks, world, config, list(plans), folder, before,
                            timeout_s=WATCHDOG_S * (len(plans) + 1))
    assert len(results[0][0]) == len(plans)
    for plan, errors in zip(plans, results[0][0]):
        assert errors["loss"] < tolerance, (plan.groups, errors)
        assert errors["gradient"] < tolerance, (plan.groups, errors)
    pools = [pool for _, pool in results]
    assert all(pool == pools[0] for pool in pools), pools
    return pools


def run_plans(
    rank: int, port: int, world: World, config: Config, plans: list[Plan], reference: Path,
    before: Callable[[], Any] = int,
) -> tuple[list[dict[str, Any]], dict[str, int]]:
    before()
    member = Rank(config, Membership(rank, world.num_ranks, 1, "127.0.0.1", port), CPU)
    payloads = {sample.id: payload for sample, payload in SAMPLES[world.preset]}
    wanted: dict[str, tuple[float, dict[str, torch.Tensor]]] = torch.load(reference / "gradients") if rank == 0 else {}
    without_dropout = reference / "losses without dropout"
    plain = {name: loss for name, (loss, _) in wanted.items()}
    if without_dropout.exists():
        plain = torch.load(without_dropout)
    found = []
    for plan in plans:
        faulthandler.dump_traceback_later(WATCHDOG_S, exit=True)  # a rank that hangs says where, and dies
        rank_plan = plan.rank_plan(STEP, rank)
        own = {name: payload for pack in (*rank_plan.packs, *rank_plan.encoded)
               for name, payload in own_payloads(pack, payloads, rank).items()}
        # leaves nothing behind: the gradients below are the step's alone
        evaluated = member.stepper.evaluate(collated(rank_plan, own, member.adapter))
        # at a learning rate of 0 the weights stay, and with beta1 = 0 the first moment is the gradient
        result = member.stepper.run(collated(rank_plan, own, member.adapter), 0.0)
        gradients = whole(member.engine, "exp_avg")
        faulthandler.cancel_dump_traceback_later()
        if rank == 0:
            loss = sum(plain[sample.id] for sample in plan.samples)
            assert evaluated == (pytest.approx(loss, rel=TOLERANCE), result.num_valid_tokens)
            found.append(compare(plan, payloads, wanted, result.loss_sum, result.num_valid_tokens, gradients))
    pool = member.stepper.transport.counters()
    member.close()
    return found, pool


def compare(
    plan: Plan,
    payloads: dict[str, Payload],
    wanted: dict[str, tuple[float, dict[str, torch.Tensor]]],
    loss_sum: float,
    num_valid_tokens: int,
    gradients: dict[str, torch.Tensor],
) -> dict[str, Any]:
    """Errors of a plan's loss sum and of its gradients of the mean."""
    assert num_valid_tokens == sum(int((payloads[sample.id].labels[1:] != -100).sum()) for sample in plan.samples)
    loss = sum(wanted[sample.id][0] for sample in plan.samples)
    expected = {name: sum(wanted[sample.id][1][name].double()
                          for sample in plan.samples).flatten() / max(1, num_valid_tokens) for name in gradients}
    if not any(sample.vision_grids for sample in plan.samples):  # the encoder keeps its moments: test_unused_parts.py
        gradients = {name: found for name, found in gradients.items() if expected[name].any()}
    errors = relative_errors(gradients, {name: expected[name] for name in gradients})
    worst = max(errors, key=errors.__getitem__, default="")  # none: no sample has images
    return {"loss": abs(loss_sum - loss) / (abs(loss) or 1.0), "gradient": errors.get(worst, 0.0), "worst": worst}
