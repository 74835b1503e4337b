"""Everything that one rank holds in one generation: its place in the world, the engine, the transport, its checkpoints,
its mirror.

Plain torch: a Ray worker wraps it (`worker.py`), and benchmarks run the same object under plain torch.distributed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from threading import Lock
from typing import Any

import torch.distributed as dist
from torch.nn import Module

from dhp_ray.comm.device import Accelerator
from dhp_ray.comm.expert_group import ExpertGroup, open_expert_group
from dhp_ray.comm.progress import Progress
from dhp_ray.comm.transport import Transport
from dhp_ray.comm.world import destroy_world, init_world, make_group, open_store
from dhp_ray.config import Config
from dhp_ray.data.processor import Processor
from dhp_ray.measure.member import Member
from dhp_ray.measure.rounds import MAX_TOKENS, PartResult, Spec, spec_of
from dhp_ray.model.language_model import LanguageModel
from dhp_ray.runtime.messages import Membership
from dhp_ray.runtime.worker.export import export_model, save_folder
from dhp_ray.runtime.worker.run_model import build_adapter, untrained_weights
from dhp_ray.storage import STORAGE_TIMEOUT_S, Folder
from dhp_ray.train.engine import Engine
from dhp_ray.train.flat_engine import FlatEngine
from dhp_ray.train.greedy import greedy_answers
from dhp_ray.train.layer_marks import LayerMarks, layers_by_name
from dhp_ray.train.rank_step import MicroBatchStep, RankStep
from dhp_ray.train.results import StepResult
from dhp_ray.train.sharded_engine import ShardedEngine
from dhp_ray.train.state.checkpoint import Checkpointer
from dhp_ray.train.state.optimizer import OptimizerSettings, learning_rate_factor
from dhp_ray.train.state.peer_replica import PeerReplica
from dhp_ray.train.state.reshard import reshard
from dhp_ray.train.state.shards import LocalShard
from dhp_ray.train.step_inputs import StepInputs

MeasuredPart = tuple[Spec, PartResult | None]
"""What is measured, and a rank's result of one part (None: there is nothing of it to measure)."""


