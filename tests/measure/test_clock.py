"""What a thread loses to others, with a real competitor on its core."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from dhp_ray.measure.clock import Gauge, QuietCores, lost_of, lost_s, lost_since, may_preempt, undisturbed

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no sched_setaffinity")


@pytest.fixture
def shared_core() -> Iterator[None]:
    """This process and one that never rests, on one core."""
    before = os.sched_getaffinity(0)
    core = max(before)
    program = f"import os; os.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
    rival = subprocess.Popen([sys.executable, "-c", program])
    os.sched_setaffinity(0, {core})
    try:
        time.sleep(0.3)
        yield
    finally:
        os.sched_setaffinity(0, before)
        rival.kill()
        rival.wait()


def busy(seconds: float) -> tuple[float, float]:
    """(on the clock, lost to others) for so many seconds of compute."""
    lost, begin, computed = lost_s(), time.perf_counter(), time.thread_time()
    while time.thread_time() - computed < seconds:
        pass
    return time.perf_counter() - begin, lost_since(lost)


def test_what_is_lost_is_what_the_clock_shows_beyond_the_compute(shared_core: None) -> None:
    clock_s, lost = busy(0.3)
    assert lost > 0.1
    assert clock_s - lost == pytest.approx(0.3, rel=0.1)


def test_what_the_process_s_own_threads_take_of_the_core_is_not_lost() -> None:
    before, stop = os.sched_getaffinity(0), threading.Event()
    os.sched_setaffinity(0, {max(before)})  # the thread inherits it
    own = threading.Thread(target=multiply_until, args=(stop,))
    own.start()
    try:
        for _ in range(40):  # other processes may be at work, too: the thread is to have had its share of the core
            others_s = time.process_time() - time.thread_time()
            clock_s, lost = busy(0.3)
            others_s = time.process_time() - time.thread_time() - others_s
            if others_s > 0.1:
                break
    finally:
        stop.set()
        own.join()
        os.sched_setaffinity(0, before)
    assert others_s > 0.1, "both threads had the core"
    assert lost == pytest.approx(clock_s - 0.3 - others_s, abs=0.05)


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="wants two cores")
def test_threads_on_other_cores_hide_nothing_that_is_lost(shared_core: None) -> None:
    """The thread shares its core with a rival; a thread of its own computes on another core."""
    stop, here = threading.Event(), max(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {here, 0 if here else 1})
    own = threading.Thread(target=multiply_until, args=(stop, 0 if here else 1))
    own.start()
    try:
        clock_s, lost = busy(0.3)
        assert lost == pytest.approx(clock_s - 0.3, abs=0.05)
    finally:
        stop.set()
        own.join()


def multiply_until(stop: threading.Event, core: int | None = None) -> None:
    """Work that does not hold the interpreter's lock."""
    if core is not None:
        os.sched_setaffinity(0, {core})
    matrix = torch.randn(256, 256)
    while not stop.is_set():
        torch.mm(matrix, matrix)


def test_a_short_span_is_never_taken_for_shorter_than_its_compute(shared_core: None) -> None:
    """The core changes hands between two looks at what is lost, outside of the span that is timed."""
    clipped, found = [], []
    for _ in range(1500):
        lost, computed = lost_s(), time.thread_time()
        clock_s, _ = busy(2e-4)
        lost, computed = lost_since(lost), time.thread_time() - computed
        clipped.append(clock_s - min(lost, clock_s))
        found.append(clock_s - lost_of(clock_s, lost, computed))
    assert min(clipped) < 1e-4  # what this is about
    assert min(found) > 1.9e-4


@pytest.mark.skipif(not may_preempt(), reason="this process may not run before others")
def test_undisturbed_nothing_is_lost_and_afterwards_all_is_as_before(shared_core: None) -> None:
    with undisturbed():
        assert os.sched_getscheduler(0) == os.SCHED_RR
        clock_s, lost = busy(0.3)
    assert lost < 0.03
    assert clock_s == pytest.approx(0.3, rel=0.1)
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


def test_a_core_that_is_shared_is_slower_than_at_its_best() -> None:
    gauge = Gauge()
    assert gauge.slowness() >= 1.0
    gauge.best_s /= 2  # as if it had once been twice as fast
    assert gauge.slowness() >= 1.9


def test_a_core_that_has_just_slept_is_not_taken_for_a_slow_one(monkeypatch: pytest.MonkeyPatch) -> None:
    gauge = Gauge()
    seconds = iter([1.3, 1.25, 1.2, 1.2, 1.1, 1.0, 1.02, 1.01])
    monkeypatch.setattr(gauge, "best_s", 1.0)
    monkeypatch.setattr(gauge, "_seconds", lambda: next(seconds))
    assert gauge.slowness() == 1.01


def test_waits_for_quiet_cores_as_long_as_that_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look finds slow cores; the fifth one's are at their best. Then none is, until the cores have become quiet."""
    monkeypatch.setattr(QuietCores, "LOOK_S", 0.0)
    looks, slow = 0, [2.0] * 4 + [1.0]

    def slowness() -> float:
        nonlocal looks
        looks += 1
        return slow[min(looks, len(slow)) - 1]

    quiet = QuietCores(slowness, 20)
    quiet.wait()
    assert (looks, quiet.hopeless) == (5, False)
    slow.append(2.0)
    for _ in range(quiet.VAIN):
        assert not quiet.hopeless
        quiet.wait()
    assert (looks, quiet.hopeless) == (5 + 20 * quiet.VAIN, True)
    quiet.wait()
    assert (looks, quiet.hopeless) == (6 + 20 * quiet.VAIN, True)
    slow = [1.0]
    quiet.wait()
    assert not quiet.hopeless
