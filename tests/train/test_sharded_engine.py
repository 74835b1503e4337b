"""The sharded engine of `sync=micro_batch`: loss, gradients, parameters of a whole model against plain transformers."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from dhp_ray.comm.device import choose
from dhp_ray.comm.expert_group import open_expert_group
from dhp_ray.comm.progress import Progress
from dhp_ray.comm.transport import Transport
from dhp_ray.model.language_model import LanguageModel
from dhp_ray.planner.plan.cluster import ClusterSpec
from dhp_ray.planner.plan.types import Pack, Plan, Sample
from dhp_ray.train.collate import Payload
from dhp_ray.train.rank_step import MicroBatchStep
from dhp_ray.train.sharded_engine import ShardedEngine
from dhp_ray.train.state.optimizer import OptimizerSettings
from dhp_ray.train.step_inputs import collated
from tests.engine_values import full_gradients, full_parameters
from tests.packs import make_sample, own_payloads, plain_copy, plain_gradients, relative_errors, rough_model
from tests.ranks import run_ranks

TOLERANCE = 1e-5
CPU = torch.device("cpu")
Groups = list[tuple[list[int], list[list[Any]], list[int] | None]]
"""Of one micro-batch: their ranks, their samples' parts (`make_sample`), and their encoders (None: members in turn)."""


def settings(adapter: LanguageModel, clip_norm: float = 0.0) -> OptimizerSettings:
    return OptimizerSettings(lambda name: 5e-4 if adapter.is_vision(name) else 1e-3, adapter.decays, weight_decay=0.1,
                             betas=(0.9, 0.95), eps=1e-6, clip_norm=clip_norm, is_vision=adapter.is_vision)


def make_plan(
    num_ranks: int, layout: list[Groups], masked: tuple[str, ...] = (), silent: tuple[str, ...] = (),
    sync: str = "micro_batch",
) -> tuple[Plan, dict[str, Payload]]:
    """Samples are named by pack and place: 0.0, 0.1, 1.0 ...; those in `masked` are placeholders, those in `silent`
    have no label that counts.
    """
    samples: list[Sample] = []
    groups: list[Pack] = []
    payloads: dict[str, Payload] = {}
    for micro_batch, packs in enumerate(layout):
        for ranks, parts, encoders in packs:
            names = [f"{len(groups)}.{row}" for row in range(len(parts))]
            made = [make_sample(name, part, 10**6 if name in silent else None) for name, part in zip(names, parts)]
            payloads |= {sample.id: replace(payload, masked=sample.id in masked) for sample, payload in made}
            images = sum(len(sample.vision_grids) for sample, _ in made)
            members = [image % len(ranks) for image in range(images)] if encoders is None else encoders
            rows = range(len(samples), len(samples) + len(made))
            samples += [sample for sample, _ in made]
            number = micro_batch if sync == "micro_batch" else 0
            groups.append(Pack(tuple(ranks), tuple(rows), 1.0, 0.0, number,
                                    tuple(ranks[member] for member in members)))
    plan = Plan("test", sync, ClusterSpec(num_ranks, num_ranks, 4096), tuple(samples), tuple(groups), 1.0, 1.0)
    plan.validate()
    return plan, payloads


def payloads_of(packs: tuple[Pack, ...], payloads: dict[str, Payload], rank: int) -> dict[str, Payload]:
    return {name: payload for pack in packs for name, payload in own_payloads(pack, payloads, rank).items()
            if name in {s.id for s in pack.samples}}


def make_step(adapter: LanguageModel, rank: int, num_ranks: int, transport_name: str = "pool",
              precision: str = "fp32", clip_norm: float = 0.0, sharing: int = 1) -> MicroBatchStep:
    """`sharing`: so many ranks share experts."""
    assert dist.group.WORLD is not None
    experts = (open_expert_group(sharing, rank, num_ranks, "gloo", timedelta(seconds=30), Progress())
               if sharing > 1 else None)
    engine = ShardedEngine(adapter, settings(adapter, clip_norm), dist.group.WORLD, rank, CPU, precision,
                           expert_group=experts)
    transport = Transport(transport_name, rank, num_ranks, choose("cpu"), 16, timedelta(seconds=30))
    return MicroBatchStep(adapter, engine, transport, dist.group.WORLD, CPU)


