"""What a rank is doing, as its training thread records it, and how another thread ends its waits.

    training thread   records a mark: at every layer, forward and backward, and around its waits for peers in a step
    CPU               has passed a mark once it is recorded
    device            a mark is an event in its stream: the host records it early, the device passes it when it gets
                      there
    control thread    asks for the mark that was passed last, and aborts: from then on every mark raises

After an abort, waits return with garbage, and only the next operation on a group raises. So the training thread checks
for an abort after each wait and after reading the device (`check`), and never uses what it then has.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor


class AbortedError(RuntimeError):
    """The generation was aborted: what came from peers since may be garbage."""


class Heartbeat(NamedTuple):
    """A place in training: where it is in the plan (`stage`), what begins there, and whether that waits for peers."""

    number: int
    stage: str
    doing: str
    waits_for_peers: bool

    def __str__(self) -> str:
        return ", ".join(filter(None, (self.stage, self.doing)))


class StreamTimestamp:
    """A point in time of the device's current stream, or on the CPU of the process."""

    def __init__(self, device: torch.device) -> None:
        self._event: Any = None
        if device.type == "cpu":
            self._seconds = time.perf_counter()
        else:
            self._event = torch.get_device_module(device).Event(enable_timing=True)
            self._event.record()

    def since_s(self, earlier: StreamTimestamp) -> float:
        """Return the seconds since an earlier moment of the same device. Waits until the device has got here."""
        if self._event is None:
            return self._seconds - earlier._seconds
        self._event.synchronize()
        return float(earlier._event.elapsed_time(self._event)) / 1000.0


Wait = tuple[StreamTimestamp, StreamTimestamp]
"""Begin and end of a wait for peers."""


def seconds_of(waits: Iterable[Wait]) -> float:
    """Seconds of all waits; waits until the device has got there."""
    return sum(end.since_s(begin) for begin, end in waits)


class Progress:
    """The progress of one rank in one generation. The training thread calls `mark`, `timed_waits`, `waiting`, `check`,
    `read`, `synchronize` and `count_part`; any other thread calls `passed` and `abort`.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device or torch.device("cpu")
        self.stage = ""
        """Where the training thread is in the plan; marks that follow belong to it."""
        self.aborted = False
        self.parts_copied = 0
        """Parts of the state that have been copied to host memory after an abort, which ends the marks."""
        self._passed = self._recorded = Heartbeat(0, "", "", waits_for_peers=False)
        self._ahead: deque[tuple[Heartbeat, Any]] = deque()  # recorded, and not known to be passed
        self._lock = Lock()
        self._waits: list[Wait] | None = None  # None: not wanted
        self._waits_since: StreamTimestamp | None = None
        self._module: Any = None
        if self.device.type != "cpu":
            self._module = torch.get_device_module(self.device)
            self._stream = self._module.current_stream(self.device)

    def mark(self, doing: str, waits_for_peers: bool = False) -> None:
        """Record that something begins. Raises AbortedError after an abort."""
        self.check()
        recorded = Heartbeat(self._recorded.number + 1, self.stage, doing, waits_for_peers)
        self._recorded = recorded
        if self._module is None:
            self._passed = recorded
        elif self._module.current_stream(self.device) == self._stream:  # not inside what FSDP overlaps with it
            event = self._module.Event()
            event.record()
            with self._lock:
                self._forget_passed()
                self._ahead.append((recorded, event))
        else:
            return
        if self._waits is not None:
            self._time(self._waits, waits_for_peers)

    def _time(self, waits: list[Wait], begins: bool) -> None:
        if begins:
            self._waits_since = self._waits_since or StreamTimestamp(self.device)
        elif self._waits_since:
            waits.append((self._waits_since, StreamTimestamp(self.device)))
            self._waits_since = None

    @contextmanager
    def timed_waits(self) -> Iterator[list[Wait]]:
        """Collect the waits for peers inside, each from its mark to the next one that is none, in the training thread's
        stream. The list is complete at the end.
        """
        waits: list[Wait] = []
        self._waits = waits
        try:
            yield waits
            self._time(waits, begins=False)
        finally:
            self._waits = self._waits_since = None

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Put this around a wait for peers. Raises AbortedError at its end if an abort ended the wait."""
        self.mark(what, waits_for_peers=True)
        yield
        self.mark(f"after {what}")

    def check(self) -> None:
        """Raise AbortedError after an abort; call it after everything that blocks."""
        if self.aborted:
            raise AbortedError("the generation was aborted")

    def read(self, tensor: Tensor) -> Any:
        """Return the numbers of a tensor, like `tolist`; waits for the device. Raises AbortedError after an abort."""
        numbers = tensor.tolist()
        self.check()
        return numbers

    def synchronize(self) -> None:
        """Wait until the device has done all that it was given. Raises AbortedError after an abort."""
        if self._module is not None:
            self._module.current_stream(self.device).synchronize()
        self.check()

    def count_part(self) -> None:
        self.parts_copied += 1

    def passed(self) -> Heartbeat:
        """Return the mark that was passed last: by the device, or on the CPU by the training thread. After an abort it
        no longer changes: a device that was stopped cannot be queried.
        """
        with self._lock:
            self._forget_passed()
            return self._passed

    def abort(self) -> None:
        """Note an abort, before the groups are aborted: what the training thread waits for must no longer be used."""
        self.aborted = True

    def _forget_passed(self) -> None:
        with suppress(RuntimeError):  # of a device that is broken: the training thread raises it
            while self._ahead and not self.aborted and self._ahead[0][1].query():
                self._passed = self._ahead.popleft()[0]
