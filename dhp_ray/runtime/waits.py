"""What a run waits for: shown on the console while it lasts, recorded with its length once it is over.

The code that waits may be blocked anywhere, so a thread checks now and then whether there is something to report.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Event, Thread
from time import monotonic

from dhp_ray.runtime.messages import Notice

LONG_S = 10.0  # a wait of this many seconds is long: it is reported and recorded

LOOK_S = 1.0

SAID_AT = (1, 3, 6, 12, 30, 60)
"""When a wait is reported, in multiples of its `long_s`; after the last entry, at every multiple of it."""


@dataclass(frozen=True)
class LongWait:
    """A long wait that has ended."""

    what: str
    seconds: float


@dataclass
class _Wait:
    what: str
    since: float
    long_s: float
    shows_itself: bool
    said: int = 0


def said_at_s(said: int, long_s: float = LONG_S) -> float:
    """Return the seconds until a wait is reported that has been reported `said` times: 10, 30, 60, 120, 300, ..."""
    last = SAID_AT[-1]
    return long_s * (SAID_AT[said] if said < len(SAID_AT) else last * (said - len(SAID_AT) + 2))


class Waits:
    """The waits of one thread, nested or not; the innermost is reported by `say` (None: never), from another thread."""

    def __init__(self, say: Callable[[Notice], None] | None = None, look_s: float = LOOK_S,
                 clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._under_way: list[_Wait] = []
        self._ended: deque[LongWait] = deque()
        self._record: Callable[[LongWait], None] | None = None
        self._closed = Event()
        if say:
            Thread(target=self._look, args=(say, look_s), name="waits", daemon=True).start()
        self._say = say

    @contextmanager
    def on(self, what: str, long_s: float = LONG_S, shows_itself: bool = False) -> Iterator[None]:
        """Report a wait for `what` of over `long_s` seconds, unless it `shows_itself`; wrap the waiting code in it."""
        wait = _Wait(what, self._clock(), long_s, shows_itself)
        self._under_way.append(wait)
        try:
            yield
        finally:
            self._under_way.remove(wait)
            seconds = round(self._clock() - wait.since, 1)
            if seconds >= wait.long_s:
                self.add([LongWait(what, seconds)])
            if wait.said and self._say:
                self._say(Notice(f"waited {seconds:.0f} s for {what}"))
            self._write()

    def due(self) -> Notice | None:
        """Return what is to be reported now, if anything."""
        for wait in self._under_way[-1:]:
            seconds = self._clock() - wait.since
            if seconds >= said_at_s(wait.said, wait.long_s) and not wait.shows_itself:
                wait.said += 1
                return Notice(f"waiting for {wait.what}: {seconds:.0f} s so far")
        return None

    def add(self, waited: list[LongWait]) -> None:
        """Add long waits, also of another process; they are written with the next one. Any thread may call this."""
        self._ended.extend(waited)

    def taken(self) -> list[LongWait]:
        """Remove and return the long waits that have ended and are not written yet."""
        return [self._ended.popleft() for _ in range(len(self._ended))]

    def keep(self, record: Callable[[LongWait], None]) -> None:
        """Write the long waits so far with `record`, and from now on each as it ends."""
        self._record = record
        self._write()

    def close(self) -> None:
        self._closed.set()

    def _write(self) -> None:
        if self._record:
            for waited in self.taken():
                self._record(waited)

    def _look(self, say: Callable[[Notice], None], look_s: float) -> None:
        while not self._closed.wait(look_s):
            if notice := self.due():
                say(notice)
