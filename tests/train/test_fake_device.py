"""A whole step of every family in bf16 on a device that computes nothing (`tests/fake_device.py`): no operator mixes
host and device, no stream races another one, and the host waits for nothing before the totals.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

from dhp_ray.comm import expert_group, ranks
from dhp_ray.comm.expert_group import ExpertGroup
from dhp_ray.comm.pack_communicator import PackCommunicator
from dhp_ray.comm.progress import Progress
from dhp_ray.model import attention, experts, segment_attention
from dhp_ray.model.build import meta_model
from dhp_ray.model.experts import BalanceLosses
from dhp_ray.model.kernels import cuda
from dhp_ray.model.language_model import LanguageModel
from dhp_ray.model.lora import LoraSettings
from dhp_ray.planner.plan.cluster import ClusterSpec
from dhp_ray.planner.plan.types import Pack, Plan
from dhp_ray.train import sharded_engine
from dhp_ray.train.flat_engine import FlatEngine
from dhp_ray.train.layer_marks import LayerMarks, layers_by_name
from dhp_ray.train.rank_step import MicroBatchStep, RankStep
from dhp_ray.train.sharded_engine import ShardedEngine
from dhp_ray.train.step_inputs import StepInputs, collated
from tests.fake_device import Exchange, FakeDevice
from tests.packs import PRESETS, Film, make_sample, own_payloads, shallow_config, with_images_apart
from tests.ranks import run_processes
from tests.train.test_sharded_engine import settings

PARTS = {"images": [20, (1, 4, 8), 30, (1, 4, 4), 9], "film": [5, Film(0.5, ((2, 4, 4), (1, 4, 4))), 30], "text": [61]}
ADAPTERS = LoraSettings(8, 16.0, ("all-linear",))
NUM_RANKS = 2


class Case(NamedTuple):
    """`sharing`: so many ranks share experts."""

    preset: str
    sync: str = "step"
    recomputes: str = "false"
    offload: float = 0.0
    recomputed: float = 0.0
    frozen: tuple[str, ...] = ()
    lora: LoraSettings | None = None
    apart: bool = False
    sharing: int = 1


CASES = [
    Case("tiny", apart=True), Case("tiny_llama", "micro_batch"),
    Case("tiny_glm4v", frozen=("vision",), lora=replace(ADAPTERS, dropout=0.1))]
SLOW_CASES = [
    Case("tiny", "micro_batch", recomputes="selective"), Case("tiny_qwen3_vl", offload=0.5, recomputed=0.5),
    Case("tiny_internvl", "micro_batch", recomputes="true", apart=True),
    Case("tiny_qwen3", "micro_batch", offload=1.0), Case("tiny_qwen3_5", recomputes="selective"),
    Case("tiny_qwen3_moe", "micro_batch", recomputes="true", sharing=2),
    Case("tiny_qwen3_vl_moe", "micro_batch", lora=ADAPTERS),
    Case("tiny_qwen3_5_moe", "micro_batch", recomputes="selective")]


class Link(PackCommunicator):
    """Members of which one is here."""

    exchanges: Exchange

    def exchange(
        self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]], tag: int = 0
    ) -> Any:
        return self.exchanges.start([tensor for tensor, _ in sends], [tensor for tensor, _ in receives], "exchange")


class Links:
    """Stands for a transport, whose groups would meet."""

    def __init__(self, exchanges: Exchange, progress: Progress) -> None:
        self._exchanges, self._progress = exchanges, progress

    def prepare(self, process_groups: Any) -> None:
        pass

    def link(self, members: Sequence[int], pack_index: int) -> Link:
        link = Link(members, 0, cast(Any, object()) if len(members) > 1 else None, pack_index, self._progress)
        link.exchanges = self._exchanges
        return link

    def counters(self) -> dict[str, int]:
        return {}


def inputs_of(adapter: LanguageModel, case: Case) -> StepInputs:
    """Rank 0's of a pack of two ranks and of one of its own."""
    made = [make_sample(name, parts, preset=case.preset) for name, parts in PARTS.items()]
    samples, payloads = tuple(sample for sample, _ in made), {sample.id: payload for sample, payload in made}

    def pack(members: tuple[int, ...], rows: tuple[int, ...], micro_batch: int) -> Pack:
        images = sum(len(samples[row].vision_grids) for row in rows)
        encoders = tuple(members[image % len(members)] for image in range(images))
        return Pack(members, rows, 1.0, 0.0, micro_batch * (case.sync == "micro_batch"), encoders)

    plan = Plan("test", case.sync, ClusterSpec(NUM_RANKS, NUM_RANKS, 4096), samples,
                (pack((0, 1), (0, 2), 0), pack((0,), (1,), 1)), 1.0, 1.0)
    rank_plan = (with_images_apart(plan) if case.apart else plan).rank_plan(1, 0)
    own = {name: payload for each in (*rank_plan.packs, *rank_plan.encoded)
           for name, payload in own_payloads(each, payloads, 0).items()}
    inputs = collated(rank_plan, own, adapter, "bf16")
    inputs.inputs = [replace(one, offload=case.offload, recomputed=case.recomputed) for one in inputs.inputs]
    return inputs


