"""The process group: it enqueues every operation and runs them in order, over a gloo group of its own."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Work
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_leaves

from tests.async_backend.refusals import refuse_layouts, refuse_types
from tests.async_backend.watchdog import watch
from tests.async_backend.work import AsyncWork

FOREVER = timedelta(days=1)
"""For gloo's own operations: what ends one is the abort, or the watchdog."""
Options = Any


class AsyncGroup(ProcessGroup):
    """All operations of a group are one queue, as on NCCL's stream of a communicator.

    `timeout` is the watchdog's, and how long the members may take to connect.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self.timeout, self.aborted = timeout, False
        self._inner = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._inner._set_default_timeout(FOREVER)
        devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
        for device in devices:  # FSDP2 asks for it
            self._register_backend(torch.device(device), ProcessGroup.BackendType.CUSTOM, self._inner)
        self._messages: Counter[tuple[Callable[..., Any], int]] = Counter()
        self._lock, self._pending = Lock(), deque[AsyncWork]()
        self._queue: SimpleQueue[AsyncWork | None] = SimpleQueue()
        self._thread = Thread(target=_run_in_order, args=(self._queue, self._pending, self._lock), name="collectives",
                              daemon=True)
        self._thread.start()
        watch(self)

    def oldest(self) -> AsyncWork | None:
        """The operation enqueued first of those that are not over; None after an abort."""
        with self._lock:
            return None if self.aborted or not self._pending else self._pending[0]

    def abort(self) -> None:
        """End every wait. From here on operations raise, and the watchdog is off."""
        with self._lock:
            self.aborted = True
            for work in self._pending:
                work.abandon()
        self._queue.put(None)

    def shutdown(self) -> None:
        """Wait for what is enqueued, also where that never ends; give back threads and sockets."""
        while (work := self.oldest()) is not None:
            work.wait()
        if not self.aborted:
            self._queue.put(None)
            self._thread.join()

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        return "asynchronous"

    def batch_isend_irecv(self, operations: Sequence[dist.P2POp]) -> list[Work]:
        """Sends and receives that run together, as one operation of the queue."""
        messages = [(operation.op, operation.tensor, operation.group_peer) for operation in operations]
        return [self._exchange("batch_isend_irecv", messages)]

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Work:
        return self._exchange("send", [(dist.isend, tensors[0], peer)])

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Work:
        return self._exchange("recv", [(dist.irecv, tensors[0], peer)])

    def allreduce(self, tensors: list[Tensor], opts: Options = None) -> Work:
        return self._reduction("allreduce", (tensors, opts or dist.AllreduceOptions()), tensors, tensors)

    def reduce(self, tensors: list[Tensor], opts: Options) -> Work:
        return self._reduction("reduce", (tensors, opts), tensors, tensors)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Options) -> Work:
        return self._reduction("reduce_scatter", (outputs, inputs, opts), inputs, outputs)

    def reduce_scatter_single(self, output: Tensor, whole: Tensor, opts: Options = None) -> Work:
        arguments = (output, whole, opts or dist.ReduceScatterOptions())
        return self._reduction("_reduce_scatter_base", arguments, whole, output)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], wholes: list[Tensor], opts: Options = None
    ) -> Work:
        def start(outputs: list[Tensor], wholes: list[Tensor]) -> list[Work]:
            options = opts or dist.ReduceScatterOptions()
            return [inner._reduce_scatter_base(output, whole, options) for output, whole in zip(outputs, wholes)]

        inner = self._inner
        return self._enqueue("reduce_scatter_single", start, (outputs, wholes), wholes, outputs, reduced=True)

    def broadcast(self, tensors: list[Tensor], opts: Options) -> Work:
        return self._movement("broadcast", (tensors, opts), tensors, tensors)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Options = None) -> Work:
        return self._movement("allgather", (outputs, inputs, opts or dist.AllgatherOptions()), inputs, outputs)

    def all_gather_single(self, output: Tensor, part: Tensor, opts: Options = None) -> Work:
        return self._movement("_allgather_base", (output, part, opts or dist.AllgatherOptions()), part, output)

    def all_gather_single_coalesced(self, outputs: list[Tensor], parts: list[Tensor], opts: Options = None) -> Work:
        def start(outputs: list[Tensor], parts: list[Tensor]) -> list[Work]:
            options = opts or dist.AllgatherOptions()
            return [inner._allgather_base(output, part, options) for output, part in zip(outputs, parts)]

        inner = self._inner
        return self._enqueue("all_gather_single", start, (outputs, parts), parts, outputs)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Options) -> Work:
        return self._movement("gather", (outputs, inputs, opts), inputs, outputs)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Options) -> Work:
        return self._movement("scatter", (outputs, inputs, opts), inputs, outputs)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Options) -> Work:
        return self._movement("alltoall", (outputs, inputs, opts), inputs, outputs)

    def all_to_all_single(
        self, output: Tensor, whole: Tensor, output_sizes: list[int], input_sizes: list[int], opts: Options = None
    ) -> Work:
        arguments = (output, whole, output_sizes, input_sizes, opts or dist.AllToAllOptions())
        return self._movement("alltoall_base", arguments, whole, output)

    def barrier(self, opts: Options = None) -> Work:
        return self._movement("barrier", (opts or dist.BarrierOptions(),), (), ())

    def allreduce_coalesced(self, *arguments: Any) -> Work:
        raise RuntimeError("ProcessGroupHCCL does not support allreduce_coalesced")

    def recv_anysource(self, *arguments: Any) -> Work:
        raise RuntimeError("ProcessGroupNCCL does not support recvAnysource")

    # as torch 2.11 calls them
    _allgather_base, _reduce_scatter_base, alltoall_base = all_gather_single, reduce_scatter_single, all_to_all_single

    def _exchange(self, name: str, messages: Sequence[tuple[Callable[..., Any], Tensor, int]]) -> Work:
        """Post all messages at once. The k-th one sent to a peer is what that peer receives k-th, whatever the tags."""
        numbers = []
        for call, _, peer in messages:
            numbers.append(self._messages[call, peer])
            self._messages[call, peer] += 1
        inner, calls, peers = self._inner, [call for call, _, _ in messages], [peer for _, _, peer in messages]

        def start(tensors: list[Tensor]) -> list[Work]:
            return [(inner.send if call is dist.isend else inner.recv)([tensor], peer, number)
                    for call, tensor, peer, number in zip(calls, tensors, peers, numbers)]

        tensors = [tensor for _, tensor, _ in messages]
        sent, received = ([tensor for call, tensor, _ in messages if call is kind]
                          for kind in (dist.isend, dist.irecv))
        return self._enqueue(name, start, (tensors,), sent, received)

    def _movement(self, name: str, arguments: Sequence[Any], reads: Any, writes: Any) -> Work:
        call = getattr(self._inner, name)
        return self._enqueue(name, lambda *host: [call(*host)], arguments, reads, writes)

    def _reduction(self, name: str, arguments: Sequence[Any], reads: Any, writes: Any) -> Work:
        call = getattr(self._inner, name)
        return self._enqueue(name, lambda *host: [call(*host)], arguments, reads, writes, reduced=True)

    def _enqueue(self, name: str, start: Callable[..., Sequence[Work]], arguments: Sequence[Any], reads: Any,
                 writes: Any, reduced: bool = False) -> Work:
        read, written = tree_leaves(reads), tree_leaves(writes)
        refuse_types([*read, *written], reduced)
        refuse_layouts([*read, *written])
        with self._lock:
            if self.aborted:
                raise dist.DistBackendError(f"NCCL communicator was aborted on rank {self.rank()}.")
            work = AsyncWork(name.lstrip("_"), start, arguments, read, written)
            self._pending.append(work)
            self._queue.put(work)
        return work


def _run_in_order(queue: SimpleQueue[AsyncWork | None], pending: deque[AsyncWork], lock: Lock) -> None:
    """A group's thread. It does not know the group, which can be dropped while this still waits for a dead peer."""
    while (work := queue.get()) is not None:
        try:
            work.run()
        except RuntimeError as error:
            # A peer is gone. Nothing of this group ends any more, as on a device.
            logging.getLogger(__name__).warning("%s never ends: %s", work.name, error)
            return
        with lock:
            pending.popleft()
        del work  # until the next one comes it would keep the results
