"""One operation of a group, and the handle on it that torch gives to its caller."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from threading import Event, Lock
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Work
from torch.futures import Future
from torch.utils._pytree import tree_map_only

GARBAGE = 0x3F
"""Of every byte that an abort leaves in a result: a plausible number in every type (0.747 in fp32 and bf16), so that
nothing in the numbers tells that they are none.
"""

WIDENED = {torch.int16: torch.int32}
"""Types that gloo lacks, and those that it carries them as."""


class AsyncWork(Work):
    """An operation that is enqueued: `start` is called, when its turn comes, with copies in host memory of `arguments`.

    `reads` and `writes` are the tensors among the arguments. They are read when the operation runs and written when it
    ends, as by a device: neither may be touched before `wait`.
    """

    def __init__(self, name: str, start: Callable[..., Sequence[Work]], arguments: Sequence[Any],
                 reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        super().__init__()
        self.name = name
        self.enqueued_s = time.monotonic()
        self._start, self._arguments, self._reads, self._writes = start, arguments, reads, writes
        self._over, self._lock = Event(), Lock()
        self._future: Future[Any] = Future()
        tensors = {tensor.device: tensor for tensor in (*reads, *writes) if tensor.device.type != "cpu"}
        self._device = next(iter(tensors), None)
        if self._device is not None:
            self._enqueued = torch.get_device_module(self._device).Event()
            self._enqueued.record()  # what the caller's stream does before must be done first

    def run(self) -> None:
        """Carry the operation out and return when it is over. Raises RuntimeError where gloo does: a peer is gone."""
        with self._lock:
            if self._over.is_set():
                return  # abandoned before its turn
            start, arguments = self._start, self._arguments
            host = self._on_stream(self._to_host)
        for work in start(*tree_map_only(Tensor, lambda tensor: host[id(tensor)], arguments)):
            work.wait()
        self._end(lambda: self._on_stream(lambda: self._from_host(host)))

    def abandon(self) -> None:
        """End the operation without its having been carried out: what it writes holds garbage."""
        def spoil() -> None:
            for tensor in self._writes:
                tensor.data.reshape(-1).view(torch.uint8).fill_(GARBAGE)

        self._end(lambda: self._on_stream(spoil))

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the operation is over, however that came about. Never raises."""
        self._over.wait()
        return True

    def is_completed(self) -> bool:
        return self._over.is_set()

    def get_future(self) -> Future[Any]:
        return self._future

    def _end(self, write: Callable[[], None]) -> None:
        with self._lock:
            if self._over.is_set():
                return
            write()
            outputs, self._start = list(self._writes), _nothing  # the tensors are the caller's alone again
            self._arguments = self._reads = self._writes = ()
            self._over.set()
        self._future.set_result(outputs)

    def _to_host(self) -> dict[int, Tensor]:
        copies = {id(tensor): torch.empty_like(tensor, device="cpu", dtype=WIDENED.get(tensor.dtype, tensor.dtype))
                  for tensor in self._writes}
        return copies | {id(tensor): tensor.detach().to("cpu", WIDENED.get(tensor.dtype, tensor.dtype), copy=True)
                         for tensor in self._reads}

    def _from_host(self, copies: dict[int, Tensor]) -> None:
        for tensor in self._writes:
            tensor.data.copy_(copies[id(tensor)])  # not through `tensor`: autograd must not count it as a change

    def _on_stream(self, copy: Callable[[], Any]) -> Any:
        """Copy between a device and the host on a stream of its own, and wait until that is done."""
        with torch.no_grad():
            if self._device is None:
                return copy()
            device = torch.get_device_module(self._device)
            stream = device.Stream(self._device)
            stream.wait_event(self._enqueued)
            with device.stream(stream):
                result = copy()
            stream.synchronize()
            return result


def _nothing(*host: Any) -> Sequence[Work]:
    return ()
