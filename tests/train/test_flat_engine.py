import math

import pytest
import torch
from torch import nn

from dhp_ray.train.engine import Update
from dhp_ray.train.flat_engine import FlatEngine
from dhp_ray.train.state.optimizer import OptimizerSettings
from tests.engine_values import full_parameters
from tests.train.networks import (
    Network,
    error,
    loss_sum,
    make_engine,
    plain_training,
    run_tensors,
    settings,
    train_step,
    whole,
)

TOLERANCE = 1e-6


def train(rank, world_size, steps, bucket_bytes=400, precision="fp32", clip_norm=0.0, tied=True, frozen=()):
    network = Network(tied)
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(not name.startswith(tuple(frozen)) if frozen else True)
    engine = make_engine(network, rank, world_size, bucket_bytes, precision, clip_norm=clip_norm)
    updates = [train_step(engine, network, step, rank, world_size) for step in range(steps)]
    states = {kind: {name: tensor.clone() for name, tensor in whole(engine, kind).items()}
              for kind in ("exp_avg", "exp_avg_sq")}
    resident = {name: parameter.detach().clone() for name, parameter in network.named_parameters()}
    return full_parameters(engine), resident, states, updates, engine.state_version


@pytest.mark.parametrize("world_size", [1, 3, *(pytest.param(size, marks=pytest.mark.slow) for size in (2, 5))])
def test_twenty_steps_equal_adamw_on_summed_gradients(world_size):
    expected, states, norms = plain_training(Network(), 20)
    results = run_tensors(train, world_size, world_size, 20, 1600)
    found, _, moments, updates, version = results[0]
    assert version == 20
    assert [update.gradient_norm for update in updates] == pytest.approx(norms, rel=TOLERANCE)
    assert found.keys() == expected.keys()
    assert max(error(found[name], expected[name]) for name in expected) < TOLERANCE
    for kind in ("exp_avg", "exp_avg_sq"):
        assert max(error(moments[kind][name], states[name][kind].flatten()) for name in states) < TOLERANCE * 5
    for other in results[1:]:
        assert other[0] == {}
        assert other[3] == updates, "norm and decision are equal on all ranks"
        same = all(torch.equal(other[1][name], results[0][1][name]) for name in expected)
        assert same, "all ranks hold the same parameters"
    assert all(torch.equal(results[0][1][name], found[name]) for name in expected)


@pytest.mark.parametrize("bucket_bytes", [4, 500, 10**9])
def test_buckets_of_any_size_give_the_same(bucket_bytes):
    expected, _, norms = plain_training(Network(), 3, clip_norm=0.05)
    found, _, _, updates, _ = run_tensors(train, 3, 3, 3, bucket_bytes, "fp32", 0.05)[0]
    assert [update.gradient_norm for update in updates] == pytest.approx(norms, rel=TOLERANCE)
    assert max(error(found[name], expected[name]) for name in expected) < TOLERANCE


def test_clipping_bounds_the_norm_of_the_mean_gradient():
    expected, _, norms = plain_training(Network(), 4, clip_norm=0.05)
    unclipped, _, _ = plain_training(Network(), 4)
    found, _, _, updates, _ = run_tensors(train, 2, 2, 4, 1600, "fp32", 0.05)[0]
    assert min(norms) > 0.05, "clipping is active in every step"
    assert [update.gradient_norm for update in updates] == pytest.approx(norms, rel=TOLERANCE)
    assert max(error(found[name], expected[name]) for name in expected) < TOLERANCE
    assert max(error(found[name], unclipped[name]) for name in expected) > 1e-4


@pytest.mark.parametrize("world_size", [1, 3])
def test_frozen_parameters_stay_and_take_no_gradient_memory(world_size):
    reference = Network()
    for parameter in reference.visual.parameters():
        parameter.requires_grad_(False)
    expected, _, norms = plain_training(reference, 3)
    found, _, _, updates, _ = run_tensors(train, world_size, world_size, 3, 1600, "fp32", 0.0, True, ("visual",))[0]
    assert [update.gradient_norm for update in updates] == pytest.approx(norms, rel=TOLERANCE)
    assert found.keys() == expected.keys(), "frozen ones are saved too"
    assert torch.equal(found["visual.weight"], Network().visual.weight)
    assert max(error(found[name], expected[name]) for name in expected) < TOLERANCE
    network = Network()
    network.visual.requires_grad_(False)
    engine = make_engine(network, 0, 1)
    assert "visual.weight" not in engine.shapes
    assert network.visual.weight.grad is None


def test_frozen_parameters_are_of_the_computing_type():
    network = Network()
    network.visual.requires_grad_(False)
    engine = make_engine(network, 0, 1, precision="bf16")
    assert network.visual.weight.dtype == torch.bfloat16
    assert torch.equal(full_parameters(engine)["visual.weight"], Network().visual.weight.bfloat16().float())


