"""Workers that the job's process has started and that are not members yet: replacements, and workers by which a run
grows.
"""

from __future__ import annotations

from dataclasses import dataclass
from queue import Empty, SimpleQueue

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from dhp_ray.errors import first_line
from dhp_ray.run_folder import CONFIG_FILE
from dhp_ray.runtime.driver.group import Member


@dataclass
class _Newcomer:
    member: Member
    described: ray.ObjectRef
    prepared: ray.ObjectRef


class Arrivals:
    """Newcomers, each ready once it has described itself and loaded the model. `offer` may be called from any thread.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._offered: SimpleQueue[tuple[int, ActorHandle]] = SimpleQueue()
        self._coming: list[_Newcomer] = []
        self.failed: list[tuple[int, str]] = []

    def offer(self, slot: int, actor: ActorHandle) -> None:
        self._offered.put((slot, actor))

    def ready(self) -> list[Member]:
        """Return the newcomers that can join now. One that failed goes into `failed` with the reason, and its slot
        becomes free.
        """
        while True:
            try:
                slot, actor = self._offered.get_nowait()
            except Empty:
                break
            self._coming.append(_Newcomer(Member(slot, actor), actor.describe.remote(self._device, CONFIG_FILE),
                                          actor.prepare.remote()))
        return [newcomer.member for newcomer in list(self._coming) if self._is_ready(newcomer)]

    def take(self, number: int) -> list[Member]:
        """Take at most `number` of the ready newcomers; they are members from here on."""
        taken = self.ready()[:number]
        self._coming = [newcomer for newcomer in self._coming if newcomer.member not in taken]
        return taken

    def _is_ready(self, newcomer: _Newcomer) -> bool:
        calls = [newcomer.described, newcomer.prepared]
        done, _ = ray.wait(calls, num_returns=2, timeout=0)
        try:
            if newcomer.described in done:
                newcomer.member.described = ray.get(newcomer.described)
            if newcomer.prepared in done:
                ray.get(newcomer.prepared)
            return len(done) == 2
        except RayError as error:
            cause = getattr(error, "cause", None) or error
            self._coming.remove(newcomer)
            self.failed.append((newcomer.member.slot, first_line(cause)))
            return False
