"""Marks of a small network's layers, forward, recomputed and backward, with and without waits between them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from dhp_ray.comm.progress import AbortedError, Heartbeat, Progress, seconds_of
from dhp_ray.compatibility import all_gather_single, reduce_scatter_single
from dhp_ray.train.layer_marks import LayerMarks
from dhp_ray.train.sharded_engine import TimedCollective
from tests.ranks import run_ranks


class Recorded(Progress):
    """Remembers its marks."""

    def __init__(self) -> None:
        super().__init__()
        self.marks: list[Heartbeat] = []

    def mark(self, doing: str, waits_for_peers: bool = False) -> None:
        super().mark(doing, waits_for_peers)
        self.marks.append(self.passed())


def layers_of(count: int = 2) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(4, 4) for _ in range(count))


def named(layers: nn.ModuleList) -> dict[str, nn.Module]:
    return {f"layer {number}": layer for number, layer in enumerate(layers)}


def run(layers: nn.ModuleList, call: Callable[[nn.Module, Tensor], Tensor]) -> None:
    hidden = torch.ones(3, 4, requires_grad=True)
    for layer in layers:
        hidden = call(layer, hidden)
    hidden.sum().backward()


def test_each_layer_is_marked_forward_and_backward() -> None:
    layers, progress = layers_of(), Recorded()
    LayerMarks(named(layers), progress, gathered=False)
    run(layers, lambda layer, hidden: layer(hidden))
    assert [mark.doing for mark in progress.marks] == ["layer 0", "layer 1", "layer 1, backward", "layer 0, backward"]
    assert not any(mark.waits_for_peers for mark in progress.marks)


def test_a_layer_that_is_recomputed_is_marked_again() -> None:
    layers, progress = layers_of(), Recorded()
    LayerMarks(named(layers), progress, gathered=False)
    run(layers, lambda layer, hidden: checkpoint(layer, hidden, use_reentrant=False))  # type: ignore[no-any-return]
    assert [mark.doing for mark in progress.marks] == [
        "layer 0", "layer 1", "layer 1, backward", "layer 1", "layer 0, backward", "layer 0"]


def test_what_is_gathered_and_reduced_between_layers_is_waited_for() -> None:
    layers, progress = layers_of(), Recorded()
    LayerMarks(named(layers), progress, gathered=True)
    run(layers, lambda layer, hidden: layer(hidden))
    assert [(mark.doing, mark.waits_for_peers) for mark in progress.marks] == [
        ("gathering of layer 0", True), ("layer 0", False), ("gathering of layer 1", True), ("layer 1", False),
        ("gathering of layer 1", True), ("layer 1, backward", False), ("reducing of layer 1", True),
        ("gathering of layer 0", True), ("layer 0, backward", False), ("before layer 1, backward", False),
        ("reducing of layer 0", True), ("before layer 0, backward", False)]


def sharded(rank: int) -> list[list[tuple[str, bool]]]:
    """The marks of two layers that FSDP gathers and reduces, and which of its collectives came after which mark."""
    layers, progress = layers_of(), Recorded()
    world = dist.group.WORLD
    assert world is not None
    collectives: list[tuple[str, bool]] = []

    def recorded(name: str, call: Any) -> Any:
        def collective(*arguments: Any, **options: Any) -> Any:
            collectives.append((f"{name} after {progress.passed().doing}", progress.passed().waits_for_peers))
            return call(*arguments, **options)

        return TimedCollective(collective, Progress())

    gather, reduce = recorded("gather", all_gather_single), recorded("reduce", reduce_scatter_single)
    for layer in layers:
        unit = fully_shard(layer, mesh=DeviceMesh.from_group(world, "cpu"), reshard_after_forward=True)
        unit.set_force_sum_reduction_for_comms(True)
        unit.set_gradient_divide_factor(1.0)
        unit.set_custom_all_gather(gather)
        unit.set_custom_reduce_scatter(reduce)
    LayerMarks(named(layers), progress, gathered=True)
    run(layers, lambda layer, hidden: layer(hidden))
    return [collectives, [(mark.doing, mark.waits_for_peers) for mark in progress.marks]]


def beside_slow_layers(rank: int) -> tuple[float, float]:
    """Seconds of a step over two layers that take 0.1 s longer on rank 1, and those that the rank waits in it."""
    layers, progress = layers_of(), Progress()
    world = dist.group.WORLD
    assert world is not None
    for layer in layers:
        layer.register_forward_hook(lambda *_: time.sleep(0.1 * rank))
        unit = fully_shard(layer, mesh=DeviceMesh.from_group(world, "cpu"), reshard_after_forward=True)
        unit.set_force_sum_reduction_for_comms(True)
        unit.set_gradient_divide_factor(1.0)
    LayerMarks(named(layers), progress, gathered=True)
    run(layers, lambda layer, hidden: layer(hidden))
    dist.barrier()
    begin = time.perf_counter()
    with progress.timed_waits() as waits:
        run(layers, lambda layer, hidden: layer(hidden))
    return time.perf_counter() - begin, seconds_of(waits)


def test_a_rank_that_waits_for_slower_ones_does_not_compute_meanwhile() -> None:
    """As on a device, where the collectives themselves return at once."""
    (step_s, waited_s), (slow_step_s, slow_waited_s) = run_ranks(beside_slow_layers, 2)
    assert min(step_s, slow_step_s) > 0.2
    assert waited_s > 0.18
    assert slow_waited_s < slow_step_s - 0.18


@pytest.mark.gloo("the order of hooks is the same over any backend")
def test_fsdp_gathers_and_reduces_where_the_marks_say_so() -> None:
    for collectives, marks in run_ranks(sharded, 2):
        assert all(waits for _, waits in collectives), collectives
        assert len(collectives) == 2 + 2 + 2  # gathered forward and backward, reduced
        assert marks[-1] == ("before layer 0, backward", False)


@pytest.mark.parametrize("moment", [1, 3])
def test_a_layer_ends_by_an_abort_forward_and_backward(moment: int) -> None:
    """A rank that computes alone, for long, leaves its generation at the next layer."""
    layers, progress = layers_of(), Recorded()
    LayerMarks(named(layers), progress, gathered=False)
    hooks = [lambda *_: progress.abort() if len(progress.marks) == moment else None]
    for layer in layers:
        layer.register_forward_hook(hooks[0])
        layer.register_full_backward_hook(hooks[0])
    with pytest.raises(AbortedError):
        run(layers, lambda layer, hidden: layer(hidden))
    assert len(progress.marks) == moment


def test_removed_marks_leave_nothing() -> None:
    layers, progress = layers_of(), Recorded()
    marks = LayerMarks(named(layers), progress, gathered=True)
    marks.remove()
    run(layers, lambda layer, hidden: layer(hidden))
    assert progress.marks == []
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in layers)
