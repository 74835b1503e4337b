"""Signals to a process of its own: who is told, and that it ends whatever it is at."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dhp_ray.runtime.job.signals import LEAVE_S

ROOT = Path(__file__).parents[3]

HEAD = """
import ctypes, os, signal, sys, time
from dhp_ray.runtime.job.signals import ShutdownSignals

ending = ShutdownSignals()

def main(work, before=lambda: None):
    return ending.run(lambda: (before(), print("ready", flush=True), work())[2])
"""
SLEEP = "sys.exit(main(lambda: time.sleep(60)))"
# A mutex that the thread holds itself: signals do not interrupt the wait for it, as they do not interrupt Ray's for a
# head.
FOREIGN = ("mutex = ctypes.create_string_buffer(256); lock = ctypes.CDLL(None).pthread_mutex_lock; "
           "sys.exit(main(lambda: lock(mutex), before=lambda: lock(mutex)))")
TRAIN = """ending.hand_over(lambda reason: print("told", reason, flush=True)); """ + SLEEP
OVER = 'ending.hand_over(lambda reason: print("told", flush=True)); ending.over(); main(lambda: time.sleep(0.5))'
MUTE = "ending.say = lambda text: open('/nowhere/at/all'); " + TRAIN
RAY = ("def start_ray(): signal.signal(signal.SIGTERM, lambda *_: sys.exit(15)); ending.take_signals()\n"
       "sys.exit(main(lambda: time.sleep(60), before=start_ray))")
WRAPPED = """
def work():
    try:
        time.sleep(60)
    except KeyboardInterrupt as error:
        raise ModuleNotFoundError("a part of it") from error

sys.exit(main(work))
"""
BROKEN = "sys.exit(main(lambda: 1 / 0))"


class Process:
    def __init__(self, code: str, ignored: str = "") -> None:
        before = "import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"  # tests may run under nohup
        before += f"signal.signal(signal.{ignored}, signal.SIG_IGN)\n" if ignored else ""
        self._process = subprocess.Popen([sys.executable, "-c", before + HEAD + code],
                                         env=os.environ | {"PYTHONPATH": str(ROOT)}, text=True,
                                         stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert self._process.stdout is not None
        self.lines = iter(self._process.stdout)
        assert next(self.lines) == "ready\n"

    def send(self, number: int) -> None:
        self._process.send_signal(number)

    def ended(self) -> tuple[int, list[str], str]:
        """Exit status, the lines that had not been read, and what it said on standard error."""
        output, errors = self._process.communicate(timeout=30)
        return self._process.returncode, output.splitlines(), errors

    def end(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.communicate()


Begin = Callable[..., Process]


@pytest.fixture
def begin() -> Iterator[Begin]:
    made: list[Process] = []

    def begin(code: str, ignored: str = "") -> Process:
        made.append(Process(code, ignored))
        return made[-1]

    yield begin
    for process in made:
        process.end()


@pytest.mark.parametrize("code", [SLEEP, RAY], ids=["sleep", "after-another-handler"])
@pytest.mark.parametrize(
    ("number", "name"), [(signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM"), (signal.SIGHUP, "SIGHUP")],
    ids=["SIGINT", "SIGTERM", "SIGHUP"]
)
def test_before_there_is_anything_to_save_a_signal_ends_the_process(
    begin: Begin, code: str, number: int, name: str
) -> None:
    process = begin(code)
    process.send(number)
    assert process.ended() == (1, [], f"error: stopped before the first step: {name}; start the same command again\n")


def test_foreign_code_may_raise_its_own_error_for_the_signal(begin: Begin) -> None:
    """An import that SIGTERM interrupted once left a traceback in place of the line."""
    process = begin(WRAPPED)
    process.send(signal.SIGTERM)
    assert process.ended() == (1, [], "error: stopped before the first step: SIGTERM; start the same command again\n")


def test_an_error_without_a_signal_is_raised(begin: Begin) -> None:
    assert begin(BROKEN).ended()[2].endswith("ZeroDivisionError: division by zero\n")


def test_foreign_code_cannot_hold_the_process_up(begin: Begin) -> None:
    process = begin(FOREIGN)
    time.sleep(0.5)  # until the foreign code has the main thread
    process.send(signal.SIGTERM)
    begun = time.monotonic()
    assert process.ended() == (1, [], "error: stopped before the first step: SIGTERM; start the same command again\n")
    assert time.monotonic() - begun > LEAVE_S / 2  # not before the main thread had its time to clean up


def test_a_run_that_trains_is_told_and_a_second_ctrl_c_ends_it_at_once(begin: Begin) -> None:
    process = begin(TRAIN)
    process.send(signal.SIGINT)
    assert next(process.lines) == "told Ctrl-C\n"
    assert next(process.lines).startswith(
        "Ctrl-C: the run ends after the step under way, with a checkpoint; press it again to end at once"
    )
    process.send(signal.SIGINT)
    assert process.ended() == (
        1,
        [],
        "error: ended at once: Ctrl-C; start the same command again to go on from the newest checkpoint\n",
    )


def test_a_run_that_trains_is_told_of_sigterm_once(begin: Begin) -> None:
    process = begin(TRAIN)
    process.send(signal.SIGTERM)
    assert next(process.lines) == "told SIGTERM\n"
    assert next(process.lines) == "SIGTERM: the run ends after the step under way, with a checkpoint\n"
    process.send(signal.SIGTERM)
    time.sleep(0.2)
    process.send(signal.SIGINT)  # the third signal, and the first Ctrl-C after another
    assert process.ended()[1] == []


def test_a_run_is_told_though_nothing_can_be_said(begin: Begin) -> None:
    """The disk that its output goes to is full, or the terminal is gone."""
    process = begin(MUTE)
    process.send(signal.SIGTERM)
    assert next(process.lines) == "told SIGTERM\n"


@pytest.mark.parametrize("ignored", ["SIGINT", "SIGHUP"])
def test_a_signal_that_the_process_was_started_to_ignore_stays_ignored(begin: Begin, ignored: str) -> None:
    """As a shell starts what runs in the background, and as nohup does."""
    process = begin(TRAIN, ignored=ignored)
    process.send(signal.Signals[ignored])
    process.send(signal.SIGTERM)
    assert next(process.lines) == "told SIGTERM\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_run_that_is_over_is_told_no_more(begin: Begin, number: int) -> None:
    process = begin(OVER)
    process.send(number)
    assert process.ended() == (0, [], "")
