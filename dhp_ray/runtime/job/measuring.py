"""Measures costs on this machine, on workers as a run has: they join a generation a mode and measure part after part.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import ray

from dhp_ray.comm.device import CPU, choose
from dhp_ray.config import Config, ConfigError, check_device
from dhp_ray.measure.cost_file import Measured, MeasuredSession, measured_cost
from dhp_ray.measure.rounds import MAX_TOKENS, PARTS
from dhp_ray.model.fused import operators_of
from dhp_ray.planner.errors import PlanError
from dhp_ray.planner.mode import allowed_modes
from dhp_ray.runtime.driver.group import WorkerGroup, WorkerHandle
from dhp_ray.runtime.driver.start import describe, measured_session
from dhp_ray.runtime.job.head import connect, disconnect
from dhp_ray.runtime.job.job import WorkerPool, rendezvous_store
from dhp_ray.runtime.job.preflight import check_measurement_here, devices_here
from dhp_ray.runtime.job.signals import ShutdownSignals
from dhp_ray.runtime.messages import RunError
from dhp_ray.runtime.strategy import Ranks, Strategy
from dhp_ray.runtime.waits import Waits
from dhp_ray.runtime.worker.run_model import state_size
from dhp_ray.storage import Folder

Progress = Callable[[str, float], None]
"""Called with what is measured, and with the share of all that is done."""


class Request(NamedTuple):
    """What to measure, and how. `ranks` 0: `cluster.num_workers`, or as many as there is room for if that is less."""

    name: str
    ranks: int = 0
    max_tokens: int = 0


def measure_here(
    config: Config, request: Request, progress: Progress = lambda what, share: None,
    signals: ShutdownSignals | None = None,
) -> Measured:
    """Measure and fit a configuration's costs. ConfigError: this machine cannot. MeasureError, RunError: it failed."""
    try:
        accelerator = choose(config.cluster.device)
        config.cluster.device = accelerator.name
        check_measurement_here(config, request.ranks)
        check_device(config)
        num_ranks = request.ranks or min(devices_here(accelerator), config.cluster.num_workers)
        config = replace(config, cluster=replace(config.cluster, num_workers=num_ranks),
                         planner=replace(config.planner, tokens_per_rank="auto"))
        size, memory_bytes = state_size(config), accelerator.memory_bytes()
        strategy = Strategy(config, Ranks(
            kind=accelerator.name, shape=size.shape, adapters=size.adapters, nodes=("here",) * num_ranks,
            memory_bytes=memory_bytes // num_ranks if accelerator is CPU else memory_bytes,
            node_memory_bytes={"here": CPU.memory_bytes()}, device_names=(accelerator.model_name(),),
            fused=operators_of(accelerator.name) is not None))
        modes = allowed_modes(config.planner.sync, config.train.activation_checkpointing)
        strategy.check_memory(modes[0])
        memory, known = strategy.memory(modes[0]), strategy.cost(modes[0])
    except (ValueError, RunError, PlanError) as error:
        raise ConfigError(str(error)) from None
    fitting = strategy.rank_tokens(memory)
    if request.max_tokens > fitting:
        raise ConfigError(f"max_tokens: got {request.max_tokens}; allowed: at most {fitting}, which fit on a rank")
    tokens = request.max_tokens or min(fitting, MAX_TOKENS[accelerator.name])
    sessions: list[MeasuredSession] = []
    os.environ["RAY_ADDRESS"] = "local"
    try:
        connect()
        if signals:
            signals.take_signals()  # ray.init installs its own SIGTERM handler, which exits at once
        with tempfile.TemporaryDirectory() as folder:
            config = replace(config, run=replace(config.run, dir=folder))
            pool, host = WorkerPool(config, accelerator, Waits()), ray.util.get_node_ip_address()
            store = rendezvous_store(host)
            group = WorkerGroup([WorkerHandle(slot, pool.replace(slot)) for slot in range(num_ranks)])
            describe(group, Folder(folder), accelerator.name)
            for number, mode in enumerate(modes):
                parts = (("images" if memory.shape.vision else "packs", "rings") if number else  # links: once
                         tuple(part for part in PARTS if memory.shape.vision or part != "images"))

                def tell(part: str, done: int, of: tuple[str, ...] = parts, before: int = number,
                         sync: str = mode.sync) -> None:
                    progress(f"{part}, sync={sync}", (before + done / len(of)) / len(modes))

                sessions.append(measured_session(group, (host, store.port), number + 1, 0, mode, tokens, parts, tell))
    finally:
        disconnect()
    origin = strategy.origin(modes[0])
    origin = replace(origin, settings=dict(origin.settings) | {"sync": [mode.sync for mode in modes]})
    return measured_cost(sessions, origin, memory, known, request.name)
