"""Parameters once per node: the same losses, gradients and updates as one rank that has everything."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist

from dhp_ray.comm.link import Link
from dhp_ray.train.collate import collate
from dhp_ray.train.flat_engine import FlatEngine
from dhp_ray.train.node_engine import Node, NodeEngine
from dhp_ray.train.pack import pack_loss
from tests.packs import make_pack, make_sample, rough_model
from tests.train.networks import run_tensors, settings

SAMPLES = [make_sample("text", [9]), make_sample("image", [5, (1, 4, 4), 6]),
           make_sample("two", [3, (1, 4, 8), (1, 4, 4), 4]), make_sample("long", [40]),
           make_sample("late", [7, (1, 8, 4), 9])]
NODES = {1: ((0,),), 2: ((0, 1),), 3: ((0, 1), (2,)), 5: ((0, 1), (2, 3, 4))}


def own_loss(adapter, number, rank):
    sample, payload = SAMPLES[number]
    pack = make_pack(number, [rank], [sample])
    return pack_loss(adapter, collate(pack, {sample.id: payload}, rank, adapter), Link((rank,), rank, None))


def model(freeze: Sequence[str], recomputes: bool, tied: bool):
    torch.manual_seed(0)  # of the head that is not tied
    adapter = rough_model(tie_word_embeddings=tied)
    adapter.freeze(freeze)
    adapter.set_activation_checkpointing(recomputes)
    return adapter


def train_node(rank, world_size, freeze, recomputes, tied, steps):
    nodes = NODES[world_size]
    groups = [dist.new_group(list(ranks)) for ranks in nodes]
    place = next(number for number, ranks in enumerate(nodes) if rank in ranks)
    adapter = model(freeze, recomputes, tied)
    engine = NodeEngine(adapter, settings(eps=1e-2), dist.group.WORLD if world_size > 1 else None, world_size, rank,
                        Node(nodes, groups[place] if len(nodes[place]) > 1 else None), torch.device("cpu"),
                        bucket_bytes=4000)
    losses, counts, updates = [], [], []
    for _ in range(steps):
        for number in range(rank, len(SAMPLES), world_size):
            engine.zero_gradients()
            loss = own_loss(adapter, number, rank)
            loss.backward()
            engine.end_pack()
            losses.append(loss.item())
            counts.append(dict(engine.buffers.of_last_pack))
        if world_size > 1:
            dist.barrier()
        updates.append(engine.update(50))
    found = engine.full_parameters()
    filled = engine.buffers.filled_most
    engine.release()
    return losses, counts, updates, found, filled


def train_whole(freeze, recomputes, tied, steps):
    adapter = model(freeze, recomputes, tied)
    engine = FlatEngine(adapter.module, settings(eps=1e-2), None, 1, 0)
    losses, updates = [], []
    for _ in range(steps):
        engine.zero_gradients()
        for number in range(len(SAMPLES)):
            loss = own_loss(adapter, number, 0)
            loss.backward()
            losses.append(loss.item())
        updates.append(engine.update(50))
    return losses, updates, engine.full_parameters()


@pytest.mark.parametrize(("world_size", "freeze", "recomputes", "tied"), [
    (1, (), False, True), (2, ("vision",), True, False), (3, (), True, True), (5, ("language",), False, True)])
def test_any_node_trains_as_one_rank_does(world_size, freeze, recomputes, tied):
    expected_losses, expected_updates, expected = train_whole(freeze, recomputes, tied, 2)
    results = run_tensors(train_node, world_size, world_size, freeze, recomputes, tied, 2)
    per_step = [[] for _ in range(2)]
    for step in range(2):
        for rank, (losses, *_) in enumerate(results):
            own = len(range(rank, len(SAMPLES), world_size))
            per_step[step] += losses[step * own : (step + 1) * own]
    for step in range(2):
        assert sum(per_step[step]) == pytest.approx(
            sum(expected_losses[step * len(SAMPLES) : (step + 1) * len(SAMPLES)]), rel=1e-5)
    for _, _, updates, _, filled in results:
        assert [update.gradient_norm for update in updates] == pytest.approx(
            [update.gradient_norm for update in expected_updates], rel=1e-5)
        assert filled <= 2
    found = results[0][3]
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.allclose(found[name], value, rtol=1e-4, atol=1e-6), name


def no_valid_token(rank, world_size):
    group = dist.new_group([0, 1])
    adapter = model((), False, True)
    engine = NodeEngine(adapter, settings(), dist.group.WORLD, world_size, rank, Node(((0, 1),), group),
                        torch.device("cpu"))
    norms = []
    for num_valid_tokens in (50, 0, 50):
        for number in range(rank, len(SAMPLES), world_size) if num_valid_tokens else ():
            own_loss(adapter, number, rank).backward()
            engine.end_pack()
        dist.barrier()
        state = [tensor.clone() for tensor in engine.current.tensors().values()]
        update = engine.update(num_valid_tokens)
        same = all(map(torch.equal, state, engine.current.tensors().values()))
        norms.append((update.applied, same, engine.state_version))
    engine.release()
    return norms


def test_a_batch_without_valid_tokens_updates_nothing_here_either():
    assert run_tensors(no_valid_token, 2, 2) == [[(True, False, 1), (False, True, 1), (True, False, 2)]] * 2


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("tied", [True, False])
def test_a_pack_reads_a_unit_twice_and_adds_to_it_once(recomputes, tied):
    """The head once, since it computes its gradient in the forward pass, and rows of the embedding once."""
    _, counts, _, _, filled = run_tensors(train_node, 1, 1, (), recomputes, tied, 1)[0]
    adapter = rough_model()
    layers = len(adapter.module.model.language_model.layers) + 1  # the last norm is one more
    encoder = len(adapter.module.model.visual.blocks) + 2  # the patch embedding and the merger
    text, image = counts[0], counts[1]
    assert text == {"reads": 2 * layers + 2, "adds": layers + 2}
    assert image == {"reads": 2 * (layers + encoder) + 2, "adds": layers + encoder + 2}
    assert filled == 2


@pytest.mark.parametrize("recomputes", [False, True])
def test_the_next_unit_is_read_while_one_computes(recomputes, monkeypatch):
    """A unit's read ends only once the unit before it, in this direction, has computed: nothing else waits for it."""
    adapter = model((), recomputes, True)
    engine = NodeEngine(adapter, settings(eps=1e-2), None, 1, 0, Node(((0,),), None), torch.device("cpu"))
    layers = adapter.module.model.language_model.layers
    numbers = {module: number for number, module in enumerate(unit.module for unit in engine.buffers.units)}
    first = numbers[layers[0]]
    done = {number: threading.Event() for number in range(len(engine.buffers.units))}
    directions, held, waits = {"forward": -1, "backward": 1}, [], []
    direction = "forward"
    read = engine.state.read

    def late(unit, into):
        before = unit + directions[direction]
        if min(unit, before) >= first and max(unit, before) < first + len(layers):
            held.append((direction, unit))
            waits.append(done[before].wait(20.0))
        read(unit, into)

    monkeypatch.setattr(engine.state, "read", late)
    for layer in layers:
        layer.register_forward_hook(lambda layer, *_: done[numbers[layer]].set() if direction == "forward" else None)
        # its gradients are there, its parameters not yet given back
        layer.mlp.gate_proj.weight.register_post_accumulate_grad_hook(
            lambda _, layer=layer: done[numbers[layer]].set())
    loss = own_loss(adapter, 1, 0)
    direction = "backward"
    for event in done.values():
        event.clear()
    loss.backward()
    engine.end_pack()
    engine.release()
    units = range(first, first + len(layers))
    assert held == [*(("forward", unit) for unit in units[1:]), *(("backward", unit) for unit in units[-2::-1])]
    assert all(waits)