def train(
    rank: int, num_ranks: int, transport: str, plan: Plan, payloads: dict[str, Payload], freeze: list[str],
    checkpointing: bool, tie: bool, num_steps: int, clip_norm: float,
) -> dict[str, float]:
    """Steps with `sync=micro_batch`; on rank 0 the errors, each the worst of all steps, against plain transformers with
    plain AdamW.
    """
    adapter = rough_model(tie_word_embeddings=tie)
    adapter.freeze(freeze)
    frozen = {name for name, parameter in adapter.module.named_parameters() if not parameter.requires_grad}
    rule = settings(adapter)
    if rank == 0:
        plain = plain_copy(adapter)
        trained = {name: parameter for name, parameter in plain.named_parameters() if name not in frozen}
        groups = [{"params": [parameter], "lr": rule.learning_rate_of(name),
                   "weight_decay": rule.weight_decay if rule.decays(name) else 0.0}
                  for name, parameter in trained.items()]
        optimizer = torch.optim.AdamW(groups, betas=rule.betas, eps=rule.eps)
    if checkpointing:
        adapter.set_activation_checkpointing()
    stepper = make_step(adapter, rank, num_ranks, transport, clip_norm=clip_norm)
    rank_plan = plan.rank_plan(1, rank)
    counted = [payload for payload in payloads.values() if not payload.masked]
    uses_vision = any(len(payload.grids) for payload in counted)
    num_valid = sum(int((payload.labels[1:] != -100).sum()) for payload in counted)
    worst: dict[str, float] = {"loss": 0.0, "gradient": 0.0, "norm": 0.0}
    for _ in range(num_steps):
        result = stepper.run(collated(rank_plan, payloads_of(rank_plan.packs, payloads, rank), stepper.adapter), 1.0)
        found = full_gradients(stepper.engine)
        assert result.num_valid_tokens == num_valid
        assert [time.index for time in result.pack_times] == [pack.index for pack in rank_plan.packs]
        assert num_ranks == 1 or all(0.0 < time.blocked_s < time.end_s - time.start_s for time in result.pack_times)
        if rank != 0:
            continue
        expected, wanted = plain_gradients(plain, counted)
        worst["loss"] = max(worst["loss"], abs(result.loss_sum - expected) / (expected or 1.0))
        errors = relative_errors(found, {name: wanted[name] for name in trained})
        worst["gradient"] = max(worst["gradient"], *errors.values())
        for name, parameter in trained.items():
            parameter.grad = None if rule.is_vision(name) and not uses_vision else wanted[name] / max(1, num_valid)
        norm = float(torch.nn.utils.clip_grad_norm_(trained.values(), clip_norm or float("inf")))
        worst["norm"] = max(worst["norm"], abs(result.gradient_norm - norm) / (norm or 1.0))
        if num_valid:
            optimizer.step()
    after = full_parameters(stepper.engine)
    stepper.transport.close()
    if rank == 0:
        trained_plainly = {name: parameter.detach() for name, parameter in plain.named_parameters()}
        worst["parameter"] = max(relative_errors(after, trained_plainly).values())
        assert all(torch.equal(after[name], trained_plainly[name]) for name in frozen)
    return worst


def compare(
    num_ranks: int, layout: list[Groups], *, transport: str = "pool", freeze: list[str] | None = None,
    checkpointing: bool = False, tie: bool = True, masked: tuple[str, ...] = (), silent: tuple[str, ...] = (),
    num_steps: int = 1, clip_norm: float = 0.0,
) -> dict[str, float]:
    plan, payloads = make_plan(num_ranks, layout, masked, silent)
    errors: dict[str, float] = run_ranks(train, num_ranks, num_ranks, transport, plan, payloads, freeze or [],
                                         checkpointing, tie, num_steps, clip_norm)[0]
    assert errors["loss"] < TOLERANCE, errors
    # weights drift apart from rounding alone
    assert errors["gradient"] < (TOLERANCE if num_steps == 1 else 20 * TOLERANCE), errors
    assert errors["norm"] < TOLERANCE, errors
    assert errors["parameter"] < 1e-4, errors
    return errors


