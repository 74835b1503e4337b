"""Measures the costs of a configuration on this machine, without Ray: ranks are processes, one per device (on the CPU,
one per core), and this process collects their results.

    this process   store | start ranks | ---- progress, results of parts ---- | fit, cost file
    each rank      join as a worker would | part after part, with the other ranks | leave
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import NamedTuple, cast

from dhp_ray.comm.device import ACCELERATORS, Accelerator, choose, cores
from dhp_ray.config import CONF, Config, ConfigError, check_device
from dhp_ray.measure.cost_file import Measured, MeasuredSession, measured_cost
from dhp_ray.measure.rounds import PartResult, Spec
from dhp_ray.model.fused import operators_of
from dhp_ray.planner.cost.derived import Device, derived_cost, described
from dhp_ray.planner.cost.model import SYNCS, CostModel
from dhp_ray.planner.errors import PlanError
from dhp_ray.planner.memory.model import MemoryModel, MemorySettings
from dhp_ray.runtime.job.preflight import check_measurement_here, devices_here
from dhp_ray.runtime.messages import Membership, RunError
from dhp_ray.runtime.strategy import origin_of
from dhp_ray.runtime.worker.measuring import MAX_TOKENS, member_with, spec_of
from dhp_ray.runtime.worker.rank import Rank
from dhp_ray.runtime.worker.run_model import StateSize, state_size

JOIN_S = 300.0
"""Seconds that the ranks may take until the first of them reports something."""
SILENT_S = 900.0
"""Seconds that they may take from one report to the next."""

Progress = Callable[[str, float], None]
"""Called with what is measured, and with the share of all that is done."""


class Request(NamedTuple):
    """What to measure, and how. `ranks` 0: `cluster.num_workers`, or as many as there is room for if that is less."""

    name: str
    ranks: int = 0
    max_tokens: int = 0


def measure_here(config: Config, request: Request, progress: Progress = lambda what, share: None) -> Measured:
    """Measure and fit the costs of a configuration on this machine. ConfigError: a device, model or number that this
    machine does not have, or a damaged file of known costs. MeasureError: too few packs. RunError: a rank failed.
    """
    accelerator, size, num_ranks = _checked(config, request)
    syncs = SYNCS if config.planner.sync == "auto" else (config.planner.sync,)
    memory = memory_here(config, size, accelerator, syncs[0], num_ranks)
    tokens = max_tokens(request, memory, accelerator)
    specs = [spec_of(config, size.shape, sync, ["here"] * num_ranks, tokens) for sync in syncs]
    try:
        known = known_cost(config, memory, accelerator)
    except PlanError as error:
        raise ConfigError(str(error)) from None
    sessions = _collected(config, specs, accelerator, progress)
    origin = origin_of(config, memory, accelerator.name, accelerator.model_name(), num_ranks,
                       operators_of(config.cluster.device) is not None)
    origin = replace(origin, settings=dict(origin.settings) | {"sync": list(syncs)})
    return measured_cost(sessions, origin, memory, known, request.name)


def _checked(config: Config, request: Request) -> tuple[Accelerator, StateSize, int]:
    try:
        accelerator = choose(config.cluster.device)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    config.cluster.device = accelerator.name
    check_measurement_here(config, request.ranks)
    check_device(config)
    try:
        size = state_size(config)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return accelerator, size, request.ranks or min(devices_here(accelerator), config.cluster.num_workers)


def memory_here(
    config: Config, size: StateSize, accelerator: Accelerator, sync: str, num_ranks: int
) -> MemoryModel:
    """Return the memory model of a rank that trains like this on this machine's devices."""
    train = config.train
    return MemoryModel(size.shape, MemorySettings(
        sync=sync, world_size=num_ranks, precision=train.precision,
        recomputes=train.activation_checkpointing == "true", frozen=tuple(train.freeze), device=accelerator.name,
        largest_image=size.shape.image_tokens(config.data.max_pixels),
        adapters=size.adapters, drops=train.lora.dropout > 0))


def max_tokens(request: Request, memory: MemoryModel, accelerator: Accelerator) -> int:
    """Return the tokens of the largest pack on one rank: what was asked for, or as many as fit and are worth measuring.
    """
    memory_bytes = 0.8 * accelerator.memory_bytes() / (memory.settings.world_size if accelerator.name == "cpu" else 1)
    fitting = memory.tokens_that_fit(memory_bytes)
    if fitting < 1:
        needed = sum(memory.resident().values())
        raise ConfigError(f"model: its state needs {needed / 2**30:.3g} GiB on each of {memory.settings.world_size} "
                          f"ranks, which have {memory_bytes / 2**30:.3g} GiB; allowed: fewer ranks, or a smaller model")
    if request.max_tokens > fitting:
        raise ConfigError(f"max_tokens: got {request.max_tokens}; allowed: at most {fitting}, which fit on a rank")
    return request.max_tokens or min(fitting, MAX_TOKENS[accelerator.name])


