"""One membership after another over the same processes: what is loaded, what a kill in a step leaves, and what is left
open.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import weakref
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from dhp_ray.comm.device import choose
from dhp_ray.comm.progress import Progress
from dhp_ray.comm.transport import open_transport
from dhp_ray.comm.world import abort_groups, destroy_world
from dhp_ray.model.adapter import ModelAdapter
from dhp_ray.planner.plan import Plan
from dhp_ray.storage import Folder
from dhp_ray.train.collate import Payload
from dhp_ray.train.engine import Engine
from dhp_ray.train.flat_engine import FlatEngine
from dhp_ray.train.layer_marks import LayerMarks
from dhp_ray.train.micro_batch_step import MicroBatchStep
from dhp_ray.train.rank_step import RankStep
from dhp_ray.train.sharded_engine import ShardedEngine
from dhp_ray.train.state.checkpoint import Checkpointer
from dhp_ray.train.state.mirror import Mirror
from dhp_ray.train.state.reshard import LocalShard, reshard
from tests.packs import rough_model
from tests.ranks import run_processes
from tests.train.networks import whole
from tests.train.test_sharded_engine import make_plan, payloads_of, settings

CPU = torch.device("cpu")
KINDS = ("value", "exp_avg", "exp_avg_sq")
TIMEOUT = timedelta(seconds=60)
KEEPERS = [1, 0, 0, 1, 0]
"""Ranks 0 and 1 keep all: those that follow may be lost together."""


class Member:
    """A process over several generations, with what a worker has and in the order of its calls."""

    def __init__(self, port: int, run_dir: str) -> None:
        self.store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=TIMEOUT)
        self.run_dir = run_dir
        Path(run_dir).mkdir(exist_ok=True)
        self.generation = 0
        self.adapter: ModelAdapter | None = None

    def control(self) -> None:
        """The thread that ends what this process waits for, once a peer of its generation is lost."""
        generation, progress = self.generation, self.progress
        while self.generation == generation:
            if self.lost.exists():
                progress.abort()
                abort_groups()
            time.sleep(0.01)

    @property
    def lost(self) -> Path:
        """A file that is there once a peer of this generation is lost."""
        return Path(self.run_dir) / f"lost-{self.generation}"

    def join(self, rank: int, size: int, sync: str, supplies: Sequence[LocalShard] | None = None) -> None:
        """Form a generation; all of its members come with the same number of generations before it. `supplies` None
        begins anew.
        """
        self.generation += 1
        self.rank, self.size, self.sync = rank, size, sync
        dist.init_process_group(choose("cpu").backend, rank=rank, world_size=size, timeout=TIMEOUT,
                                store=dist.PrefixStore(f"generation-{self.generation}", self.store))
        save_group, mirror_group = (dist.new_group(list(range(size)), backend="gloo", timeout=TIMEOUT)
                                    for _ in range(2))
        world = dist.group.WORLD
        assert world is not None
        self.progress = Progress()
        if self.adapter is None:
            self.adapter = rough_model(seed=0 if supplies is None else 3)  # a joiner's own values must not matter
        if sync == "micro_batch":
            engine: Engine = ShardedEngine(self.adapter, settings(self.adapter), world, rank, CPU,
                                           progress=self.progress)
        else:
            engine = FlatEngine(self.adapter.module, settings(self.adapter), world if size > 1 else None, size, rank,
                                "fp32", 200_000, initialize=supplies is None, progress=self.progress)
        if supplies is not None:
            engine.load_state(reshard(supplies, engine.pieces(), engine.shard_size, rank, save_group))
        transport = open_transport("pool", rank, size, choose("cpu"), 16, TIMEOUT, self.progress)
        self.marks = LayerMarks(self.adapter.units(), self.progress, gathered=sync == "micro_batch")
        self.stepper = (MicroBatchStep if sync == "micro_batch"
                        else RankStep)(self.adapter, engine, transport, world if size > 1 else None, CPU)
        self.mirror = Mirror(engine, rank, KEEPERS[:size], mirror_group)
        self.checkpointer = Checkpointer(engine, rank, size, save_group, Path(self.run_dir) / f"scratch_{rank}",
                                         Folder(f"{self.run_dir}/run"))
        self.mirror.begin()
        threading.Thread(target=self.control, name="control", daemon=True).start()

    def step(self, step: int) -> float:
        """The loss; the same samples on any number of ranks."""
        plan, payloads = step_plan(self.size, step)
        rank_plan = plan.rank_plan(step, self.rank)
        self.mirror.finish()
        result = self.stepper.run(rank_plan, payloads_of(rank_plan.packs, payloads, self.rank), 1.0)
        self.mirror.begin()
        return result.loss_sum / result.num_valid_tokens

    def leave(self) -> list[LocalShard]:
        """What this process can supply. Nothing of the generation is left."""
        broken = self.lost.exists()
        found = [*self.stepper.engine.local_shards(self.rank), *self.mirror.local_shards()]
        self.checkpointer.close(0.0)
        self.marks.remove()
        self.stepper.engine.release()
        self.mirror.close()
        if not broken:
            self.stepper.transport.close()
        del self.stepper, self.mirror, self.checkpointer
        world = weakref.ref(dist.group.WORLD)
        destroy_world(lambda: None, choose("cpu"), broken)
        # though FSDP's modules are in cycles, and still there
        assert world() is None, "a group that is referred to keeps its sockets open"
        if self.sync == "micro_batch":
            # whole ones where a forward broke off
            left = [parameter.to_local() if isinstance(parameter, DTensor) else parameter
                    for parameter in self.adapter.module.parameters()]  # type: ignore[union-attr]
            assert sum(tensor.untyped_storage().nbytes() for tensor in left) == 0
            self.adapter = None
        return found


def step_plan(size: int, step: int) -> tuple[Plan, dict[str, Payload]]:
    """Three packs in two micro-batches; the first on all ranks, so that every rank needs every other."""
    everyone = list(range(size))
    return make_plan(size, [[(everyone, [[40 + step, (1, 4, 8), 20], [25]], None)],
                            [([0], [[20 + step]], None), *([([1], [[12, (1, 4, 4), 13]], None)] if size > 1 else [])],
                            *([] if size > 1 else [[([0], [[12, (1, 4, 4), 13]], None)]])])


def supplied(
    found: list[LocalShard], survivors: Sequence[int], old_size: int, old_rank: int, version: int
) -> list[LocalShard]:
    """What `old_rank` supplies: its own shard and those of the dead that it keeps."""
    owners = {old_rank} | {owner for owner in range(old_size) if owner not in survivors and KEEPERS[owner] == old_rank}
    return [shard for shard in found if shard.owner in owners and shard.version == version]


CHANGES = [(4, 3), (3, 5), (2, 1), (1, 2), (5, 2)]
MODES = [("step", "step"), ("micro_batch", "micro_batch"), ("step", "micro_batch"), ("micro_batch", "step")]


def changed(process: int, port: int, run_dir: str, cases: list[tuple[int, int, str, str]]) -> list[str]:
    """Whether each case's parameters and moments are, bit for bit, the version loaded by the ranks that are left, of
    which one at least is lost.
    """
    torch.manual_seed(process)
    member = Member(port, run_dir)
    wrong = []
    for number, (old_size, new_size, old_sync, new_sync) in enumerate(cases):
        survivors = list(range(min(new_size, max(1, old_size - 1))))
        found: list[LocalShard] = []
        expected: dict[str, Any] = {}
        member.adapter = None
        if process < old_size:
            member.join(process, old_size, old_sync)
            member.step(0)
            member.mirror.finish()
            expected = {kind: whole(member.stepper.engine, kind) for kind in KINDS}  # type: ignore[arg-type]
            parameters = member.stepper.engine.full_parameters()
            found = supplied(member.leave(), survivors, old_size, process, 1)
        else:
            member.generation += 1
        joiners = [other for other in range(5) if other not in survivors]
        order = [*survivors, *joiners][:new_size]
        if process not in survivors:
            member.adapter, found = None, []
        if new_sync == "micro_batch":
            member.adapter = None
        elif old_sync == "step" and process in survivors:
            assert all(parameter.untyped_storage().nbytes() <= 4
                       for parameter in member.adapter.module.parameters()), "released"
        if process in order:
            member.join(order.index(process), new_size, new_sync, found)
            engine = member.stepper.engine
            after = {kind: whole(engine, kind) for kind in KINDS}  # type: ignore[arg-type]
            resident = engine.full_parameters()
            if process in survivors:
                same = engine.state_version == 1 and all(torch.equal(after[kind][name], expected[kind][name])
                                                         for kind in KINDS for name in engine.shapes)
                if process == 0:
                    same = (
                        same
                        and resident.keys() == parameters.keys()
                        and all(torch.equal(resident[name], parameters[name]) for name in resident)
                    )
                if not same:
                    wrong.append(f"case {number}: {cases[number]} on process {process}")
            member.leave()
        else:
            member.generation += 1
    return wrong


@pytest.mark.parametrize(
    ("modes", "changes"),
    [
        *zip(MODES, ([(4, 3), (1, 2)], [(2, 1), (3, 5)], [(5, 2)], [(3, 5)])),
        *[pytest.param(modes, CHANGES, marks=pytest.mark.slow) for modes in MODES],
    ],
)
def test_parameters_and_moments_are_bit_for_bit_those_of_the_version_loaded(
    tmp_path: Path, modes: tuple[str, str], changes: list[tuple[int, int]]
) -> None:
    assert run_processes(changed, 5, str(tmp_path), [(*sizes, *modes) for sizes in changes], timeout_s=240) == [[]] * 5


def undisturbed(process: int, port: int, run_dir: str, num_steps: int) -> list[float]:
    member = Member(port, run_dir)
    member.join(0, 1, "step")
    return [member.step(step) for step in range(num_steps)]


def die(member: Member) -> None:
    member.lost.touch()
    os.kill(os.getpid(), signal.SIGKILL)


def killed_in_a_step(process: int, port: int, run_dir: str, sync: str, where: str, num_steps: int) -> Any:
    """Process 2 of 4 is killed in step 2; the losses of all steps, those after it on three ranks."""
    member = Member(port, run_dir)
    member.join(process, 4, sync)
    losses = [member.step(step) for step in range(2)]
    if process == 2:
        layer = member.adapter.module.model.language_model.layers[1]  # type: ignore[union-attr, index]
        if where == "forward":
            layer.register_forward_pre_hook(lambda *_: die(member))
        else:
            layer.register_full_backward_hook(lambda *_: die(member))
    try:
        member.step(2)
        said = ""
    except RuntimeError as error:
        said = type(error).__name__
        error.__traceback__ = None
    found = supplied(member.leave(), [0, 1, 3], 4, process, 2)
    member.join({0: 0, 1: 1, 3: 2}[process], 3, sync, found)
    losses += [member.step(step) for step in range(2, num_steps)]
    member.mirror.finish()
    held = {shard.owner: shard.version for shard in member.mirror.local_shards()}
    member.leave()
    return said, losses, held, len(os.listdir("/proc/self/fd")), threading.active_count()


@pytest.mark.parametrize(("sync", "where"), [("step", "forward"), ("step", "backward"), ("micro_batch", "forward"),
                                             ("micro_batch", "backward")])
def test_a_rank_killed_in_a_step_is_survived_and_the_loss_goes_on(tmp_path: Path, sync: str, where: str) -> None:
    (expected,) = run_processes(undisturbed, 1, str(tmp_path / "undisturbed"), 6)
    results = run_processes(killed_in_a_step, 4, str(tmp_path / "killed"), sync, where, 6, mortal=[2])
    assert results[2] is None
    for new_rank, (said, losses, held, _, _) in enumerate(result for result in results if result is not None):
        assert said, "the step broke off on every rank"
        assert losses == pytest.approx(expected, rel=1e-5)
        assert held == [{1: 6, 2: 6}, {0: 6}, {}][new_rank]


def reformed(process: int, port: int, run_dir: str, sync: str, num_changes: int) -> list[tuple[int, int]]:
    """Process 2 leaves in the midst of a step, its sockets closed, and comes back; what is open after each change."""
    member = Member(port, run_dir)
    found: list[LocalShard] | None = None
    opened = []
    for step in range(num_changes):
        size = 3 - step % 2
        if process < size:
            member.join(process, size, sync, found)
            member.step(step)
            member.checkpointer.begin(step)
            if process == 2:
                member.mirror.finish()
                member.lost.touch()
            else:
                if size == 3:
                    with pytest.raises(RuntimeError) as raised:
                        member.step(step + 1)
                    raised.value.__traceback__ = None
                    del raised
                else:
                    member.mirror.finish()
            found = supplied(member.leave(), [0, 1], size, process, step + 1)
        else:
            member.generation += 1
        if process == 2:
            member.adapter, found = None, []
        for thread in threading.enumerate():
            if thread.name.startswith("save-"):
                thread.join(20.0)  # a save that was left ends when both have destroyed its group
        opened.append((len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))))
    return opened


@pytest.mark.parametrize(("sync", "num_changes"), [("step", 6), ("micro_batch", 6),
                                                   *[pytest.param(sync, 50, marks=pytest.mark.slow)
                                                     for sync in ("step", "micro_batch")]])
def test_nothing_stays_open_over_many_changes_of_membership(tmp_path: Path, sync: str, num_changes: int) -> None:
    for opened in run_processes(reformed, 3, str(tmp_path), sync, num_changes, timeout_s=280)[:2]:
        files, threads = zip(*opened)
        assert min(files[-3:]) == min(files[:3]), opened
        # a group has three; one that has just ended may still be counted
        assert min(threads[-3:]) <= min(threads[:3]) + 1, opened