MIXED: list[Groups] = [
    [([0, 1], [[50, (1, 4, 8), 70], [61]], None), ([2], [[40], [9]], None)],  # text beside images
    [([2, 0, 1], [[70], [25]], None)],  # text alone
    [([1], [[12, (1, 4, 8), 13], [20]], None)],  # two ranks without a pack
    [([0], [[33]], None), ([2, 1], [[20, (1, 8, 8), 54, (1, 4, 4), 6]], [1, 1])],  # one member encodes all
]


@pytest.mark.parametrize("transport", [pytest.param("pool", marks=pytest.mark.slow), "parent"])
def test_mixed_degrees_on_three_ranks(transport: str) -> None:
    """Gradients are clipped; two steps without that: below."""
    compare(3, MIXED, transport=transport, num_steps=2, tie=transport == "pool", clip_norm=0.05)


@pytest.mark.parametrize(("freeze", "checkpointing"), [
    (["language"], True),  # a frozen encoder in make test: test_random_plans.py
    *(pytest.param(*case, marks=pytest.mark.slow)
      for case in ((["vision"], False), (["vision"], True), (["language"], False)))])
def test_a_frozen_part(freeze: list[str], checkpointing: bool) -> None:
    compare(3, MIXED, freeze=freeze, checkpointing=checkpointing, tie=False)


@pytest.mark.slow  # with a frozen part above, and with members without a token below
def test_activation_checkpointing() -> None:
    compare(3, MIXED, checkpointing=True)


FIVE: list[Groups] = [
    [([0, 1, 2, 3, 4], [[3]], None)],  # members without a token
    [([4, 3, 2, 1], [[(1, 2, 2), 1]], [3])],
    [([0, 2], [[60, (1, 4, 8), 20], [5]], [1]), ([3, 1], [[33]], None)],
    [([4, 0, 1, 2, 3], [[120, (1, 8, 8), 90]], None)],
]


@pytest.mark.slow
@pytest.mark.parametrize(("transport", "checkpointing", "freeze"),
                         [("parent", True, []), ("pool", False, []), ("pool", True, ["language"])])
def test_five_ranks_and_members_without_a_token(transport: str, checkpointing: bool, freeze: list[str]) -> None:
    compare(5, FIVE, transport=transport, checkpointing=checkpointing, freeze=freeze)


def test_members_without_a_token() -> None:
    """Of three ranks; two of them recompute images that the third one has in its pack."""
    compare(3, [[([0, 1, 2], [[2]], None)], [([2, 1], [[(1, 2, 2), 1]], [1])],
                [([2, 0, 1], [[60, (1, 8, 8), 20]], None)]], checkpointing=True, tie=False)


def test_one_rank() -> None:
    compare(1, [[([0], [[20, (1, 4, 8), 30], [9]], None)], [([0], [[33]], None)]], num_steps=2, tie=False)


@pytest.mark.slow  # in make test: test_unused_parts.py
@pytest.mark.parametrize("freeze", [[], ["vision"]])
def test_a_batch_of_text_alone(freeze: list[str]) -> None:
    compare(3, [[([0, 1], [[50], [20]], None)], [([2, 0, 1], [[70]], None)]], freeze=freeze, num_steps=2)


def test_a_batch_that_trains_nothing_of_what_is_not_frozen() -> None:
    errors = compare(2, [[([0, 1], [[50]], None)], [([1], [[20]], None)]], freeze=["language"], checkpointing=True,
                     num_steps=2)
    assert errors["gradient"] == 0.0


def test_ranks_and_batches_without_a_label_that_counts() -> None:
    compare(3, [[([0, 1], [[20, (1, 4, 8), 30]], None), ([2], [[40]], None)], [([1, 2], [[8, (1, 4, 4), 8]], None)]],
            silent=("1.0", "2.0"))
    errors = compare(2, [[([0, 1], [[20, (1, 4, 8), 30]], None)]], silent=("0.0",))
    assert errors["gradient"] == errors["loss"] == errors["parameter"] == 0.0


