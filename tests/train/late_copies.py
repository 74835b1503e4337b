"""A device whose copies are always behind: none is made before compute waits for it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dhp_ray.train.activation_offload import Copies


class LateCopies(Copies):
    """Copies of a device that is always behind."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self._module = self._stream = LateStream()  # type: ignore[assignment]

    @property
    def num_behind(self) -> int:
        """Copies that are not made yet."""
        return len(self._stream.queue)


class LateStream:
    """Stands for a device's stream of copies and its module: copies wait in a queue until an event after them, or all
    of them, are waited for.
    """

    def __init__(self) -> None:
        self.queue: list[Callable[[], Any]] = []

    def current_stream(self, device: Any = None) -> Any:
        return Computing()

    def wait_stream(self, stream: Any) -> None:
        """The one that computes has done all that it was given."""

    def stream(self, stream: Any) -> Any:
        return Capturing(self.queue)

    def Event(self) -> Any:  # noqa: N802
        return LateEvent(self.queue)


class Computing:
    """Stands for the stream that computes."""

    def wait_event(self, event: Any) -> None:
        event.synchronize()

    def wait_stream(self, stream: LateStream) -> None:
        for copy in stream.queue:
            copy()
        stream.queue.clear()


class LateEvent:
    def __init__(self, queue: list[Callable[[], Any]]) -> None:
        self.queue, self.before = queue, list[Callable[[], Any]]()

    def record(self) -> None:
        self.before = list(self.queue)

    def synchronize(self) -> None:
        for copy in self.before:
            if copy in self.queue:
                self.queue.remove(copy)
                copy()


class Capturing(TorchDispatchMode):
    """Puts copies into a queue in place of making them."""

    def __init__(self, queue: list[Callable[[], Any]]) -> None:
        super().__init__()
        self.queue = queue

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), options: Any = None
    ) -> Any:
        if function is not torch.ops.aten.copy_.default:
            return function(*arguments, **(options or {}))
        self.queue.append(partial(function, *arguments))
        return arguments[0]