def stand_in(fake: FakeDevice, exchanges: Exchange) -> None:
    """Let this process compute with CUDA's operators, and exchange on the fake device."""
    for module in (attention, segment_attention, experts):
        cast(Any, module).kernel_for = lambda device: cuda
    for place in (sharded_engine, ranks):
        cast(Any, place).all_gather_single = exchanges.collective("all-gather")
    sharded_engine.reduce_scatter_single = exchanges.collective("reduce-scatter")
    expert_group.dist.all_to_all_single = exchanges.collective("all-to-all")
    ranks.dist.all_reduce = lambda tensor, group: exchanges.start([tensor], [tensor], "all-reduce").wait()
    torch.tensor = read_where_a_device_takes_it(fake, torch.tensor)
    mesh_of = DeviceMesh.from_group

    def real_mesh(*arguments: Any) -> DeviceMesh:
        with _disable_current_modes():  # it reads the numbers of ranks
            return mesh_of(*arguments)

    DeviceMesh.from_group = real_mesh  # type: ignore[method-assign]


def read_where_a_device_takes_it(fake: FakeDevice, make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`torch.tensor`, which makes it on the host first: no fake tensor can be made of numbers."""
    def tensor(data: Any, *, device: Any = None, **options: Any) -> Tensor:
        made = make(data, **options)
        return made if device is None else made.to(device)

    return tensor


def step_of(adapter: LanguageModel, case: Case, fake: FakeDevice, exchanges: Exchange) -> RankStep:
    device, progress = fake.device, Progress(fake.device)
    links: Any = Links(exchanges, progress)
    adapter.module.to_empty(device=device)
    adapter.module.tie_weights()
    rule = settings(adapter, clip_norm=1.0)
    if case.sync == "step":
        flat = FlatEngine(adapter.module, rule, None, 1, 0, "bf16", progress=progress, device=device)
        LayerMarks(layers_by_name(adapter), progress, gathered=False)
        return RankStep(adapter, flat, links, None, device)
    world: Any = dist.group.WORLD
    group = ExpertGroup(NUM_RANKS, 0, world, dist.new_group([0]), progress) if case.sharing > 1 else None
    sharded = ShardedEngine(adapter, rule, world, 0, device, "bf16", progress, expert_group=group)
    LayerMarks(layers_by_name(adapter, *(adapter.experts() if group else [])) | {"model": sharded.root}, progress,
               gathered=True)
    if sharded.expert_parallel:
        # it reads how many tokens came: the one read before the totals (test_reads.py)
        sharded.expert_parallel.needs_more_room = lambda world: False  # type: ignore[method-assign]
    return MicroBatchStep(adapter, sharded, links, world, device)


def found_in_steps(rank: int, port: int, case: Case) -> tuple[Counter[str], int]:
    """What was noted in two steps, but for reads after their totals; and how many these were."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=NUM_RANKS)
    adapter = meta_model(shallow_config(case.preset, 2))
    adapter.balance_losses = BalanceLosses(0.1, 0.1)
    adapter.freeze(case.frozen)
    if case.lora:
        adapter.add_lora(case.lora)
    adapter.set_activation_checkpointing(case.recomputes != "false", case.recomputes == "selective")
    inputs, fake = inputs_of(adapter, case), FakeDevice()
    exchanges, found, late = Exchange(fake), Counter[str](), Counter[str]()
    with fake:
        stand_in(fake, exchanges)
        inputs.inputs = [one.map(fake.of_host) for one in inputs.inputs]
        inputs.vision = inputs.vision and inputs.vision.map(fake.of_host)
        step = step_of(adapter, case, fake, exchanges)
        step.before_update = lambda: (found.update(fake.found), fake.found.clear())  # type: ignore[func-returns-value]
        for _ in range(2):  # in the second there are gradients, which are freed
            fake.found.clear()
            assert step.run(inputs, 1.0).applied
            late += fake.found
        step.engine.release()
    reads = Counter({what: count for what, count in late.items() if what.startswith("read")})
    return found + (late - reads), reads.total()


@pytest.mark.parametrize("case", [*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW_CASES)],
                         ids=lambda case: f"{case.preset}-{case.sync}")