def test_placeholders_also_where_they_hold_the_only_images() -> None:
    compare(3, [[([0, 1], [[20, (1, 4, 8), 30], [9, 40]], None), ([2], [[12]], None)],
                [([2, 0], [[(1, 4, 4), 9]], [1]), ([1], [[(1, 4, 4), 9]], [0])]],
            masked=("0.0", "2.0"), freeze=["language"])


def skip_and_go_on(rank: int, plan: Plan, payloads: dict[str, Payload]) -> list[Any]:
    stepper = make_step(rough_model(), rank, 3)
    rank_plan = plan.rank_plan(1, rank)
    own = payloads_of(rank_plan.packs, payloads, rank)
    bad = {}
    for name, payload in own.items():
        pixels = [None if patches is None else patches * float("nan") for patches in payload.pixels]
        bad[name] = replace(payload, pixels=pixels)
    before = full_parameters(stepper.engine)
    skipped = stepper.run(collated(rank_plan, bad, stepper.adapter), 1.0)
    after, good = full_parameters(stepper.engine), collated(rank_plan, own, stepper.adapter)
    applied = stepper.run(good, 1.0)
    again = make_step(rough_model(), rank, 3).run(good, 1.0)
    return [skipped.applied, skipped.state_version, all(torch.equal(before[name], after[name]) for name in before),
            applied.applied, applied.state_version, applied.loss_sum == again.loss_sum,
            applied.gradient_norm == again.gradient_norm]


def test_a_gradient_that_is_not_finite_skips_the_update_on_all_ranks() -> None:
    plan, payloads = make_plan(3, MIXED[:1])
    assert run_ranks(skip_and_go_on, 3, plan, payloads) == [[False, 0, True, True, 1, True, True]] * 3


def evaluate_and_train(rank: int, plan: Plan, payloads: dict[str, Payload]) -> tuple[float, int, bool, float, float]:
    stepper = make_step(rough_model(tie_word_embeddings=False), rank, 3)
    rank_plan = plan.rank_plan(1, rank)
    inputs = collated(rank_plan, payloads_of(rank_plan.packs, payloads, rank), stepper.adapter)
    loss_sum, num_valid_tokens = stepper.evaluate(inputs)
    untouched = all(isinstance(parameter, DTensor) and parameter.grad is None
                    for parameter in stepper.adapter.module.parameters())
    first = stepper.run(inputs, 1.0)
    after, _ = stepper.evaluate(inputs)
    second = stepper.run(inputs, 1.0)
    error, difference = abs(loss_sum / first.loss_sum - 1), num_valid_tokens - first.num_valid_tokens
    return error, difference, untouched, after, second.loss_sum


def test_evaluation_between_steps() -> None:
    plan, payloads = make_plan(3, MIXED[1:3])  # text alone, and an image beside ranks without a pack
    for error, difference, untouched, evaluated, trained in run_ranks(evaluate_and_train, 3, plan, payloads):
        assert error < TOLERANCE
        assert difference == 0
        assert untouched
        assert evaluated == pytest.approx(trained, rel=TOLERANCE)


def losses_in_both(rank: int, plan: Plan, payloads: dict[str, Payload]) -> list[list[float]]:
    """Of two steps in bf16, and of two in fp32."""
    # its bf16 products take AMX instructions, which some virtual machines refuse
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    found = []
    for precision in ("bf16", "fp32"):
        stepper = make_step(rough_model(), rank, 3, precision=precision)
        rank_plan = plan.rank_plan(1, rank)
        inputs = collated(rank_plan, payloads_of(rank_plan.packs, payloads, rank), stepper.adapter)
        results = [stepper.run(inputs, 1.0) for _ in range(2)]
        assert all(parameter.dtype == torch.float32 and parameter.grad.dtype == torch.float32
                   for parameter in stepper.engine.parameters.values())
        found.append([result.loss_sum / result.num_valid_tokens for result in results])
    return found


@pytest.mark.parametrize("most", [1, pytest.param(len(MIXED), marks=pytest.mark.slow)])
def test_bf16_stays_near_fp32(most: int) -> None:
    plan, payloads = make_plan(3, MIXED[:most])
    narrow, wide = run_ranks(losses_in_both, 3, plan, payloads)[0]
    assert narrow == pytest.approx(wide, rel=2e-2)
    assert narrow != wide
    assert wide[1] < wide[0]