class Rank:
    """One member of one generation. `adapter`: a model; its state is loaded later if `keeps_state`, else its weights
    are the state. `progress`: where the training thread is; others may abort it. ValueError: the model cannot be
    trained like this. RendezvousError: the other ranks did not come.
    """

    def __init__(
        self, config: Config, membership: Membership, accelerator: Accelerator, adapter: LanguageModel | None = None,
        keeps_state: bool = False, progress: Progress | None = None,
    ) -> None:
        self.config, self.membership, self.accelerator = config, membership, accelerator
        rank, world_size = membership.rank, membership.world_size
        accelerator.compute_in(config.train.precision)
        if config.train.deterministic:
            accelerator.compute_deterministically()
        self.device = accelerator.torch_device()
        self.adapter = adapter or build_adapter(config)
        self.mode = membership.mode_in(config)
        self.adapter.set_activation_checkpointing(self.mode.recomputes != "false", self.mode.recomputes == "selective")
        timeout = timedelta(seconds=config.comm.timeout_s)
        store = open_store(membership.store_host, membership.store_port, timeout)
        progress = progress or Progress(self.device)
        progress.stage = f"generation {membership.generation}"
        with progress.waiting("the other ranks"):
            init_world(store, membership.generation, rank, world_size, accelerator, timeout)
        world = dist.group.WORLD if world_size > 1 else None
        self.state_group = self._new_state_group()
        mirrors = world_size > 1 and bool(membership.replica_ranks)
        mirror_group = make_group(range(world_size), "gloo", timeout) if mirrors else None
        capacity = membership.pool_groups or accelerator.pool_groups(accelerator.memory_bytes())
        transport = Transport(config.comm.transport, rank, world_size, accelerator, capacity, timeout, progress)
        self.engine = self._engine(world, not keeps_state, progress)
        try:
            self._equip(mirror_group, transport, world, progress)
        except BaseException:
            self.engine.release()  # the next engine over this adapter must not find this one's hooks
            raise

    def _equip(
        self, mirror_group: dist.ProcessGroup | None, transport: Transport, world: dist.ProcessGroup | None,
        progress: Progress,
    ) -> None:
        """Make what works on the engine: the mirror, the step, the checkpoints."""
        config, membership, rank = self.config, self.membership, self.membership.rank
        self.mirror = PeerReplica(self.engine, rank, membership.replica_ranks, mirror_group,
                             snapshot=config.elastic.mirror_every_steps not in ("0", "1"))
        self._mirror_lock = Lock()
        # whether this step waits for the last copies; the first step does, because until then only the previous
        # generation has whole ones
        self._finishes = True
        kind = MicroBatchStep if self.mode.sync == "micro_batch" else RankStep
        self.stepper = kind(self.adapter, self.engine, transport, world, self.device, before_update=self._before_update)
        folder = Folder(config.run.dir)
        self.scratch = None if folder.local_path() else tempfile.TemporaryDirectory(
            # an abandoned save may still write there
            prefix="dhp_ray_", dir=save_folder(config), ignore_cleanup_errors=True)
        self.checkpointer = Checkpointer(self.engine, rank, self.state_group,
                                         Path(self.scratch.name) if self.scratch else None, folder,
                                         membership.generation, untrained_weights(self.adapter))
        if rank == 0 and self.checkpointer.base:
            assert self.checkpointer.base.fingerprint  # of the files as they are now
        self.layer_marks = LayerMarks(self._layers(), progress, gathered=isinstance(self.engine, ShardedEngine))

    def load_state(self, supplies: Sequence[LocalShard]) -> None:
        """Take over the state of an earlier generation; every rank calls this with what it is to supply."""
        with self.engine.progress.waiting("the state of other ranks"):
            state = reshard(supplies, self.engine.pieces, self.engine.shard_size, self.membership.rank,
                            self.state_group)
        self.engine.load_state(state)

    def run(
        self, inputs: StepInputs, learning_rate_factor: float, data_wait_s: float = 0.0, mirrors: bool = False
    ) -> StepResult:
        """Run a step. If it `mirrors`, earlier copies arrive before its update, and new ones begin after it."""
        self._finishes = self._finishes or mirrors
        result = self.stepper.run(inputs, learning_rate_factor, data_wait_s)
        self._finishes = False
        if mirrors and result.applied:
            self.begin_mirror()
        return result

    def _before_update(self) -> None:
        if self._finishes:
            self.finish_mirror()

    def begin_mirror(self) -> None:
        """Start to copy the state to this rank's replica rank, if there is one. Every rank calls this alike."""
        with self._mirror_lock:
            self.mirror.begin()

    def finish_mirror(self) -> None:
        """Wait until the last copies have arrived. Any thread may call this, and more than once."""
        with self._mirror_lock:
            self.mirror.finish()

    def mirror_seconds(self) -> list[float]:
        """Return the seconds of the copies that have arrived since the last call."""
        with self._mirror_lock:
            seconds, self.mirror.seconds = self.mirror.seconds, []
        return seconds

    def renew_state_group(self) -> None:
        """Replace the group of checkpoints, which a failed save breaks. Every rank calls this, between steps."""
        dist.destroy_process_group(self.state_group)
        self.state_group = self._new_state_group()
        self.checkpointer.renew(self.state_group)

    def local_shards(self) -> list[LocalShard]:
        """Return every complete shard version that this rank has: its own and those that it keeps for others."""
        found = {(shard.owner, shard.version): shard
                 for shard in [*self.mirror.local_shards(), *self.engine.local_shards(self.membership.rank)]}
        return list(found.values())

    def answer(self, inputs: StepInputs, sample_ids: Sequence[str], processor: Processor) -> list[str]:
        """Return the answer to each of `sample_ids`, the samples of all ranks. Every rank calls this and gets all."""
        named = getattr(self.adapter.module.generation_config, "eos_token_id", None)
        found = greedy_answers(self.stepper, inputs, sample_ids, self.config.eval.max_new_tokens,
                               processor.end_ids(named), processor.token_ids["pad"])
        return [processor.text_of(tokens) for tokens in found]

    def measure(self, part: str, tokens_per_rank: int) -> MeasuredPart:
        """Measure a part, with packs of up to MAX_TOKENS; the state is useless afterwards. Every rank calls this."""
        membership, tokens = self.membership, min(tokens_per_rank, MAX_TOKENS[self.accelerator.name])
        nodes = membership.nodes or ("",) * membership.world_size
        spec = spec_of(self.config, self.adapter.shape, self.mode.sync, nodes, tokens)
        member = Member(membership.rank, spec, self.stepper, self.config.train.precision)
        return spec, member.measure(part) if part in spec.parts() else None

    def learning_rate_factor(self, step: float, total_steps: int) -> float:
        train = self.config.train
        return learning_rate_factor(step, total_steps, train.warmup_steps, train.min_learning_rate_ratio)

    def export(self, name: str, save_processor: Callable[[Path], None]) -> None:
        export_model(self.config, self.adapter, self.engine, self.membership.rank, self.membership.world_size,
                     self.state_group, save_processor, name)

    def close(self, broken: bool = False) -> None:
        """Leave the generation. `broken`: peers may be gone, so wait for nothing; shards taken before stay valid."""
        self.checkpointer.close(timeout_s=0.0 if broken else None)
        destroy_world(lambda: self._let_go(broken), self.accelerator, broken)
        if self.scratch:
            self.scratch.cleanup()

    def _let_go(self, broken: bool) -> None:
        """Drop every reference to a group: one that is left keeps sockets open, and peers waiting."""
        self.layer_marks.remove()
        if not broken:
            self.stepper.transport.close()
        self.mirror.close()
        self.engine.release()
        gone: Any = None
        self.stepper = self.checkpointer = self.mirror = self.state_group = gone

    def _new_state_group(self) -> dist.ProcessGroup:
        """Make the group for what is in host memory: checkpoints, the model's files, re-sharding."""
        return make_group(range(self.membership.world_size), "gloo", timedelta(seconds=self.config.comm.timeout_s),
                          collective_timeout=timedelta(seconds=STORAGE_TIMEOUT_S))

    def _layers(self) -> dict[str, Module]:
        """Return the modules to mark, by name: all layers, and with FSDP, which gathers it too, the whole model."""
        if not isinstance(self.engine, ShardedEngine):
            return layers_by_name(self.adapter)
        experts = self.adapter.experts() if self.engine.expert_parallel else []
        return layers_by_name(self.adapter, *experts) | {"model": self.engine.root}

    def _engine(self, world: dist.ProcessGroup | None, initialize: bool, progress: Progress) -> Engine:
        settings, precision, rank = self._optimizer_settings(), self.config.train.precision, self.membership.rank
        if self.mode.sync == "micro_batch":
            assert dist.group.WORLD is not None
            return ShardedEngine(self.adapter, settings, dist.group.WORLD, rank, self.device, precision, progress,
                                 initialize, self._expert_group(progress))
        return FlatEngine(self.adapter.module, settings, world, self.membership.world_size, rank, precision,
                          initialize=initialize, progress=progress, weights=self.adapter.weights,
                          device=self.device)

    def _expert_group(self, progress: Progress) -> ExpertGroup | None:
        """Make the groups of ranks that share experts; None if each rank gathers all of a layer's."""
        rank, num_ranks = self.membership.rank, self.membership.world_size
        size = self.adapter.shape.ranks_that_share(self.mode.expert_parallel, num_ranks)
        if size == 1:
            return None
        return open_expert_group(size, rank, num_ranks, self.accelerator.backend,
                                 timedelta(seconds=self.config.comm.timeout_s), progress)

    def _optimizer_settings(self) -> OptimizerSettings:
        train = self.config.train
        vision = train.vision_learning_rate or train.learning_rate
        return OptimizerSettings(
            learning_rate_of=lambda name: vision if self.adapter.is_vision(name) else train.learning_rate,
            decays=self.adapter.decays, weight_decay=train.weight_decay, betas=(train.adam_beta1, train.adam_beta2),
            eps=train.adam_eps, clip_norm=train.clip_norm, is_vision=self.adapter.is_vision)
