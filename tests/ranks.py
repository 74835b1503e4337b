"""Runs a function on several real ranks, each a process of its own, under a watchdog.

They exchange over gloo, or over the asynchronous backend where BACKEND says so (`tests/async_backend`).
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import traceback
from collections.abc import Callable, Collection, Mapping
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

BACKEND = "gloo"
"""Of the ranks of tests that do not name one; the fixture `backend_of_ranks` sets it."""


def run_ranks(function: Callable[..., Any], num_ranks: int, *arguments: Any, timeout_s: float = 60.0) -> list[Any]:
    """Call `function(rank, *arguments)` on `num_ranks` ranks of one world; the results, by rank. Fails as
    `run_processes` does.
    """
    return run_processes(_in_world, num_ranks, num_ranks, timeout_s, function, arguments, timeout_s=timeout_s)


def run_processes(
    function: Callable[..., Any], num_ranks: int, *arguments: Any, timeout_s: float = 60.0, mortal: Collection[int] = ()
) -> list[Any]:
    """Call `function(rank, port, *arguments)` in `num_ranks` processes that can meet at a store on `port` of this
    machine; the results, by rank.

    `function` must be importable (defined at a module's top level). Processes are forked from a server that has
    imported torch once, so that a call takes a fraction of a second; they have this process's environment, which the
    server, as old as the first call, may not have. Fails when a rank raises, dies or is late;
    a rank of `mortal` may die: its result is None then.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.rank_server"])
    import torch.distributed as dist

    # ours until all ranks are done: no port is picked before it is taken
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes, processes = [], []
    for rank in range(num_ranks):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_process_main, daemon=True, args=(
            theirs, dict(os.environ), function, rank, store.port, arguments, BACKEND))
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        return _collect(pipes, timeout_s, mortal)
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()


def _collect(pipes: list[Connection], timeout_s: float, mortal: Collection[int]) -> list[Any]:
    import time

    deadline = time.monotonic() + timeout_s
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        waiting = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in results}
        ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            raise AssertionError(f"ranks {sorted(waiting.values())} hang after {timeout_s} s")
        for pipe in ready:
            rank = waiting[pipe]  # type: ignore[index]
            try:
                failed, value = pipe.recv()  # type: ignore[union-attr]
            except EOFError:
                if rank in mortal:
                    results[rank] = None
                    continue
                raise AssertionError(f"rank {rank} died") from None
            if failed:
                raise AssertionError(f"rank {rank} raised:\n{value}")
            results[rank] = value
    return [results[rank] for rank in range(len(pipes))]


def _process_main(
    pipe: Connection, environment: Mapping[str, str], function: Callable[..., Any], rank: int, port: int,
    arguments: tuple[Any, ...], backend: str,
) -> None:
    os.environ.update(environment)
    faulthandler.enable()  # where a signal ends a rank, its trace tells where
    import torch

    from tests.async_backend import compute_over

    torch.set_num_threads(1)
    compute_over(backend)
    try:
        pipe.send((False, function(rank, port, *arguments)))
    except BaseException:
        pipe.send((True, traceback.format_exc()))


def _in_world(
    rank: int, port: int, num_ranks: int, timeout_s: float, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> Any:
    import torch.distributed as dist

    from dhp_ray.comm.device import CPU

    timeout = timedelta(seconds=timeout_s)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
    dist.init_process_group(CPU.backend, store=store, rank=rank, world_size=num_ranks, timeout=timeout)
    result = function(rank, *arguments)
    dist.barrier()
    return result
