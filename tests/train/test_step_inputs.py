from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dhp_ray.comm.pack_communicator import PackCommunicator
from dhp_ray.planner.plan.types import RankPlan
from dhp_ray.train.collate import PackInputs, Payload, placeholder
from dhp_ray.train.pack import pack_loss
from dhp_ray.train.step_inputs import StepInputs, collated, copied_ahead, packs_of
from tests.packs import Film, make_pack, make_sample, own_payloads, rough_model
from tests.ranks import run_ranks
from tests.train.test_sharded_engine import make_plan, make_step, payloads_of

MADE = [make_sample("a", [20, (1, 4, 8), 30, (1, 8, 6), 7]), make_sample("b", [33]),
        make_sample("c", [5, Film(0.5, ((2, 4, 4), (1, 4, 4))), 30]), make_sample("d", [9, (1, 4, 4), 11])]
SAMPLES = [sample for sample, _ in MADE]
PLAN = RankPlan(1, 0, (), (make_pack(0, [0, 1], SAMPLES[:2]), make_pack(1, [0], SAMPLES[2:])))


def payloads() -> dict[str, Payload]:
    made = {sample.id: payload for sample, payload in MADE}
    return {name: payload for pack in PLAN.packs for name, payload in own_payloads(pack, made, 0).items()}


def tensors(inputs: PackInputs) -> list[Tensor]:
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    inputs.map(note)
    return found


def assert_equal(found: PackInputs, expected: PackInputs) -> None:
    for ours, theirs in zip(tensors(found), tensors(expected), strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)
    for name in ("layout", "member", "grids", "receive_counts", "num_images"):
        assert getattr(found, name) == getattr(expected, name), name


def test_every_tensor_of_the_inputs_is_mapped() -> None:
    """model/tensor_fields.py: a tensor that `map` forgets would stay behind when the others are copied to a device."""
    inputs = collated(PLAN, payloads(), rough_model()).inputs[0].map(lambda tensor: tensor.to("meta"))

    def of(value: Any) -> Iterator[Tensor]:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            for one in value:
                yield from of(one)
        elif isinstance(value, dict):
            yield from of(list(value.values()))
        elif hasattr(value, "__dataclass_fields__"):
            for one in fields(value):
                yield from of(getattr(value, one.name))

    assert all(tensor.device.type == "meta" for tensor in of(inputs))
    assert len(list(of(inputs))) > 15


def test_patches_lie_in_the_inputs_alone() -> None:
    inputs = collated(PLAN, payloads(), rough_model())
    for pack, made in zip(PLAN.packs, inputs.inputs, strict=True):
        held = [pixels for sample in pack.samples for pixels in inputs.payloads[sample.id].pixels if pixels is not None]
        assert all(isinstance(pixels, Tensor) for pixels in held)
        assert {pixels.untyped_storage().data_ptr() for pixels in held} == {made.pixels.untyped_storage().data_ptr()}
        assert sum(len(pixels) for pixels in held) == len(made.pixels)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_sample_that_becomes_a_placeholder_changes_its_own_pack(precision: str) -> None:
    """To what it had been, had the rank known from the start; also twice."""
    adapter = rough_model()
    inputs = collated(PLAN, payloads(), adapter, precision)
    before = list(inputs.inputs)
    for bad in (("c",), ("c", "d", "of another rank")):
        inputs.mask(bad, adapter)
        own = payloads()
        own |= {name: replace(own[name], masked=True) for name in bad if name in own}
        assert inputs.inputs[0] is before[0]
        assert_equal(inputs.inputs[1], collated(PLAN, own, adapter, precision).inputs[1])
    assert len(inputs.inputs[1].pixels) == 0
    after = inputs.inputs[1]
    inputs.mask(("c",), adapter)
    assert inputs.inputs[1] is after, "nothing is made again for what is a placeholder already"


def test_a_sample_that_failed_here_is_a_placeholder_from_the_start() -> None:
    adapter, own = rough_model(), payloads()
    known = collated(PLAN, own | {"a": placeholder(SAMPLES[0])}, adapter)
    told = collated(PLAN, own, adapter)
    told.mask(["a"], adapter)
    assert_equal(told.inputs[0], known.inputs[0])


def test_bf16_patches_are_what_the_encoder_makes_of_fp32_ones() -> None:
    """Loss and gradients, to the last bit: the encoder rounds its input to its own type."""
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    try:
        found = []
        for precision in ("fp32", "bf16"):
            adapter = rough_model()
            for parameter in adapter.module.parameters():
                parameter.data = parameter.data.bfloat16()
            inputs = collated(replace(PLAN, packs=PLAN.packs[1:]), payloads(), adapter, precision).inputs[0]
            assert inputs.pixels.dtype == (torch.bfloat16 if precision == "bf16" else torch.float32)
            loss = pack_loss(adapter, inputs, PackCommunicator((0,), 0, None))
            loss.backward()  # type: ignore[no-untyped-call]
            found.append([loss.detach(), *(parameter.grad for parameter in adapter.module.parameters())])
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))
    finally:
        torch.backends.mkldnn.enabled = True  # type: ignore[assignment]


