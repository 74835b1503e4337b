"""The Ray actor of one rank: it trains in one thread, makes the next step's inputs in another, and answers in others.

A worker outlives generations. When a call fails, it keeps its state, leaves the generation at once, so that closed
sockets free its peers, and waits to be told to join the next.
"""

from __future__ import annotations

import ctypes
import gc
import os
import pickle
import shutil
import traceback
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from threading import Lock
from time import perf_counter
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import ray

from dhp_ray.config import Config
from dhp_ray.runtime.messages import FromCheckpoint, FromMemory, HeldShards, Membership, Ran, RunError, Status, words_of
from dhp_ray.schema import MAX_MIRROR_STEPS

# The job's process imports this file to make the actors, and needs nothing of what takes seconds to import.
if TYPE_CHECKING:
    from dhp_ray.model.language_model import LanguageModel
    from dhp_ray.runtime.worker.rank import MeasuredPart, Rank
    from dhp_ray.train.results import StepResult
    from dhp_ray.train.state.shards import LocalShard
    from dhp_ray.train.step_inputs import StepInputs


CONCURRENCY_GROUPS = {"prefetch": 1, "control": 4}  # threads in addition to the one that trains
RESULTS_KEPT = 3  # the steps that a lost driver may be behind, and one more
VERSIONS_KEPT = 3 * MAX_MIRROR_STEPS + 2  # whose last step is known: those since the last mirrored but one, and more

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def training(
    method: Callable[Concatenate[Worker, Arguments], Result],
) -> Callable[Concatenate[Worker, Arguments], Result]:
    """A call of the training thread. When it fails, the worker leaves its generation and the caller gets one line."""

    @wraps(method)
    def call(self: Worker, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        self.call = method.__name__
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            failure = self._fall(error)
        finally:
            self.call = ""
        raise failure  # out here: the error's frames would keep process groups alive

    return call


class Worker:
    """A long-lived member of the worker group, one a rank."""

    def __init__(self, config: Config) -> None:
        gc.disable()  # collections would take a fifth of the time to import what methods import below
        for part in ("prefetch", "rank"):
            import_module(f"dhp_ray.runtime.worker.{part}")
        gc.enable()
        from dhp_ray.comm.progress import Progress

        self.config = config
        self.rank: Rank | None = None
        self.adapter: LanguageModel | None = None
        self.unused = False  # the adapter has its initial weights
        self.prefetched: dict[str, StepInputs] = {}  # by plan id
        self.kept: list[tuple[int, int, LocalShard]] = []  # generation, its world size, and what is left of it here
        self.ran: dict[int, Ran] = {}
        self.steps: dict[int, int] = {}  # the last step that left each state version
        self.generation = self.aborted_generation = 0
        self.store: tuple[str, int] | None = None  # where the ranks of its generation meet
        self.call = self.error = ""
        self.num_decoded = 0  # images and videos
        self.progress = Progress()
        self.switching = Lock()  # held while the generation changes, and while it is aborted

    @ray.method(concurrency_group="control")
    def describe(self, device: str, probe: str) -> dict[str, Any]:
        """Return where this worker is and the memory of its device; also checks that it reaches the run folder."""
        from dhp_ray.comm.device import CPU, allow_streams, choose
        from dhp_ray.model.fused import operators_of, unfused_notice, unfused_states_notice
        from dhp_ray.runtime.worker.export import check_reached, save_folder
        from dhp_ray.runtime.worker.run_model import state_size
        from dhp_ray.storage import Folder

        streams = allow_streams()
        self.accelerator = choose(device)
        self.accelerator.activate()
        check_reached(Folder(self.config.run.dir), probe)
        size = state_size(self.config)
        told = [streams, unfused_notice("cuda"), unfused_states_notice("cuda", size.shape.language)
                ] if self.accelerator.name == "cuda" else []
        return {"pid": os.getpid(), "node_id": ray.get_runtime_context().get_node_id(),
                "device": self.accelerator.name, "told": told,
                **size._asdict(),
                "device_name": self.accelerator.model_name(), "memory_bytes": self.accelerator.memory_bytes(),
                "host_memory_bytes": CPU.memory_bytes(), "fused": operators_of(self.config.cluster.device) is not None,
                "save_free_bytes": shutil.disk_usage(save_folder(self.config)).free}

    @training
    def prepare(self) -> None:
        """Load what joining would take long for, while others still train."""
        from dhp_ray.data.processor import ProcessorSpec
        from dhp_ray.runtime.worker.run_model import build_adapter

        self.processor = ProcessorSpec.of(self.config.model, self.config.data).load()
        if self.adapter is None:
            self.adapter, self.unused = build_adapter(self.config), True

    @training
    def join(self, membership: Membership, origin: FromCheckpoint | FromMemory, step: int) -> int:
        """Enter a generation after `step`, with the state of `origin`; returns the state version."""
        import torch

        from dhp_ray.comm.progress import Progress
        from dhp_ray.data.processor import ProcessorSpec
        from dhp_ray.runtime.worker.rank import Rank

        torch.set_num_threads(max(1, int(self.config.cluster.cpus_per_worker)))  # of this thread, which runs the steps
        self.accelerator.activate()
        self._leave()
        # of those that broke before the end of their first step, the origin; the last one that trained has copies
        needed = {origin.generation, *(kept[0] for kept in self.kept[:1])} if isinstance(origin, FromMemory) else ()
        self.kept = [kept for kept in self.kept if kept[0] in needed]
        with self.switching:
            self.generation, self.error = membership.generation, ""
            self.store = (membership.store_host, membership.store_port)
            self.progress = Progress(self.accelerator.torch_device())
            if self.aborted_generation >= self.generation:  # before this call came
                self.progress.abort()
        self.prefetched.clear()
        self.processor = ProcessorSpec.of(self.config.model, self.config.data).load()
        if not gc.get_freeze_count():
            gc.freeze()  # what is loaded stays; scanning it would take most of each change of membership
        keeps_state, mode = isinstance(origin, FromMemory), membership.mode_in(self.config)
        # FSDP2 modules keep their mesh for life
        reusable = self.adapter if self.unused or (keeps_state and mode.sync == "step") else None
        if reusable is None:  # before the next one is built: there may not be room for both
            self.adapter = None
        self.unused = False
        self.rank = Rank(self.config, membership, self.accelerator, reusable, keeps_state, self.progress)
        self.adapter = self.rank.adapter
        if isinstance(origin, FromMemory):
            state = (origin.generation, origin.version)
            shards = [shard for generation, _, shard in self.kept
                      if (generation, shard.version) == state and shard.owner in origin.owners]
            self.rank.load_state(shards)
        elif origin.name:
            self.rank.checkpointer.load(origin.name)
        self.rank.begin_mirror()
        give_back_memory()
        self.ran = {number: ran for number, ran in self.ran.items() if number <= step}
        self.steps = {version: number for version, number in self.steps.items()
                      if number < step} | {self.rank.engine.state_version: step}
        return self.rank.engine.state_version

    @ray.method(concurrency_group="prefetch")
    def prefetch(self, packed: bytes, references: list[ray.ObjectRef]) -> dict[str, str]:
        """Fetch, decode and collate what a packed slice needs; returns the samples that failed, with reasons."""
        from dhp_ray.data.blocks import fetch_rows
        from dhp_ray.runtime.rank_slices import unpacked_slice
        from dhp_ray.runtime.worker.prefetch import encoded_grids, load_inputs, num_decoders

        assert self.adapter is not None
        plan, blocks = unpacked_slice(packed, references)
        self.accelerator.activate()  # each thread has its own current device
        self.prefetched[plan.plan_id], failures = load_inputs(
            plan, fetch_rows(blocks, encoded_grids(plan)), self.processor, self.adapter, num_decoders(self.config),
            self.config.train.precision, self.accelerator.name != "cpu", self._count_decoded)
        return failures

    @training
    def run(self, packed: bytes) -> StepResult:
        """Run a prefetched plan of a step: a `StepOrder`, pickled."""
        step, plan_id, placeholders, schedule_step, total_steps, mirrors = pickle.loads(packed)
        wait, factor = perf_counter(), self.member.learning_rate_factor(schedule_step, total_steps)
        inputs = self._take(step, plan_id, placeholders)
        result = self.member.run(inputs, factor, perf_counter() - wait, mirrors)
        self.kept.clear()  # every rank has its copies of this generation: the previous one's are not needed
        self.ran[step] = Ran(result, placeholders)
        self.ran.pop(step - RESULTS_KEPT, None)
        self.steps[result.state_version] = step
        if len(self.steps) > VERSIONS_KEPT:
            del self.steps[min(self.steps)]
        saved, error = self.member.checkpointer.poll()
        return result._replace(saved_steps=tuple(saved), save_error=error)

    @ray.method(concurrency_group="control")
    def mirrored(self) -> list[float]:
        """Wait for the copies that are under way; returns the seconds of all that arrived since the last call."""
        rank = self.rank
        if rank is None:
            raise RunError("has left its generation: the copies of its state may not have arrived")
        rank.finish_mirror()
        return rank.mirror_seconds()

    @property
    def member(self) -> Rank:
        """This worker, while it is in a generation."""
        assert self.rank is not None
        return self.rank

    @training
    def evaluate(self, number: int, plan_id: str, placeholders: dict[str, str]) -> tuple[float, int]:
        """Return the loss sum and the valid tokens, over all ranks, of a prefetched batch of held-out samples."""
        return self.member.stepper.evaluate(self._take(number, plan_id, placeholders))

    @training
    def answer(self, number: int, plan_id: str, placeholders: dict[str, str], sample_ids: list[str]) -> list[str]:
        """Return greedy answers to a prefetched batch of held-out prompts, `sample_ids`; every rank has all of them."""
        return self.member.answer(self._take(number, plan_id, placeholders), sample_ids, self.processor)

    def _take(self, step: int, plan_id: str, placeholders: dict[str, str]) -> StepInputs:
        """Return the inputs of the plan that all ranks are told to run; drops those of other plans of this step."""
        if plan_id not in self.prefetched:
            here = ", ".join(self.prefetched) or "none"
            raise RunError(f"step {step}: told to run plan {plan_id}; prefetched here: {here}")
        inputs = self.prefetched.pop(plan_id)
        for other in [other for other, held in list(self.prefetched.items()) if held.plan.step == step]:
            del self.prefetched[other]
        assert self.adapter is not None
        inputs.mask(placeholders, self.adapter)
        return inputs

    @training
    def measure(self, part: str, tokens_per_rank: int) -> MeasuredPart:
        """Measure a part of what packs cost, with all ranks; the state is useless afterwards."""
        return self.member.measure(part, tokens_per_rank)

    @training
    def save(self, step: int) -> None:
        """Stage the state and write it in the background; `run` and `finish_save` report when it is whole."""
        self.member.checkpointer.begin(step)

    @training
    def finish_save(self) -> tuple[list[int], str]:
        self.member.checkpointer.finish()
        return self.member.checkpointer.poll()

    @training
    def renew_state_group(self) -> None:
        self.member.renew_state_group()

    @training
    def export(self, name: str) -> None:
        """Write the trained model, its tokenizer and processor to the run folder (all ranks write, and call this)."""
        self.member.export(name, self.processor.save)

    @training
    def leave(self) -> None:
        if self.rank is not None:
            self.rank.close()
            self.rank = None

    @ray.method(concurrency_group="control")
    def abort_generation(self, generation: int) -> None:
        """Stop waiting for the ranks of a generation (or an earlier one); call it again for groups made meanwhile."""
        from dhp_ray.comm.world import close_store_connections

        with self.switching:
            self.aborted_generation = max(self.aborted_generation, generation)
            if self.store and self.generation <= generation:
                self._abort()
                close_store_connections(*self.store)

    @ray.method(concurrency_group="control")
    def status(self) -> Status:
        call = self.call
        passed = self.progress.passed()
        # a rank that decodes does not stand still, unless its training thread is to run something
        beside = self.progress.parts_copied if call else self.num_decoded
        state = ((), {}, {}) if call else (self._held(), dict(self.ran), dict(self.steps))
        return Status(self.generation, call, str(passed) if call else "", bool(call) and passed.waits_for_peers,
                      f"{call} {passed.number} {beside}", self.error, *state)

    def _count_decoded(self) -> None:
        self.num_decoded += 1

    def _held(self) -> tuple[HeldShards, ...]:
        """Return the shard versions that are here, by generation."""
        here = [(self.rank.membership.generation, self.rank.membership.world_size, shard)
                for shard in self.rank.local_shards()] if self.rank else []
        found: dict[tuple[int, int], dict[int, list[int]]] = {}
        for generation, world_size, shard in [*self.kept, *here]:
            found.setdefault((generation, world_size), {}).setdefault(shard.owner, []).append(shard.version)
        return tuple(HeldShards(*of, versions) for of, versions in found.items())

    def _abort(self) -> None:
        """End what the training thread and the device wait for in this generation."""
        from dhp_ray.comm.world import abort_groups

        if not self.progress.aborted:
            self.progress.abort()
            self.accelerator.stop()
        abort_groups()

    def _leave(self) -> None:
        """Leave the generation and keep the shards that this worker holds of it."""
        from dhp_ray.comm.world import destroy_world

        with self.switching:  # what the device waits for must end before its memory can be read
            self._abort()
            self.accelerator.restart()
        rank, self.rank = self.rank, None
        if rank is None:
            destroy_world(lambda: None, self.accelerator, broken=True)  # a join that failed half-way
            return
        # in host memory: the device needs the room for the next engine
        self.kept += [(rank.membership.generation, rank.membership.world_size, shard.on_host(self.progress.count_part))
                      for shard in rank.local_shards()]
        rank.close(broken=True)

    def _fall(self, error: Exception) -> RunError:
        """Leave the generation after an error; returns the error as one line."""
        from dhp_ray.comm.world import is_peer_loss

        text = words_of(error)
        if not (self.progress.aborted or is_peer_loss(error)):
            self.error = text
        traceback.clear_frames(error.__traceback__)  # locals hold packs, links and through them process groups
        error.__traceback__ = error.__context__ = error.__cause__ = None
        try:
            self._leave()
        except Exception as failure:  # most likely of the device: this worker is unusable
            self.error = self.error or words_of(failure)
        gc.collect()
        return RunError(text)


def give_back_memory() -> None:
    """Return freed memory to the system: glibc keeps it for its thread, and each generation has its own threads."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
