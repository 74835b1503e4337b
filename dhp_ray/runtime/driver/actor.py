"""The actor of the driver. The job's process imports this file, so it needs nothing that takes seconds to import."""

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
    """Runs a `Driver`, and tells it what the job's process has for it."""

    def __init__(self, *arguments: Any) -> None:
        gc.disable()  # collections would take a fifth of the time to import
        from dhp_ray.runtime.driver.driver import Driver

        gc.enable()
        self.driver = Driver(*arguments)

    @ray.method(concurrency_group="control")
    def offer(self, slot: int, actor: ActorHandle) -> None:
        self.driver.pending.offer(slot, actor)

    @ray.method(concurrency_group="control")
    def stop(self, reason: str) -> None:
        self.driver.stop_reason = reason

    @ray.method(concurrency_group="control")
    def waited(self, waits: list[LongWait]) -> None:
        self.driver.waits.add(waits)

    def run(self) -> Iterator[Message]:
        yield from self.driver.run()