def test_a_unit_whose_read_failed_is_read_again(monkeypatch):
    """Read alone, it would compute with what its memory held before."""
    adapter = model((), False, True)
    engine = NodeEngine(adapter, settings(eps=1e-2), None, 1, 0, Node(((0,),), None), torch.device("cpu"))
    wanted = own_loss(adapter, 1, 0).item()
    engine.end_pack()
    read, failing = engine.state.read, {3}

    def fails_once(unit, into):
        into.fill_(7.0)
        if unit in failing:
            failing.remove(unit)
            raise OSError("unit 3 cannot be read")
        read(unit, into)

    monkeypatch.setattr(engine.state, "read", fails_once)
    with pytest.raises(OSError, match="unit 3 cannot be read"):
        own_loss(adapter, 1, 0)
    assert own_loss(adapter, 1, 0).item() == wanted
    engine.end_pack()
    engine.release()


def bf16_sums(rank, world_size):
    """The state after one update in bf16, of a learning rate that shows gradients."""
    adapter = model((), True, True)
    group = dist.group.WORLD if world_size > 1 else None
    adapter.module.to(torch.bfloat16)
    engine = NodeEngine(adapter, settings(eps=1e-2), group, world_size, rank,
                        Node((tuple(range(world_size)),), group), torch.device("cpu"), "bf16", bucket_bytes=4000)
    for number in range(rank, len(SAMPLES), world_size):
        own_loss(adapter, number, rank).backward()
        engine.end_pack()
    if group:
        dist.barrier()
    update = engine.update(50)
    return update.gradient_norm, engine.full_parameters(), engine.state.own_values.dtype