def test_an_untied_head_is_a_parameter_of_its_own():
    expected, _, _ = plain_training(Network(tied=False), 3)
    found = run_tensors(train, 2, 2, 3, 400, "fp32", 0.0, False)[0][0]
    assert found.keys() == expected.keys() == Network().state_dict().keys()
    assert max(error(found[name], expected[name]) for name in expected) < TOLERANCE


def test_tied_parameters_count_once_and_stay_tied():
    network = Network()
    engine = make_engine(network, 0, 1)
    assert "head.weight" not in engine.shapes
    assert network.head.weight is network.embed.weight
    train_step(engine, network, 0, 0, 1)
    assert network.head.weight.data_ptr() == network.embed.weight.data_ptr()


def unused_parameters(rank, world_size):
    network = Network()
    engine = make_engine(network, rank, world_size)
    engine.zero_gradients()
    if rank == 0:
        loss_sum(network, 0, 1)[0].backward()  # one rank alone has work, and without pixels
    before = {name: tensor.abs().sum().item() for name, tensor in engine.gradients().items()}
    grads_are_set = all(parameter.grad is not None for parameter in network.parameters())
    engine.update(4)
    return before, grads_are_set, {name: parameter.detach().clone() for name, parameter in network.named_parameters()}


@pytest.mark.parametrize("world_size", [1, 3])
def test_unused_parameters_have_a_zero_gradient_and_decay(world_size):
    results = run_tensors(unused_parameters, world_size, world_size)
    start = dict(Network().named_parameters())
    for rank, (gradients, grads_are_set, parameters) in enumerate(results):
        assert grads_are_set
        assert gradients["unused.weight"] == gradients["visual.weight"] == 0.0
        assert (gradients["embed.weight"] > 0) == (rank == 0)
        assert torch.allclose(parameters["unused.weight"], start["unused.weight"] * (1 - 1e-2 * 0.1), rtol=1e-6)
        assert torch.allclose(parameters["visual.weight"], start["visual.weight"] * (1 - 3e-3 * 0.1), rtol=1e-6)
        assert torch.equal(parameters["unused.bias"], start["unused.bias"]), "biases have no decay"


def no_valid_token(rank, world_size):
    """After a step, so that moments would fade and weights would go on."""
    network = Network()
    engine = make_engine(network, rank, world_size)
    train_step(engine, network, 0, rank, world_size)
    before = [tensor.detach().clone() for tensor in (*engine.current.tensors().values(), *network.parameters())]
    engine.zero_gradients()
    update = engine.update(0)
    after = [*engine.current.tensors().values(), *network.parameters()]
    unchanged = all(torch.equal(first, second) for first, second in zip(before, after, strict=True))
    return update, unchanged, engine.state_version


def test_a_batch_without_valid_tokens_updates_nothing():
    assert run_tensors(no_valid_token, 2, 2) == [(Update(0.0, 1e-2, False), True, 1)] * 2


def spoiled_gradient(rank, world_size, bad_value):
    network = Network()
    engine = make_engine(network, rank, world_size)
    train_step(engine, network, 0, rank, world_size)
    before = [tensor.detach().clone() for tensor in (*engine.current.tensors().values(), *network.parameters())]
    engine.zero_gradients()
    loss_sum(network, 1, rank)[0].backward()
    if rank == 1:
        engine.gradients()["hidden.bias"][2] = bad_value
    update = engine.update(10)
    after = [*engine.current.tensors().values(), *network.parameters()]
    unchanged = all(torch.equal(first, second) for first, second in zip(before, after, strict=True))
    version = engine.state_version
    again = train_step(engine, network, 1, rank, world_size)
    return update, unchanged, version, again.applied, engine.state_version


@pytest.mark.parametrize("bad_value", [float("nan"), float("inf"), float("-inf")])
def test_a_non_finite_gradient_of_one_rank_skips_the_update_on_all(bad_value):
    results = run_tensors(spoiled_gradient, 3, 3, bad_value)
    for update, unchanged, version, applied_again, last_version in results:
        assert not update.applied
        assert not math.isfinite(update.gradient_norm)
        assert unchanged
        assert version == 1
        assert applied_again
        assert last_version == 2


@pytest.mark.parametrize("world_size", [1, 3])
def test_bf16_computes_in_bf16_and_keeps_fp32_masters(world_size):
    expected, _, norms = plain_training(Network(), 8)
    found, resident, _, updates, _ = run_tensors(train, world_size, world_size, 8, 1600, "bf16")[0]
    assert [update.gradient_norm for update in updates] == pytest.approx(norms, rel=0.1)
    assert max(float((found[name] - expected[name]).abs().max()) for name in expected) < 0.05
    assert all(tensor.dtype == torch.float32 for tensor in found.values())
    for name, tensor in resident.items():
        assert torch.equal(tensor, found[name].bfloat16()), "resident parameters are the rounded masters"
    assert any(not torch.equal(found[name], found[name].bfloat16().float()) for name in found)