@pytest.mark.gloo("its backend is its own")
def test_a_step_mixes_nothing_races_nothing_and_reads_nothing(case: Case) -> None:
    [(found, reads_after)] = run_processes(found_in_steps, 1, case, timeout_s=300.0)
    assert not found
    assert reads_after > 0, "the totals are read, and so found"


def test_every_family_is_there() -> None:
    assert {case.preset for case in (*CASES, *SLOW_CASES)} == {*PRESETS}


def small_programs(fake: FakeDevice, exchanges: Exchange) -> dict[str, Callable[[Tensor, Tensor, Any], Any]]:
    """Of two tensors of the device and a stream beside the current one, by what is noted; empty: nothing."""
    streams, host = torch.get_device_module(fake.device), fake.of_host(torch.zeros(8))

    def beside(stream: Any, call: Callable[[], Any]) -> Any:
        with streams.stream(stream):
            return call()

    def waited(x: Tensor, y: Tensor, stream: Any) -> Tensor:
        stream.wait_stream(streams.current_stream())
        beside(stream, lambda: y.copy_(x))
        streams.current_stream().wait_stream(stream)
        return x + y

    def freed(x: Tensor, y: Tensor, stream: Any) -> None:
        stream.wait_stream(streams.current_stream())
        made = x * 2
        stream.wait_stream(streams.current_stream())
        beside(stream, lambda: made + 1)

    def received(x: Tensor, y: Tensor, waits: bool) -> Tensor:
        done = exchanges.start([x], [y], "exchange")
        if waits:
            done.wait()
        return y + 1

    return {
        "read of a number": lambda x, y, stream: x.sum().item(),
        "read of pageable memory": lambda x, y, stream: x + torch.zeros(8).to(fake.device, non_blocking=True),
        "read by a copy to the host": lambda x, y, stream: host.copy_(x),
        "mix in aten.index": lambda x, y, stream: x[torch.arange(3)],
        "race of aten.add": lambda x, y, stream: (beside(stream, lambda: y.mul_(2)), x + y),
        "race of aten.mul_": lambda x, y, stream: (beside(stream, lambda: x + y), y.mul_(2)),
        "race of freeing": freed,
        "race of aten.add.Tensor": lambda x, y, stream: received(x, y, waits=False),
        "": lambda x, y, stream: (waited(x, y, stream), received(x, y, waits=True), x + 2 * torch.ones(()),
                                  host.copy_(x, non_blocking=True), x.copy_(host, non_blocking=True), x[1:].view(-1))}


def notes(rank: int, port: int) -> dict[str, list[str]]:
    fake = FakeDevice()
    exchanges, found = Exchange(fake), dict[str, list[str]]()
    with fake:
        for what, program in small_programs(fake, exchanges).items():
            x, y = torch.zeros(8, device=fake.device), torch.zeros(8, device=fake.device)
            stream = torch.get_device_module(fake.device).Stream()
            stream.wait_stream(torch.get_device_module(fake.device).current_stream())
            program(x, y, stream)
            found[what] = list(fake.found)
            torch.get_device_module(fake.device).current_stream().wait_stream(stream)
            del x, y
            fake.found.clear()
    return found


@pytest.mark.gloo("its backend is its own")
def test_what_a_device_does_without_a_word_is_noted() -> None:
    [found] = run_processes(notes, 1)
    for what, noted in found.items():
        assert len(noted) == bool(what), noted
        assert all(note.startswith(what) for note in noted)