def test_in_bf16_gradients_add_up_in_fp32():
    one, two = (run_tensors(bf16_sums, world_size, world_size)[0] for world_size in (1, 2))
    assert one[2] == torch.bfloat16
    assert one[0] == pytest.approx(two[0], rel=1e-6), "only the order of fp32 sums differs"
    for name, value in one[1].items():
        assert value.dtype == torch.float32
        assert torch.allclose(two[1][name], value, rtol=1e-5, atol=1e-7), name


def test_the_module_is_as_before_when_the_engine_has_left_it():
    adapter = model((), False, True)
    embedding = type(adapter.module.model.language_model.embed_tokens).forward
    engine = NodeEngine(adapter, settings(), None, 1, 0, Node(((0,),), None), torch.device("cpu"))
    held = engine.local_shards(0)
    engine.release()
    assert "forward" not in vars(adapter.module.model.language_model.embed_tokens)
    assert type(adapter.module.model.language_model.embed_tokens).forward is embedding
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in adapter.module.modules())
    again = NodeEngine(adapter, settings(), None, 1, 0, Node(((0,),), None), torch.device("cpu"), initialize=False)
    again.load_state(held[0].state)
    expected = rough_model()
    for name, value in again.full_parameters().items():
        assert torch.equal(value, dict(expected.module.named_parameters())[name]), name


def test_a_row_that_is_padding_gets_no_gradient():
    def first_norm(make):
        adapter = rough_model()
        adapter.module.model.language_model.embed_tokens.padding_idx = int(SAMPLES[3][1].input_ids[0])
        engine = make(adapter)
        engine.zero_gradients()
        own_loss(adapter, 3, 0).backward()
        engine.end_pack()
        return engine.update(50).gradient_norm

    def node(adapter):
        return NodeEngine(adapter, settings(), None, 1, 0, Node(((0,),), None), torch.device("cpu"))

    assert first_norm(node) == pytest.approx(
        first_norm(lambda adapter: FlatEngine(adapter.module, settings(), None, 1, 0)), rel=1e-6)


def test_an_engine_that_cannot_be_made_leaves_the_model_as_it_was(monkeypatch):
    """Also frozen values, which no file has: the next engine over the model takes them from it."""
    adapter = model(("vision",), False, True)
    expected = {name: parameter.detach().clone() for name, parameter in adapter.module.named_parameters()
                if not parameter.requires_grad}

    def fail(engine):
        raise RuntimeError("connection closed by peer")

    with monkeypatch.context() as patch:
        patch.setattr(NodeEngine, "all_gather_parameters", fail)
        with pytest.raises(RuntimeError, match="closed by peer"):
            NodeEngine(adapter, settings(), None, 1, 0, Node(((0,),), None), torch.device("cpu"))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in adapter.module.modules())
    assert "forward" not in vars(adapter.module.model.language_model.embed_tokens)
    again = NodeEngine(adapter, settings(), None, 1, 0, Node(((0,),), None), torch.device("cpu"), initialize=False)
    for name, value in expected.items():
        assert torch.equal(again._frozen_value(name), value)
        assert torch.equal(again.state.value(name, value.numel()).view(value.shape), value)
