"""What tests of blocking and aborting share: a call beside the test's own thread, and the world's store."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

SILENT_S = 2.0
"""A wait that has not ended after this long on one machine is one for a peer."""
ENDS_S = 2.0
"""Within this long one must end that an abort has ended."""


def store() -> dist.Store:
    """The world's."""
    found: dist.Store = dist.distributed_c10d._get_default_store()
    return found


class Blocked:
    """A call in a thread of its own, as training's beside the control thread: its result or what it raised."""

    def __init__(self, call: Callable[[], Any], device: torch.device) -> None:
        self.result: Any = None
        self._call, self._device = call, device
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def ends_within(self, seconds: float) -> bool:
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        try:
            self.result = self._call()
        except Exception as error:
            self.result = error
