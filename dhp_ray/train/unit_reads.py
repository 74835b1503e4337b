"""How a rank reads the next unit of a model while it computes with one: a thread on the CPU, a stream on a device."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

import torch


class UnitRead(Protocol):
    """A read that is under way."""

    def result(self) -> Any:
        """Let what follows wait for it: on the CPU the calling thread, on a device its current stream.

        Raises what the read has raised, unless `submit` did.
        """


class UnitReader(Protocol):
    """Runs reads one after another, each beside what the training thread computes."""

    def submit(self, read: Callable[..., None], /, *arguments: Any) -> UnitRead:
        """Begin `read(*arguments)`."""

    def shutdown(self) -> None:
        """No read is under way, and none will follow."""


class DeviceRead:
    """A read that a device's stream has been given."""

    def __init__(self, device: torch.device, event: Any) -> None:
        self._device, self._event = device, event

    def result(self) -> None:
        torch.get_device_module(self._device).current_stream(self._device).wait_event(self._event)


class DeviceReader:
    """Copies on a stream of their own. A read waits for what the current stream was given before it, since that may use
    the memory that is written; the host waits for nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._module = device, torch.get_device_module(device)
        self._stream = self._module.Stream(device)

    def submit(self, read: Callable[..., None], /, *arguments: Any) -> DeviceRead:
        self._stream.wait_stream(self._module.current_stream(self._device))
        with self._module.stream(self._stream):
            read(*arguments)
        return DeviceRead(self._device, self._stream.record_event())

    def shutdown(self) -> None:
        with suppress(RuntimeError):  # of a device that is broken: the training thread has raised it
            self._stream.synchronize()


def reader_on(device: torch.device) -> UnitReader:
    if device.type != "cpu":
        return DeviceReader(device)
    # runs at the same time as the thread that computes, so it uses one thread, not as many as that one has
    return ThreadPoolExecutor(1, "reading units", partial(torch.set_num_threads, 1))
