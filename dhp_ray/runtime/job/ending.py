"""Ctrl-C and SIGTERM ask a run to end, whatever its process is doing. This module imports neither torch nor Ray, since
it must listen before they are imported.

    nothing to save yet     the main thread gets KeyboardInterrupt; if foreign code does not let it through, the
                            process ends after LEAVE_S
    a driver trains         the driver is told; the run ends after the current step and save
    a second Ctrl-C         as in the first case, even if there is something to save
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from threading import Thread, Timer
from typing import Any

NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}

LEAVE_S = 3.0
"""How long the main thread may take to clean up. The rest ends with the process: Ray ends the workers of a job whose
process is gone.
"""


class Ending:
    """What the signals to this process have requested, and whom to tell.

    Signals arrive in two ways: the main thread handles them between two instructions, and a thread reads them from a
    pipe, since foreign code may block the main thread for minutes (for example Ray, waiting for a head to answer).
    """

    def __init__(self, before: str = "before the first step") -> None:
        self.before = before  # what is then lost with the process
        self.reason = ""
        self.say: Callable[[str], None] = partial(print, flush=True)
        self._stop: Callable[[str], object] | None = None
        self._signals = 0  # that the main thread has handled
        self._leaving = self._over = self._told = False

    def listen(self) -> None:
        """Handle the signals from now on. Must be called from the main thread."""
        readable, writable = os.pipe()
        os.set_blocking(writable, False)
        signal.set_wakeup_fd(writable, warn_on_full_buffer=False)
        Thread(target=self._read, args=(readable,), name="signals", daemon=True).start()
        self.take_signals()

    def take_signals(self) -> None:
        """Handle the signals here even if other code has installed handlers; signals ignored at the start stay ignored.
        """
        for number in NAMES:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._handle)

    def hand_over(self, stop: Callable[[str], object]) -> None:
        """Note that there may be something to save now: call `stop` with the reason to end, at once if there is one
        already.
        """
        self._stop = stop
        if self.reason:
            stop(self.reason)

    def over(self) -> None:
        """Note that the run has ended and its process is about to."""
        self._over = True

    def tell(self) -> None:
        """Print the error line of a run that ended at once; only the first call prints."""
        if not self._told:
            self._told = True
            # Within ray.init the handler is Ray's, and raises SystemExit before the thread may have read which signal
            # it was.
            what = (
                f"stopped {self.before}: {self.reason or 'SIGTERM'}"
                if self._stop is None
                else "ended at once: Ctrl-C"
            )
            way_back = "" if self._stop is None else " to go on from the newest checkpoint"
            print(f"error: {what}; start the same command again{way_back}", file=sys.stderr, flush=True)

    def _handle(self, number: int, frame: Any) -> None:
        self._signals += 1
        self.reason = self.reason or NAMES[signal.Signals(number)]
        at_once = self._stop is None or (number == signal.SIGINT and self._signals > 1)
        if at_once and not self._leaving and not self._over:
            self._leaving = True  # once: the second of two would break the cleaning up
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
                self._stop(self.reason)  # first: nobody may be there to read what is said
                second = "; press it again to end at once" if number == signal.SIGINT else ""
                self.say(f"{self.reason}: the run ends after the step under way, with a checkpoint{second}")

    def _leave(self, again: bool) -> None:
        # else there was something to save after all, and the driver has been told
        if again or self._leaving or self._stop is None:
            self.tell()
            os._exit(1)
