"""A process that goes through several memberships, with what a worker has and in the order of its calls."""

from __future__ import annotations

import os
import signal
import threading
import time
import weakref
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from dhp_ray.comm.device import choose
from dhp_ray.comm.progress import Progress
from dhp_ray.comm.transport import Transport
from dhp_ray.comm.world import abort_groups, destroy_world
from dhp_ray.model.language_model import LanguageModel
from dhp_ray.planner.plan.types import Plan
from dhp_ray.storage import Folder
from dhp_ray.train.collate import Payload
from dhp_ray.train.engine import Engine
from dhp_ray.train.flat_engine import FlatEngine
from dhp_ray.train.layer_marks import LayerMarks, layers_by_name
from dhp_ray.train.rank_step import MicroBatchStep, RankStep
from dhp_ray.train.sharded_engine import ShardedEngine
from dhp_ray.train.state.checkpoint import Checkpointer
from dhp_ray.train.state.peer_replica import PeerReplica
from dhp_ray.train.state.reshard import reshard
from dhp_ray.train.state.shards import LocalShard
from dhp_ray.train.step_inputs import collated
from tests.packs import rough_model, with_images_apart
from tests.train.test_sharded_engine import make_plan, payloads_of, settings

CPU = torch.device("cpu")
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
        self.switching = threading.Lock()
        self.adapter: LanguageModel | None = None
        self.apart: bool | None = None
        """Images are encoded apart from the packs: activations are kept or not. None: in the packs."""

    def control(self) -> None:
        """The thread that ends what this process waits for, once a peer of its generation is lost."""
        generation, progress = self.generation, self.progress
        while True:
            with self.switching:
                if self.generation != generation:
                    return
                if self.lost.exists():
                    progress.abort()
                    abort_groups()
            time.sleep(0.01)

    @property
    def lost(self) -> Path:
        """A file that is there once a peer of this generation is lost."""
        return Path(self.run_dir) / f"lost-{self.generation}"

    def join(
        self, rank: int, size: int, sync: str, supplies: Sequence[LocalShard] | None = None, recomputes: bool = False
    ) -> None:
        """Form a generation; all of its members come with the same number of generations before it. `supplies` None
        begins anew.
        """
        with self.switching:
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
        self.adapter.set_activation_checkpointing(recomputes)
        if sync == "micro_batch":
            engine: Engine = ShardedEngine(self.adapter, settings(self.adapter), world, rank, CPU,
                                           progress=self.progress)
        else:
            engine = FlatEngine(self.adapter.module, settings(self.adapter), world if size > 1 else None, size, rank,
                                "fp32", 200_000, initialize=supplies is None, progress=self.progress)
        if supplies is not None:
            engine.load_state(reshard(supplies, engine.pieces, engine.shard_size, rank, save_group))
        transport = Transport("pool", rank, size, choose("cpu"), 16, TIMEOUT, self.progress)
        self.marks = LayerMarks(layers_by_name(self.adapter), self.progress, gathered=sync == "micro_batch")
        self.stepper = (MicroBatchStep if sync == "micro_batch"
                        else RankStep)(self.adapter, engine, transport, world if size > 1 else None, CPU)
        self.mirror = PeerReplica(engine, rank, KEEPERS[:size], mirror_group)
        self.checkpointer = Checkpointer(engine, rank, save_group, Path(self.run_dir) / f"scratch_{rank}",
                                         Folder(f"{self.run_dir}/run"))
        self.mirror.begin()
        threading.Thread(target=self.control, name="control", daemon=True).start()

    def step(self, step: int) -> float:
        """The loss; the same samples on any number of ranks."""
        plan, payloads = step_plan(self.size, step, self.sync)
        if self.apart is not None:
            plan = with_images_apart(plan, self.apart)
        rank_plan = plan.rank_plan(step, self.rank)
        self.mirror.finish()
        own = payloads_of((*rank_plan.packs, *rank_plan.encoded), payloads, self.rank)
        result = self.stepper.run(collated(rank_plan, own, self.stepper.adapter), 1.0)
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


def step_plan(size: int, step: int, sync: str) -> tuple[Plan, dict[str, Payload]]:
    """Three packs in two micro-batches; the first on all ranks, so that every rank needs every other."""
    everyone = list(range(size))
    return make_plan(size, [[(everyone, [[40 + step, (1, 12, 10), 20], [25]], None)],
                            [([0], [[20 + step]], None), *([([1], [[12, (1, 4, 4), 13]], None)] if size > 1 else [])],
                            *([] if size > 1 else [[([0], [[12, (1, 4, 4), 13]], None)]])], sync=sync)


def supplied(
    found: list[LocalShard], survivors: Sequence[int], old_size: int, old_rank: int, version: int
) -> list[LocalShard]:
    """What `old_rank` supplies: its own shard and those of the dead that it keeps."""
    owners = {old_rank} | {owner for owner in range(old_size) if owner not in survivors and KEEPERS[owner] == old_rank}
    return [shard for shard in found if shard.owner in owners and shard.version == version]


def die(member: Member) -> None:
    member.lost.touch()
    os.kill(os.getpid(), signal.SIGKILL)