def losses_in_bf16(rank: int, plan: Any, made: dict[str, Payload]) -> list[list[tuple[float, float | None]]]:
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    found = []
    for precision in ("fp32", "bf16"):
        stepper = make_step(rough_model(), rank, 2, precision="bf16")
        rank_plan = plan.rank_plan(1, rank)
        inputs = collated(rank_plan, payloads_of(rank_plan.packs, made, rank), stepper.adapter, precision)
        results = [stepper.run(inputs, 1.0) for _ in range(2)]
        found.append([(result.loss_sum, result.gradient_norm) for result in results])
    return found


def test_bf16_patches_change_nothing_where_parameters_are_sharded() -> None:
    """FSDP's parameters are fp32 until a unit is gathered; an idle rank's tiny image is bf16 as well."""
    plan, made = make_plan(2, [[([0, 1], [[20, (1, 4, 8), 30]], None)], [([0], [[9, (1, 4, 4)]], None)]])
    for of_fp32, of_bf16 in run_ranks(losses_in_bf16, 2, plan, made):
        assert of_fp32 == of_bf16


@pytest.mark.parametrize("sync", ["step", "micro_batch"])
def test_packs_are_those_of_the_plan_and_idle_ones_between_them(sync: str) -> None:
    plan, made = make_plan(2, [[([0, 1], [[20, (1, 4, 8), 30]], None)], [([0], [[9, (1, 4, 4)]], None)],
                               [([1], [[12]], None)]], sync=sync)
    for rank in (0, 1):
        rank_plan = plan.rank_plan(1, rank)
        assert [pack.index for pack in packs_of(rank_plan)] == {
            "step": [[0, 1], [0, 2]], "micro_batch": [[0, 1, -1], [0, -1, 2]]}[sync][rank]
        inputs = collated(rank_plan, payloads_of(rank_plan.packs, made, rank), rough_model())
        assert [pack.index for pack in inputs.packs] == [pack.index for pack in packs_of(rank_plan)]
        if sync == "micro_batch":
            assert [bool(made.grids) for made in inputs.inputs] == [True, True, False]
            idle = inputs.inputs[1 + (rank == 0)]
            assert (len(idle.token_ids), idle.num_valid_tokens) == (1, 0)


def test_a_pack_without_its_payload_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^sample b: no payload for pack 0$"):
        StepInputs(PLAN).add(PLAN.packs[0], {"a": payloads()["a"]}, rough_model())


def test_what_is_copied_ahead_is_what_was_made_and_what_is_done_with_is_let_go() -> None:
    """By streams of the CPU, which do nothing: `test_a_device_holds...` has those of a device."""
    inputs = collated(PLAN, payloads(), rough_model()).inputs * 2
    given: list[PackInputs] = []
    done: list[weakref.ref[Tensor]] = []
    feed = copied_ahead(inputs, torch.device("cpu"))
    for made in inputs:
        given.append(next(feed))
        assert all(tensor() is None for tensor in done)
        assert_equal(given[0], made)
        assert not {tensor.data_ptr() for tensor in tensors(given[0]) if tensor.numel()} & {
            tensor.data_ptr() for tensor in tensors(made)}
        done = [weakref.ref(tensor) for tensor in tensors(given.pop())]
    feed.close()
    assert list(copied_ahead([], torch.device("cpu"))) == []


@pytest.mark.gpu
def test_a_device_holds_the_inputs_of_one_pack_ahead() -> None:
    """What is given is what was made, however far the host is ahead; memory is that of two packs."""
    device, adapter = torch.device("cuda", 0), rough_model()
    sample, payload = make_sample("large", [9, (1, 256, 256), 11])
    plan = RankPlan(1, 0, (), tuple(make_pack(number, [0], [sample]) for number in range(8)))
    inputs = collated(plan, {"large": payload}, adapter, "bf16", pinned=True).inputs
    assert all(tensor.is_pinned() for tensor in tensors(inputs[0]) if tensor.numel())
    for number, one in enumerate(inputs):
        one.pixels.fill_(number)
    one_pack = inputs[0].pixels.nbytes
    work = torch.randn(4096, 4096, device=device)
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        sums = []
        feed = copied_ahead(inputs, device)
        for _ in inputs:
            given = next(feed)
            for _ in range(20):
                work = work @ work / 64
            sums.append(given.pixels.float().amin() + given.pixels.float().amax())
            del given
        feed.close()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [float(total) for total in sums] == [2.0 * number for number in range(8)]
    # two packs, and a pack in fp32 for its sum
    assert torch.cuda.max_memory_allocated(device) - before < 4.5 * one_pack + 2 * work.nbytes
