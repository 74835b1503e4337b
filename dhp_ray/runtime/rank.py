"""Everything that one rank holds: its place in the world, the model, the engine, the transport, its checkpoints.

Plain torch: a Ray worker wraps one (`worker.py`), and benchmarks run the same object under plain torch.distributed.
"""

from __future__ import annotations

import tempfile
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from dhp_ray.comm.device import Accelerator
from dhp_ray.comm.transport import open_transport
from dhp_ray.config import Config
from dhp_ray.data.tokenizer import byte_tokenizer, special_token_ids
from dhp_ray.model.build import build_model
from dhp_ray.runtime.messages import Membership
from dhp_ray.storage import Folder
from dhp_ray.train.checkpoint import Checkpointer
from dhp_ray.train.engine import FlatEngine, OptimizerSettings
from dhp_ray.train.lockstep import LockstepStep
from dhp_ray.train.schedule import learning_rate_factor
from dhp_ray.train.sharded import ShardedEngine
from dhp_ray.train.step import RankStep
from dhp_ray.train.versions import Engine


def token_ids(config: Config) -> dict[str, int] | None:
    """The special token ids that a preset is built over; a model folder has its own."""
    return special_token_ids(byte_tokenizer()) if config.model.preset else None


class Rank:
    """One member of the group.

    Raises:
        ValueError: one line, when the model cannot be had.
    """

    def __init__(self, config: Config, membership: Membership, accelerator: Accelerator) -> None:
        self.config, self.membership = config, membership
        accelerator.compute_in(config.train.precision)
        self.device = accelerator.torch_device()
        timeout = timedelta(seconds=config.comm.timeout_s)
        store = dist.TCPStore(membership.store_host, membership.store_port, is_master=False, timeout=timeout)
        dist.init_process_group(
            accelerator.backend, store=dist.PrefixStore(f"generation-{membership.generation}", store), timeout=timeout,
            rank=membership.rank, world_size=membership.world_size,
            **({"device_id": self.device} if accelerator.name == "cuda" else {}))  # type: ignore[arg-type]
        world = dist.group.WORLD if membership.world_size > 1 else None
        self.save_group = dist.new_group(list(range(membership.world_size)), backend="gloo", timeout=timeout)
        self.adapter = build_model(config.model.preset, config.model.path, token_ids(config), config.seed)
        self.adapter.freeze(config.train.freeze)
        if config.train.activation_checkpointing:
            self.adapter.set_activation_checkpointing()
        self.engine = self._sharded_engine() if config.planner.sync == "micro_batch" else self._flat_engine(world)
        transport = open_transport(config.comm.transport, membership.rank, membership.world_size, accelerator, config.comm.pool_groups, timeout)
        kind = LockstepStep if config.planner.sync == "micro_batch" else RankStep
        self.stepper = kind(self.adapter, self.engine, transport, world, self.device)
        self.scratch = tempfile.TemporaryDirectory(prefix="dhp_ray_")
        self.checkpointer = Checkpointer(self.engine, membership.rank, membership.world_size, self.save_group, Path(self.scratch.name), Folder(config.run.dir))

    def learning_rate_factor(self, step: int, total_steps: int) -> float:
        train = self.config.train
        return learning_rate_factor(step, total_steps, train.warmup_steps, train.schedule, train.min_learning_rate_ratio)

    def export(self, folder: Path) -> None:
        """Gather the fp32 parameters (all ranks call this) and write them as a Hugging Face folder (rank 0 does)."""
        state = self.engine.full_parameters()
        if self.membership.rank == 0:
            self.adapter.save(folder, state)

    def close(self) -> None:
        self.checkpointer.close()
        self.stepper.transport.close()
        dist.destroy_process_group()
        self.scratch.cleanup()

    def _flat_engine(self, world: dist.ProcessGroup | None) -> Engine:
        train = self.config.train
        self.adapter.module.to(self.device)  # type: ignore[arg-type]
        return FlatEngine(self.adapter.module, self._optimizer_settings(), world, self.membership.world_size, self.membership.rank,
                          train.precision, int(train.bucket_mb * 2**20))

    def _sharded_engine(self) -> Engine:
        assert dist.group.WORLD is not None
        return ShardedEngine(self.adapter, self._optimizer_settings(), dist.group.WORLD, self.membership.rank, self.device, self.config.train.precision)

    def _optimizer_settings(self) -> OptimizerSettings:
        train = self.config.train
        vision = train.vision_learning_rate or train.learning_rate
        return OptimizerSettings(
            learning_rate_of=lambda name: vision if self.adapter.is_vision(name) else train.learning_rate,
            decays=self.adapter.decays, weight_decay=train.weight_decay, betas=(train.adam_beta1, train.adam_beta2),
            eps=train.adam_eps, clip_norm=train.clip_norm)
