"""Two versions of a rank's shard: what an update, a failure in one, loading and releasing leave of them."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from dhp_ray.train.flat_engine import FlatEngine
from dhp_ray.train.state.shards import UNFINISHED, ShardState
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


def uneven_start(rank, world_size):
    network = Network()
    with torch.no_grad():
        network.hidden.weight += rank  # a rank that did not build the same model
    engine = make_engine(network, rank, world_size)
    return {name: parameter.detach().clone() for name, parameter in network.named_parameters()}, engine.state_version


def test_resident_parameters_are_built_from_the_shards():
    results = run_tensors(uneven_start, 3, 3)
    for parameters, version in results:
        assert version == 0
        assert all(torch.equal(parameters[name], results[0][0][name]) for name in parameters)


def broken_update(rank, world_size, broken_part):
    network = Network()
    group = dist.new_group(list(range(world_size)), timeout=timedelta(seconds=2))
    engine = FlatEngine(network, settings(), group, world_size, rank, "fp32", 400)
    train_step(engine, network, 0, rank, world_size)
    before = [tensor.clone() for tensor in engine.current.tensors().values()]
    resident = {name: parameter.detach().clone() for name, parameter in network.named_parameters()}
    failed = False
    if broken_part == "reduce" and rank == 1:
        failed = True  # this rank never comes to the update
    else:
        if broken_part == "gather" and rank == 1:
            engine.optimizer.settings = None  # this rank fails while it computes; the others wait for its slices
        try:
            train_step(engine, network, 1, rank, world_size)
        except (RuntimeError, AttributeError):
            failed = True
    unchanged = all(torch.equal(first, second)
                    for first, second in zip(before, engine.current.tensors().values(), strict=True))
    version = engine.state_version
    engine.optimizer.settings = engine.settings
    dist.barrier()
    engine.group = dist.group.WORLD
    engine.all_gather_parameters()
    back = all(torch.equal(resident[name], parameter) for name, parameter in network.named_parameters())
    train_step(engine, network, 1, rank, world_size)
    return failed, unchanged, version, back, full_parameters(engine)


@pytest.mark.gloo("a collective that times out raises; a device's watchdog ends the process")
@pytest.mark.parametrize("broken_part", ["reduce", "gather"])
def test_a_failure_inside_the_update_leaves_the_version_whole(broken_part):
    expected, _, _ = plain_training(Network(), 2)
    results = run_tensors(broken_update, 2, 2, broken_part)
    for failed, unchanged, version, back, _ in results:
        assert failed
        assert unchanged
        assert version == 1
        assert back, "all_gather_parameters on a working group brings the parameters back"
    assert max(error(results[0][4][name], expected[name]) for name in expected) < TOLERANCE


def copied(state):
    copy = ShardState.zeros(state.value.numel(), torch.device("cpu"))
    copy.copy_(state)
    return copy


def versions_of(engine):
    return [(shard.owner, shard.version) for shard in engine.local_shards(5)]


def equal(first, second):
    return first.version == second.version and all(torch.equal(mine, theirs)
                                                   for mine, theirs in zip(first.tensors().values(),
                                                                           second.tensors().values()))


def test_an_engine_holds_the_last_two_versions_and_never_one_that_is_being_written():
    network = Network()
    engine = make_engine(network, 0, 1)
    assert versions_of(engine) == [(5, 0)]
    train_step(engine, network, 0, 0, 1)
    first = copied(engine.current)
    train_step(engine, network, 1, 0, 1)
    assert versions_of(engine) == [(5, 2), (5, 1)]
    assert equal(engine.local_shards(5)[1].state, first)
    assert engine.local_shards(5)[0].pieces == engine.pieces
    engine.gradients()["hidden.bias"][0] = float("nan")
    assert not engine.update(1).applied
    assert versions_of(engine) == [(5, 2), (5, 1)], "a skipped update touches neither"
    write = engine.optimizer.write
    seen = []
    engine.optimizer.write = lambda *arguments: (seen.append(versions_of(engine)), write(*arguments))
    train_step(engine, network, 2, 0, 1)
    assert set(map(tuple, seen)) == {((5, 2),)}
    assert versions_of(engine) == [(5, 3), (5, 2)]


def test_what_was_before_an_loaded_state_is_not_of_its_history():
    network = Network()
    engine = make_engine(network, 0, 1)
    train_step(engine, network, 0, 0, 1)
    first = copied(engine.current)
    train_step(engine, network, 1, 0, 1)
    engine.load_state(first)
    assert versions_of(engine) == [(5, 1)]
    assert equal(engine.current, first)
    assert all(torch.equal(parameter.flatten(), whole(engine, "value")[name])
               for name, parameter in network.named_parameters())
    train_step(engine, network, 1, 0, 1)
    assert versions_of(engine) == [(5, 2), (5, 1)]


def memory_bytes(module):
    storages = {parameter.untyped_storage().data_ptr(): parameter.untyped_storage().nbytes()
                for parameter in module.parameters()}
    gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    return sum(storages.values()) + sum(gradient.untyped_storage().nbytes() for gradient in gradients)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_released_module_keeps_its_shapes_and_no_memory_and_takes_an_engine_again(precision):
    network = Network()
    engine = make_engine(network, 0, 1, precision=precision)
    train_step(engine, network, 0, 0, 1)
    held = engine.local_shards(0)
    expected = copied(engine.current)
    loss, _ = loss_sum(network, 1, 3)  # a step that breaks off before its backward
    engine.release()
    assert memory_bytes(network) == sum(parameter.element_size() for parameter in engine.parameters.values())
    assert {name: parameter.shape for name, parameter in network.named_parameters()} == dict(engine.layout.shapes)
    assert engine.local_shards(0) == []
    assert equal(held[0].state, expected), "what was taken before is whole"
    del loss
    following = FlatEngine(network, settings(), None, 1, 0, precision, 400, initialize=False)
    assert following.state_version == UNFINISHED
    assert following.local_shards(0) == []
    with pytest.raises(AssertionError, match="a state must be loaded first"):
        following.update(1)
    following.load_state(held[0].state)
    assert equal(following.current, expected)
    loaded = whole(following, "value")
    assert all(torch.equal(parameter.flatten(), loaded[name].to(parameter.dtype))
               for name, parameter in network.named_parameters())
    reference = Network()
    undisturbed = make_engine(reference, 0, 1, precision=precision)
    for step in range(3):
        train_step(undisturbed, reference, step, 0, 1)
        if step:
            train_step(following, network, step, 0, 1)
    assert equal(following.current,
                 undisturbed.current), "gradients are summed once: no hook of the first engine is left"
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(network.parameters(), reference.parameters()))
