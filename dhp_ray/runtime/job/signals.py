"""Ctrl-C, SIGTERM and SIGHUP ask a run to end, whatever its process is doing. Imports neither torch nor Ray: it listens
before they are imported.

    nothing to save yet     the main thread gets KeyboardInterrupt; if foreign code does not let it through, the
                            process ends LEAVE_S later
    a driver trains         it is told; the run ends after the step and the save under way
    Ctrl-C once more        as in the first case, whatever there is to save
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from threading import Thread, Timer
from typing import Any

NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM", signal.SIGHUP: "SIGHUP"}

LEAVE_S = 3.0  # how long the main thread may take to clean up. Ray ends the workers of a job that is gone


class ShutdownSignals:
    """What the signals to this process ask for, and who is told. Both the main thread and one that reads them from a
    pipe receive them: foreign code may block the main thread for minutes. `before`: when a run that ends at once ends.
    """

    def __init__(self, before: str = "before the first step") -> None:
        self.before = before
        self.reason = ""
        self.say: Callable[[str], None] = partial(print, flush=True)
        self._stop: Callable[[str], object] | None = None
        self._signals = 0  # that the main thread has handled
        self._leaving = self._over = self._told = False

    def run(self, work: Callable[[], int]) -> int:
        """Handle signals, and return the exit status of `work`, which they may end. Call this from the main thread. An
        import that a KeyboardInterrupt interrupts can turn it into RuntimeError or ModuleNotFoundError.
        """
        try:
            self._listen()
            return work()
        except KeyboardInterrupt:
            pass
        except Exception:
            if not self._leaving:
                raise
        finally:
            self._over = True
        self.tell()
        return 1

    def take_signals(self) -> None:
        """Handle the signals here, in place of other handlers; those that the process ignores stay ignored."""
        for number in NAMES:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._handle)

    def hand_over(self, stop: Callable[[str], object]) -> None:
        """From here on there may be something to save: call `stop` with the reason to end, now or when there is one."""
        self._stop = stop
        if self.reason:
            stop(self.reason)

    def over(self) -> None:
        """Note that the run has ended, and its process is about to end."""
        self._over = True

    def tell(self) -> None:
        """Print the error line of a run that ended at once; only the first call does."""
        if not self._told:
            self._told = True
            # Ray's handler within ray.init may raise SystemExit before the thread has read which signal it was
            what, way_back = ((f"stopped {self.before}: {self.reason or 'SIGTERM'}", "") if self._stop is None
                              else ("ended at once: Ctrl-C", " to go on from the newest checkpoint"))
            print(f"error: {what}; start the same command again{way_back}", file=sys.stderr, flush=True)

    def _listen(self) -> None:
        readable, writable = os.pipe()
        os.set_blocking(writable, False)
        signal.set_wakeup_fd(writable, warn_on_full_buffer=False)
        Thread(target=self._read, args=(readable,), name="signals", daemon=True).start()
        self.take_signals()

    def _handle(self, number: int, frame: Any) -> None:
        self._signals += 1
        self.reason = self.reason or NAMES[signal.Signals(number)]
        at_once = self._stop is None or (number == signal.SIGINT and self._signals > 1)
        if at_once and not self._leaving and not self._over:
            self._leaving = True  # once: a second one would break the clean-up
            raise KeyboardInterrupt

    def _read(self, readable: int) -> None:
        count = 0
        while True:
            number = os.read(readable, 1)[0]
            if number not in NAMES:
                continue
            count += 1
            self.reason = self.reason or NAMES[signal.Signals(number)]
            again = count > 1 and number == signal.SIGINT
            if again or self._stop is None:
                leave = Timer(LEAVE_S, self._leave, [again])
                leave.daemon = True
                leave.start()
            elif count == 1 and not self._over:
                self._stop(self.reason)  # first: printing may fail if nobody reads it
                second = "; press it again to end at once" if number == signal.SIGINT else ""
                self.say(f"{self.reason}: the run ends after the step under way, with a checkpoint{second}")

    def _leave(self, again: bool) -> None:
        # else there was something to save after all, and the driver has been told
        if again or self._leaving or self._stop is None:
            self.tell()
            os._exit(1)
