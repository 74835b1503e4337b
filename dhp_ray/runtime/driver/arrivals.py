"""Workers that the job's process has started and that are not members yet: replacements, and workers by which a run
grows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from time import monotonic

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from dhp_ray.errors import first_line
from dhp_ray.run_folder import CONFIG_FILE
from dhp_ray.runtime.driver.group import Member
from dhp_ray.runtime.messages import Notice, Replace, Tell
from dhp_ray.runtime.waits import said_at_s

LONGEST_S = 300.0
"""The most seconds until another worker is asked for in the place of one that failed before it joined."""

LOADS_LONG_S = 60.0
"""A newcomer that loads the model for this many seconds is reported, and again after 3, 6, 12, 30 times as many."""


@dataclass
class _Newcomer:
    """`loads_since_s`: when its process had started; None before, and once it has loaded. `num_reports`: how often its
    loading was reported.
    """

    member: Member
    described: ray.ObjectRef
    prepared: ray.ObjectRef
    loads_since_s: float | None = field(default=None, init=False)
    num_reports: int = field(default=0, init=False)


class Arrivals:
    """Newcomers, each ready once it has described itself and loaded the model. `offer` may be called from any thread.
    """

    def __init__(self, device: str, tell: Tell) -> None:
        self._device, self._tell = device, tell
        self._offered: SimpleQueue[tuple[int, ActorHandle]] = SimpleQueue()
        self._coming: list[_Newcomer] = []
        self.failed: list[tuple[int, str]] = []
        self._waits_s: dict[int, float] = {}  # by slot: how long to wait after the next failure
        self._wanted: list[tuple[float, int]] = []  # when a slot is to be filled again

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
        for member in taken:
            self._waits_s.pop(member.slot, None)
        return taken

    def report(self, told: Callable[[int, str], object] = lambda slot, why: None) -> None:
        """Report newcomers that load for long, and ask for others in the slots of those that failed: at once for the
        first in a row, then after 2, 4, 8 and so on up to LONGEST_S seconds. Call it again and again. `told` is called
        with the slot and the reason of each that failed.
        """
        self._slow()
        while self.failed:
            slot, why = self.failed.pop()
            wait_s = self._waits_s.get(slot, 0.0)
            self._waits_s[slot] = min(max(2.0, 2 * wait_s), LONGEST_S)
            self._wanted.append((monotonic() + wait_s, slot))
            told(slot, why)
            later = f" in {wait_s:g} s" if wait_s else ""
            self._tell(Notice(f"a new worker failed, another is asked for{later}: {why}"))
        now = monotonic()
        due = [slot for at_s, slot in self._wanted if at_s <= now]
        self._wanted = [(at_s, slot) for at_s, slot in self._wanted if at_s > now]
        for slot in due:
            self._tell(Replace(slot))

    def _slow(self) -> None:
        for newcomer in self._coming:
            if newcomer.loads_since_s is None:
                continue
            seconds = monotonic() - newcomer.loads_since_s
            if seconds >= said_at_s(newcomer.num_reports, LOADS_LONG_S):
                newcomer.num_reports += 1
                self._tell(Notice(f"a new worker ({newcomer.member.place}) loads the model: {seconds:.0f} s so far"))

    def _is_ready(self, newcomer: _Newcomer) -> bool:
        calls = [newcomer.described, newcomer.prepared]
        done, _ = ray.wait(calls, num_returns=2, timeout=0)
        try:
            if newcomer.described in done:
                newcomer.member.described = ray.get(newcomer.described)
                newcomer.loads_since_s = newcomer.loads_since_s or monotonic()
            if newcomer.prepared in done:
                ray.get(newcomer.prepared)
                newcomer.loads_since_s = None
            return len(done) == 2
        except RayError as error:
            cause = getattr(error, "cause", None) or error
            self._coming.remove(newcomer)
            self.failed.append((newcomer.member.slot, first_line(cause)))
            return False
