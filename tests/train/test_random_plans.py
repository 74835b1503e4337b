"""Any plan that is valid ends, with the right gradients: random groups, ring orders, encoders and samples, each under a
watchdog.
"""

from __future__ import annotations

import faulthandler
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.cases import SYNCS, TRANSPORTS
from dhp_ray.comm.device import CPU
from dhp_ray.config import Config, load
from dhp_ray.planner.plan import ClusterSpec, Grid, GroupPlan, Pack, Plan, Sample, VisionPlan
from dhp_ray.runtime.messages import Membership
from dhp_ray.runtime.worker.rank import Rank
from dhp_ray.train.payload import Payload
from dhp_ray.train.step_inputs import collated
from tests.packs import (
    PATCH_DIMS,
    Film,
    make_sample,
    own_payloads,
    plain_copy,
    plain_gradients,
    relative_errors,
    rough_model,
)
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
    "reel": [8, Film(1.5, ((3, 4, 6),)), 20], "masked": [50], "unseen": [10, (1, 4, 4), 10],
}
FIRST_LABEL = {"masked": 50, "unseen": 26}
SAMPLES = {preset: [make_sample(name, parts, FIRST_LABEL.get(name), preset) for name, parts in PARTS.items()]
           for preset in PATCH_DIMS}


@dataclass(frozen=True)
class World:
    """Ranks and settings under which plans run one after the other."""

    num_ranks: int
    sync: str
    transport: str
    recomputes: bool = False
    freeze: str = ""
    sharding: str = "whole"
    preset: str = "tiny"
    encoder: str = "group"

    def __str__(self) -> str:
        frozen = f"-{self.freeze}_frozen" * bool(self.freeze)
        mode = self.sync if self.sharding == "whole" else self.sharding
        family = f"-{self.preset}" * (self.preset != "tiny")
        apart = f"-{self.encoder}" * (self.encoder != "group")
        return f"{self.num_ranks}-{mode}-{self.transport}{'-recomputed' * self.recomputes}{frozen}{family}{apart}"

    @property
    def nodes(self) -> tuple[str, ...]:
        """The node of each rank: two nodes, of unequal size where that can be."""
        return ("a",) * (self.num_ranks // 2) + ("b",) * (self.num_ranks - self.num_ranks // 2)


WORLDS = [World(*values) for values in product((3, 5), SYNCS, TRANSPORTS, (False, True), ("", "vision", "language"))]
WORLDS += [World(*values, "node") for values in product((3, 5), SYNCS[:1], TRANSPORTS, (False, True),
                                                        ("", "vision", "language"))]
FEW = [World(num_ranks, sync, transport, recomputes, freeze) for sync in SYNCS
       for num_ranks, transport, recomputes, freeze in (
    (3, "pool", True, ""), (5, "parent", False, "vision"), (3, "parent", True, "language"), (5, "pool", False, ""))]
FEW += [World(5, "step", "pool", True, "", "node"), World(3, "step", "parent", False, "vision", "node")]
QUICK = [FEW[2], FEW[3], FEW[4], FEW[5], FEW[8]]
FAMILIES = [World(5, sync, "pool", recomputes, freeze, sharding, preset) for preset in PATCH_DIMS if preset != "tiny"
            for sync, recomputes, freeze, sharding in (("step", False, "", "whole"), ("step", True, "language", "node"),
                                                       ("micro_batch", True, "", "whole"))]


APART = [World(num_ranks, "step", transport, recomputes, freeze, sharding, preset, "world")
         for num_ranks, transport, recomputes, freeze, sharding, preset in (
    (5, "pool", False, "", "whole", "tiny"), (3, "parent", True, "", "node", "tiny"),
    (2, "pool", False, "vision", "whole", "tiny"), (3, "pool", False, "language", "whole", "tiny"),
    (1, "pool", False, "", "whole", "tiny"), (5, "parent", False, "", "node", "tiny"),
    (3, "pool", True, "language", "node", "tiny"), (5, "parent", True, "vision", "node", "tiny"),
    (5, "pool", False, "", "whole", "tiny_qwen3_vl"), (3, "parent", True, "", "node", "tiny_qwen3_vl"),
    (5, "pool", True, "", "whole", "tiny_internvl"), (3, "pool", False, "language", "node", "tiny_internvl"))]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of each family with rough weights, and the gradients of every sample by plain transformers."""
    folder = tmp_path_factory.mktemp("reference")
    for preset, samples in SAMPLES.items():
        adapter = rough_model(preset=preset)
        plain = plain_copy(adapter)
        adapter.save(folder / preset / "model",
                     {name: parameter.detach() for name, parameter in adapter.module.named_parameters()})
        torch.save({sample.id: plain_gradients(plain, [payload]) for sample, payload in samples},
                   folder / preset / "gradients")
    return folder


@pytest.mark.parametrize("world", [
    world if world in QUICK else pytest.param(world, marks=pytest.mark.slow) for world in FEW], ids=str)
def test_random_plans(reference: Path, world: World) -> None:
    check(reference, world, [random_plan(seed, world) for seed in seeds(world, 24 // len(FEW))])


@pytest.mark.parametrize("world", [  # every second one, so that each way is seen in one of the families
    world if number % 2 == 0 else pytest.param(world, marks=pytest.mark.slow) for number, world in enumerate(FAMILIES)],
    ids=str)
def test_random_plans_of_other_families(reference: Path, world: World) -> None:
    first = 10_000 + 100 * FAMILIES.index(world)
    check(reference, world, [random_plan(seed, world) for seed in range(first, first + 3)])


@pytest.mark.parametrize("world", [
    world if number in (1, 8) else pytest.param(world, marks=pytest.mark.slow)
    for number, world in enumerate(APART)], ids=str)
def test_random_plans_whose_images_any_rank_encodes(reference: Path, world: World) -> None:
    first = 20_000 + 100 * APART.index(world)
    plans = [random_plan(seed, world) for seed in range(first, first + 6)]
    assert {plan.vision.keeps for plan in plans} == {True, False}
    check(reference, world, plans)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_two_hundred_random_plans_of_each_mode(reference: Path, world: World) -> None:
    alike = [other for other in WORLDS if (other.sync, other.sharding) == (world.sync, world.sharding)]
    check(reference, world, [random_plan(seed, world) for seed in seeds(world, math.ceil(200 / len(alike)))])


@pytest.mark.parametrize("sync", [SYNCS[0], pytest.param(SYNCS[1], marks=pytest.mark.slow)])
def test_more_groups_than_the_pool_holds(reference: Path, sync: str) -> None:
    world = World(5, sync, "pool")
    plans = [random_plan(seed, world) for seed in range(1000, 1005)]
    assert max(len(plan.process_groups()) for plan in plans) > 2
    pools = check(reference, world, plans, "comm.pool_groups=2")
    assert pools[0]["evictions"] > 0
    assert pools[0]["overflows"] > 0


@pytest.mark.parametrize("transport", [TRANSPORTS[0], pytest.param(TRANSPORTS[1], marks=pytest.mark.slow)])
@pytest.mark.parametrize("sync", [pytest.param(SYNCS[0], marks=pytest.mark.slow), SYNCS[1]])
def test_a_video_in_packs_of_every_degree(reference: Path, sync: str, transport: str) -> None:
    """Its pieces in time are encoded by different ranks; the ranks beside its pack have another video, text, or
    nothing.
    """
    check(reference, World(5, sync, transport), [plan_of([
        (tuple((rank + 1) % 5 for rank in range(degree)), ("film", "text"), tuple(piece % degree for piece in range(4)),
         0),
        *([(tuple((rank + 1) % 5 for rank in range(degree, 5)), ("reel",), (0,), 0)] if degree < 5 else []),
        ((0,), ("image", "word"), (0,), 1)], sync) for degree in (1, 2, 3, 4, 5)])


def plan_of(
    groups: Sequence[tuple[tuple[int, ...], tuple[str, ...], tuple[int, ...], int]], sync: str, num_ranks: int = 5
) -> Plan:
    """A plan of groups: ranks, names of samples, their images' encoders by place in these ranks, micro-batch."""
    named = {sample.id: sample for sample, _ in SAMPLES["tiny"]}
    samples = [named[name] for _, names, _, _ in groups for name in names]
    places = {sample.id: place for place, sample in enumerate(samples)}
    planned = tuple(GroupPlan(ranks, Pack(tuple(places[name] for name in names)), 1.0, 0.0,
                              micro_batch if sync == "micro_batch" else 0, tuple(ranks[member] for member in encoders))
                    for ranks, names, encoders, micro_batch in groups)
    plan = Plan("listed", sync, ClusterSpec(num_ranks, num_ranks, 10_000), tuple(samples), planned, 1.0, 1.0)
    plan.validate()
    return plan


def seeds(world: World, count: int) -> range:
    first = 100 * WORLDS.index(world)
    return range(first, first + count)


def random_plan(seed: int, world: World) -> Plan:
    """Groups of any ranks in any ring order, packs of one to three samples, each sample at most once, any encoders."""
    random, known = np.random.default_rng(seed), [sample for sample, _ in SAMPLES[world.preset]]
    places = [int(place) for place in random.permutation(len(known))]
    if seed % 5 == 0:  # some batches have no image at all
        places = [place for place in places if not known[place].vision_grids]
    samples: list[Sample] = []
    groups: list[GroupPlan] = []
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
        groups.append(GroupPlan(ranks, Pack(tuple(range(len(samples), len(samples) + len(taken)))), 1.0, 0.0,
                                micro_batch if world.sync == "micro_batch" else 0,
                                encoders))
        samples += [known[place] for place in taken]
    plan = Plan("random", world.sync, ClusterSpec(world.num_ranks, world.num_ranks, 10_000), tuple(samples),
                tuple(groups), 1.0, 1.0)
    if world.encoder == "world":  # kept or not, in one pass or in several
        plan = replace(plan, vision=VisionPlan("world", seed % 2 == 0, (0, 40, 1)[seed % 3]))
    plan.validate()
    return plan


def check(reference: Path, world: World, plans: Sequence[Plan], *settings: str) -> list[dict[str, int]]:
    """Run the plans at equal weights and hold each one's loss and gradients against the reference; the ranks' pool
    counters.
    """
    config = load([f"model.path={reference / world.preset / 'model'}", "model.preset=", f"planner.sync={world.sync}",
                   f"comm.transport={world.transport}",
                   f"train.activation_checkpointing={str(world.recomputes).lower()}", f"train.freeze=[{world.freeze}]",
                   f"train.sharding={world.sharding}",
                   "comm.timeout_s=60", "run.dir=unused",
                   "train.adam_beta1=0", "train.clip_norm=0", *settings])
    results = run_processes(run_plans, world.num_ranks, world, config, list(plans), reference / world.preset,
                            timeout_s=WATCHDOG_S * (len(plans) + 1))
    assert len(results[0][0]) == len(plans)
    for plan, errors in zip(plans, results[0][0]):
        assert errors["loss"] < TOLERANCE, (plan.groups, errors)
        assert errors["gradient"] < TOLERANCE, (plan.groups, errors)
    pools = [pool for _, pool in results]
    assert all(pool == pools[0] for pool in pools), pools
    return pools


def run_plans(
    rank: int, port: int, world: World, config: Config, plans: list[Plan], reference: Path
) -> tuple[list[dict[str, Any]], dict[str, int]]:
    member = Rank(config, Membership(rank, world.num_ranks, 1, "127.0.0.1", port, nodes=world.nodes), CPU)
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
    errors = relative_errors(gradients, expected)
    worst = max(errors, key=errors.__getitem__)
    return {"loss": abs(loss_sum - loss) / (abs(loss) or 1.0), "gradient": errors[worst], "worst": worst}
