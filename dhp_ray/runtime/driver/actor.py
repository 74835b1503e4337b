"""The actor of the driver. The job's process imports this file to make it, and needs nothing of what takes seconds to
import.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import ray
from ray.actor import ActorHandle

if TYPE_CHECKING:
    from dhp_ray.runtime.messages import Message
    from dhp_ray.runtime.waits import LongWait


CONCURRENCY_GROUPS = {"control": 2}


class DriverActor:
    """Runs a `Driver`; the methods are those of it."""

    def __init__(self, *arguments: Any) -> None:
        gc.disable()  # collections would take a fifth of the time to import
        from dhp_ray.runtime.driver.driver import Driver

        gc.enable()
        self.driver = Driver(*arguments)

    @ray.method(concurrency_group="control")
    def offer(self, slot: int, actor: ActorHandle) -> None:
        self.driver.offer(slot, actor)

    @ray.method(concurrency_group="control")
    def stop(self, reason: str) -> None:
        self.driver.stop(reason)

    @ray.method(concurrency_group="control")
    def waited(self, waits: list[LongWait]) -> None:
        self.driver.waited(waits)

    def run(self) -> Iterator[Message]:
        yield from self.driver.run()