def test_bf16_gradients_are_summed_in_fp32():
    network = nn.Linear(1, 1, bias=False)
    nn.init.ones_(network.weight)
    engine = FlatEngine(network, settings(), None, 1, 0, "bf16")
    engine.zero_gradients()
    network(torch.full((1, 1), 256.0, dtype=torch.bfloat16)).sum().backward()
    for _ in range(16):
        network(torch.ones(1, 1, dtype=torch.bfloat16)).sum().backward()
    assert engine.gradients()["weight"].item() == 272.0  # a bf16 sum would stay at 256: its step there is 2
    assert network.weight.grad is None
    assert network.weight.dtype == torch.bfloat16


def test_a_step_in_bf16_has_no_gradient_of_the_step_before():
    network = nn.ModuleList([nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)])
    engine = FlatEngine(network, settings(), None, 1, 0, "bf16")
    for used in (0, 1):
        engine.zero_gradients()
        network[used](torch.ones(1, 1, dtype=torch.bfloat16)).sum().backward()
        update = engine.update(1)
    assert update.gradient_norm == 1.0
    assert [gradient.item() for gradient in engine.gradients().values()] == [0.0, 1.0]


def test_small_updates_are_not_lost_in_bf16():
    network = nn.Linear(4, 4, bias=False)
    nn.init.ones_(network.weight)
    rule = OptimizerSettings(lambda _: 1e-4, lambda _: False, 0.0, (0.9, 0.95), 1e-6, 0.0)
    engine = FlatEngine(network, rule, None, 1, 0, "bf16")
    for _ in range(50):
        engine.zero_gradients()
        network(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
        engine.update(1)
    assert full_parameters(engine)["weight"] == pytest.approx(torch.full((4, 4), 0.995).numpy(), abs=1e-5)
    assert network.weight.detach().float() == pytest.approx(torch.full((4, 4), 0.995).numpy(), abs=4e-3)


class LoggedWork:
    def __init__(self, work, log, name):
        self.work, self.log, self.name = work, log, name

    def wait(self):
        self.log.append(f"wait {self.name}")
        self.work.wait()


def order_of_collectives(rank, world_size):
    """What an update starts and waits for, bucket by bucket."""
    network = Network()
    engine = make_engine(network, rank, world_size, 1000)
    log: list[str] = []
    reduce_scatter, gather_into, write = engine._reduce_scatter, engine._gather_into, engine.optimizer.write
    starts = [bucket.start for bucket in engine.layout.buckets]

    def logged_reduce_scatter(bucket):
        name = f"reduce {starts.index(bucket.start)}"
        log.append(f"start {name}")
        return LoggedWork(reduce_scatter(bucket), log, name)

    def logged_gather_into(whole, mine):
        name = f"gather {starts.index(whole.storage_offset())}"
        log.append(f"start {name}")
        return LoggedWork(gather_into(whole, mine), log, name)

    def logged_write(bucket, *arguments):
        log.append(f"write {starts.index(bucket.start)}")
        write(bucket, *arguments)

    engine._reduce_scatter, engine._gather_into = logged_reduce_scatter, logged_gather_into
    engine.optimizer.write = logged_write
    train_step(engine, network, 0, rank, world_size)
    return log


def test_the_next_bucket_is_under_way_while_one_is_worked_on():
    expected = [
        "start reduce 0", "start reduce 1",
        "wait reduce 0", "start reduce 2",
        "wait reduce 1", "start reduce 3",
        "wait reduce 2", "wait reduce 3",
        "write 0", "start gather 0",
        "write 1", "start gather 1",
        "write 2", "start gather 2", "wait gather 0",
        "write 3", "start gather 3", "wait gather 1",
        "wait gather 2", "wait gather 3",
    ]
    assert run_tensors(order_of_collectives, 2, 2) == [expected, expected]


def test_the_learning_rate_factor_scales_all_rates():
    network = Network()
    engine = make_engine(network, 0, 1)
    before = {name: parameter.detach().clone() for name, parameter in network.named_parameters()}
    [norm] = plain_training(Network(), 1)[2]
    assert train_step(engine, network, 0, 0, 1, factor=0.0) == Update(pytest.approx(norm), 0.0, True)
    assert all(torch.equal(before[name], parameter) for name, parameter in network.named_parameters())
    assert train_step(engine, network, 0, 0, 1, factor=0.25).learning_rate == pytest.approx(2.5e-3)
