"""Between a step's start and its totals nothing reads a number of the device: the host runs ahead of it."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from benchmarks.device_parts.reads import Place, counted
from dhp_ray.comm.device import choose
from dhp_ray.comm.expert_group import open_expert_group
from dhp_ray.comm.progress import Progress
from dhp_ray.comm.transport import Transport
from dhp_ray.model.experts import BalanceLosses
from dhp_ray.model.kernels import cpu, cuda
from dhp_ray.planner.plan.types import Plan
from dhp_ray.train.collate import Payload
from dhp_ray.train.flat_engine import FlatEngine
from dhp_ray.train.layer_marks import LayerMarks, layers_by_name
from dhp_ray.train.rank_step import MicroBatchStep, RankStep
from dhp_ray.train.results import StepResult
from dhp_ray.train.sharded_engine import ShardedEngine
from dhp_ray.train.step_inputs import collated
from tests.packs import Film, rough_model, with_images_apart, with_splits
from tests.ranks import run_ranks
from tests.train.test_sharded_engine import Groups, make_plan, payloads_of, settings

CPU = torch.device("cpu")
LAYOUT: list[Groups] = [
    [([0, 1, 2], [[50, (1, 4, 8), 70, Film(0.5, ((2, 4, 4), (1, 4, 4))), 9], [61]], None)],
    [([2, 0], [[70, (1, 12, 10)], [25]], [1]), ([1], [[40], [9, (1, 8, 6)]], None)],
    [([1], [[30], [5, (1, 4, 4), 2]], None)],  # with sync=micro_batch two ranks are idle, and encode a tiny image
]
TEXTS: list[Groups] = [[(ranks, [[part for part in parts if isinstance(part, int)] for parts in samples], None)
                        for ranks, samples, _ in groups] for groups in LAYOUT]


def reads_of(
    rank: int, sync: str, transport: str, freeze: list[str], recomputes: bool, plan: Plan, payloads: dict[str, Payload],
    preset: str = "tiny", sharing: int = 1
) -> tuple[list[Place], int, StepResult, int]:
    """Where a step read the device before its totals, how often it did in all, what it reports, and bytes of features
    that came from other ranks before the packs. Experts are computed by torch's grouped
    product, which asks nothing of its own on Hopper.
    """
    cpu.grouped_products, cpu.grouped_sums = cuda.grouped_products, cuda.grouped_sums
    adapter, progress = rough_model(preset=preset), Progress(CPU)
    adapter.balance_losses = BalanceLosses(0.1, 0.1)
    adapter.freeze(freeze)
    if recomputes:
        adapter.set_activation_checkpointing()
    assert dist.group.WORLD is not None
    opened = Transport(transport, rank, 3, choose("cpu"), 16, timedelta(seconds=30), progress)
    step: RankStep
    if sync == "step":
        flat = FlatEngine(adapter.module, settings(adapter, 1.0), dist.group.WORLD, 3, rank, progress=progress)
        step = RankStep(adapter, flat, opened, dist.group.WORLD, CPU)
    else:
        shared = (open_expert_group(sharing, rank, 3, choose("cpu").backend, timedelta(seconds=30), progress)
                  if sharing > 1 else None)
        sharded = ShardedEngine(adapter, settings(adapter, 1.0), dist.group.WORLD, rank, CPU, progress=progress,
                                expert_group=shared)
        step = MicroBatchStep(adapter, sharded, opened, dist.group.WORLD, CPU)
    LayerMarks(layers_by_name(adapter), progress, gathered=sync == "micro_batch")
    rank_plan = plan.rank_plan(1, rank)
    inputs = collated(rank_plan, payloads_of((*rank_plan.packs, *rank_plan.encoded), payloads, rank), adapter)
    step.run(inputs, 1.0)  # what happens once does not count
    before = Counter[Place]()
    with counted(CPU) as found:
        step.before_update = lambda: before.update(found)
        result = step.run(inputs, 1.0)
    opened.close()
    received = sum(count for own in inputs.inputs for other, count in own.received_from.items() if other != rank)
    return list(before), found.total(), result, 4 * adapter.feature_width * received


@pytest.mark.parametrize(("sync", "transport", "freeze", "recomputes"), [
    ("micro_batch", "parent", ["vision"], False),  # with sync=step: with experts, and with images apart, below
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ("step", "pool", [], True), ("micro_batch", "pool", [], True), ("step", "parent", ["vision"], False),
        ("step", "parent", ["language"], True), ("micro_batch", "parent", ["language"], True)))])
def test_a_step_reads_nothing_before_its_totals(
    sync: str, transport: str, freeze: list[str], recomputes: bool
) -> None:
    plan, payloads = make_plan(3, LAYOUT, masked=("2.1",), sync=sync)
    for reads, in_all, result, _ in run_ranks(reads_of, 3, sync, transport, freeze, recomputes, plan, payloads):
        assert reads == []
        assert in_all > 0, "the totals are read, and so found"
        assert (result.encoder_times, result.exchanged_bytes) == ((), 0)


@pytest.mark.parametrize(("sync", "recomputes", "sharing"), [
    ("step", True, 1), ("micro_batch", True, 3), *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ("step", False, 1), ("micro_batch", True, 1), ("micro_batch", False, 1), ("micro_batch", False, 3)))])
def test_nor_does_one_with_experts(sync: str, recomputes: bool, sharing: int) -> None:
    """Where ranks share them, it first asks whether there was room for all tokens."""
    plan, payloads = make_plan(3, TEXTS, masked=("2.1",), sync=sync)
    for reads, _, result, _ in run_ranks(reads_of, 3, sync, "pool", [], recomputes, plan, payloads, "tiny_qwen3_moe",
                                         sharing):
        assert [place.led_there.partition(":")[0] for place in reads] == ["dhp_ray/comm/progress.py"] * (sharing > 1)
        assert result.experts is not None
        assert 0 < result.experts.entropy < 1 < result.experts.max_load


@pytest.mark.parametrize(("sync", "recomputes", "preset"), [
    ("micro_batch", True, "tiny_qwen3_5"), *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ("step", False, "tiny_qwen3_5"), ("micro_batch", True, "tiny_qwen3_5_moe")))])
def test_nor_does_one_with_gated_delta_nets(sync: str, recomputes: bool, preset: str) -> None:
    plan, payloads = make_plan(3, TEXTS, masked=("2.1",), sync=sync)
    for reads, in_all, *_ in run_ranks(reads_of, 3, sync, "parent", [], recomputes, plan, payloads, preset):
        assert reads == []
        assert in_all > 0, "the totals are read, and so found"


@pytest.mark.parametrize(("sync", "transport", "freeze", "keeps", "recomputes"), [
    ("step", "parent", ["language"], False, False), ("micro_batch", "pool", [], True, True),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ("step", "parent", [], False, False), ("step", "pool", [], True, False),
        ("step", "pool", ["vision"], True, False), ("step", "parent", ["language"], False, True),
        ("micro_batch", "parent", [], False, False),
        ("micro_batch", "pool", ["vision"], True, False), ("micro_batch", "parent", ["language"], False, True)))])
def test_nor_does_one_that_encodes_images_apart_from_its_packs(
    sync: str, transport: str, freeze: list[str], keeps: bool, recomputes: bool
) -> None:
    plan, payloads = make_plan(3, LAYOUT, masked=("2.1",), sync=sync)
    plan = with_images_apart(plan, keeps, pass_patches=40 if sync == "step" else 0)
    plan = with_splits(plan, {1: (1, 2)})
    assert any(encoder not in group.ranks for group in plan.groups for encoder in group.encoders)
    found = run_ranks(reads_of, 3, sync, transport, freeze, recomputes, plan, payloads)
    for reads, in_all, result, _ in found:
        assert reads == []
        assert in_all > 0, "the totals are read, and so found"
        before, *after = result.encoder_times
        assert len(after) == ("vision" not in freeze)
        edges = [edge for time in (before, *result.pack_times, *after) for edge in (time.start_s, time.end_s)]
        assert edges == sorted(edges)
    assert sum(result.exchanged_bytes for *_, result, _ in found) == sum(came for *_, came in found) > 0