def known_cost(config: Config, memory: MemoryModel, accelerator: Accelerator) -> CostModel:
    """Return the costs that are known without measuring: from the device's description, or the file of its kind."""
    device: Device | None = described(CONF / "device", accelerator.model_name()) if accelerator.name != "cpu" else None
    if device:
        return derived_cost(memory, device, 1, operators_of(config.cluster.device) is not None)
    return CostModel.load(CONF / "cost" / f"{accelerator.name}.yaml")


def _collected(
    config: Config, specs: Sequence[Spec], accelerator: Accelerator, progress: Progress
) -> list[MeasuredSession]:
    """Run the ranks and collect their results, to the end. One that raises, dies or no longer reports is a RunError."""
    import torch.distributed as dist

    num_ranks = specs[0].num_ranks
    context = multiprocessing.get_context("spawn")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes: list[Connection] = []
    processes = []
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})  # the ranks inherit this:
    # Ctrl-C reaches them too, and this process ends them
    for rank in range(num_ranks):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_rank_main, daemon=True,
                                  args=(theirs, config, list(specs), accelerator.name, rank, store.port))
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        found = _received(pipes, specs, accelerator, progress)
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()
    return [MeasuredSession(spec, {part: [found[rank, number, part] for rank in range(num_ranks)]
                           for part in parts_of_session(spec, number, accelerator)})
            for number, spec in enumerate(specs)]


def parts_of_session(spec: Spec, number: int, accelerator: Accelerator) -> list[str]:
    """Return the parts of session `number`; links are measured only in the first one."""
    parts = spec.parts()
    if number == 0:
        return parts
    return [part for part in parts if part in ("images" if "images" in parts else "packs", "rings")]


def _received(
    pipes: Sequence[Connection], specs: Sequence[Spec], accelerator: Accelerator, progress: Progress
) -> dict[tuple[int, int, str], PartResult]:
    todo = [(number, part) for number, spec in enumerate(specs)
            for part in parts_of_session(spec, number, accelerator)]
    found: dict[tuple[int, int, str], PartResult] = {}
    shares: dict[tuple[int, str], float] = {}
    heard_s, limit_s = time.monotonic(), JOIN_S
    while len(found) < len(todo) * len(pipes):
        ready = wait(list(pipes), timeout=1.0)
        if time.monotonic() - heard_s > limit_s:
            raise RunError(f"measure: the ranks have said nothing for {limit_s:g} s")
        for pipe in cast("list[Connection]", ready):
            rank = pipes.index(pipe)
            try:
                kind, value = pipe.recv()
            except EOFError:
                raise RunError(f"measure: rank {rank} died (out of memory, most likely)") from None
            if kind == "error":
                raise RunError(f"measure: rank {rank}: {value}")
            heard_s, limit_s = time.monotonic(), SILENT_S
            number, part, result = value
            if kind == "part":
                found[rank, number, part] = result
            if rank == 0:
                shares[number, part] = 1.0 if kind == "part" else result
                progress(f"{part}, sync={specs[number].sync}", sum(shares.values()) / len(todo))
    return found


def _tell_share(pipe: Connection, session: int, part: str, share: float) -> None:
    pipe.send(("share", (session, part, share)))


def _rank_main(
    pipe: Connection, config: Config, specs: list[Spec], device: str, rank: int, port: int
) -> None:
    import torch

    try:
        threads = max(1, int(config.cluster.cpus_per_worker))
        accelerator = ACCELERATORS[device]
        here = cores()
        if device == "cpu":
            # a rank that moves between cores is slower, now and then
            if specs[0].num_ranks * threads <= len(here) and hasattr(os, "sched_setaffinity"):
                os.sched_setaffinity(0, here[rank * threads : (rank + 1) * threads])
            torch.set_num_threads(threads)
        accelerator.show_only(rank)
        accelerator.activate()
        for number, spec in enumerate(specs):
            one = replace(config, planner=replace(config.planner, sync=spec.sync))
            nodes = tuple(f"node {node}" for node in spec.nodes)
            place = Membership(rank, spec.num_ranks, number + 1, "127.0.0.1", port, nodes=nodes)
            member = Rank(one, place, accelerator)
            measuring = member_with(member, spec)
            for part in parts_of_session(spec, number, accelerator):
                result = measuring.measure(part, partial(_tell_share, pipe, number, part))
                pipe.send(("part", (number, part, result)))
            member.close()
    except BaseException as error:
        traceback.print_exc()
        pipe.send(("error", " ".join(f"{type(error).__name__}: {error}".split())))
