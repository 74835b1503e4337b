"""Marks as a control thread sees them, on the CPU and on a device that lags behind; and what an abort ends."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from dhp_ray.comm.progress import AbortedError, Progress, StreamTimestamp, seconds_of

CPU = torch.device("cpu")


class Device:
    """As a device's module in torch. It has passed the first `done` of the events that were recorded."""

    def __init__(self) -> None:
        self.recorded = self.done = 0
        self.stream = "training"

    def current_stream(self, device: torch.device) -> str:
        return self.stream

    def Event(self) -> Any:  # noqa: N802 (torch's name)
        return _Event(self)


class _Event:
    def __init__(self, device: Device) -> None:
        self.device = device

    def record(self) -> None:
        self.device.recorded += 1
        self.number = self.device.recorded

    def query(self) -> bool:
        return self.number <= self.device.done


def on_device(monkeypatch: pytest.MonkeyPatch) -> tuple[Progress, Device]:
    device = Device()
    monkeypatch.setattr(torch, "get_device_module", lambda _: device)
    return Progress(torch.device("cuda")), device


def test_on_the_cpu_a_mark_is_passed_at_once() -> None:
    progress = Progress()
    progress.stage = "step 3, pack 1"
    progress.mark("layer 2")
    assert str(progress.passed()) == "step 3, pack 1, layer 2"
    with progress.waiting("exchange of a pack"):
        assert (progress.passed().doing, progress.passed().waits_for_peers) == ("exchange of a pack", True)
    after = progress.passed()
    assert not after.waits_for_peers
    assert after.number == 3


def test_a_device_passes_marks_later_than_the_host_records_them(monkeypatch: pytest.MonkeyPatch) -> None:
    progress, device = on_device(monkeypatch)
    progress.stage = "step 1"
    progress.mark("layer 0")
    with progress.waiting("exchange of a pack"):
        pass
    progress.stage = "step 2"  # the host is far ahead
    progress.mark("layer 1")
    seen = []
    for device.done in range(5):
        seen.append((str(progress.passed()), progress.passed().waits_for_peers))
    assert seen == [("", False), ("step 1, layer 0", False), ("step 1, exchange of a pack", True),
                    ("step 1, after exchange of a pack", False), ("step 2, layer 1", False)]


def test_marks_of_another_stream_say_nothing_of_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    progress, device = on_device(monkeypatch)
    progress.mark("layer 0")
    device.stream = "gathering"
    progress.mark("rows of other ranks", waits_for_peers=True)
    device.done = 2
    assert progress.passed().doing == "layer 0"
    assert device.recorded == 1


def test_marks_that_nobody_asks_for_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    progress, device = on_device(monkeypatch)
    for _ in range(100):
        progress.mark("layer")
        device.done = device.recorded
    assert len(progress._ahead) == 1


def test_after_an_abort_everything_raises() -> None:
    progress = Progress()
    progress.abort()
    for call in (lambda: progress.mark("layer"), progress.check, progress.synchronize,
                 lambda: progress.read(torch.ones(2))):
        with pytest.raises(AbortedError):
            call()


def test_a_wait_that_an_abort_ended_raises() -> None:
    """What it waited for may be garbage, though the wait itself returned."""
    progress = Progress()
    with pytest.raises(AbortedError), progress.waiting("exchange of a pack"):
        progress.abort()


def test_an_error_in_a_wait_is_not_hidden() -> None:
    progress = Progress()
    with pytest.raises(RuntimeError, match="Connection closed by peer"), progress.waiting("exchange of a pack"):
        raise RuntimeError("Connection closed by peer")


def test_timed_waits_end_at_the_next_mark_or_with_the_block() -> None:
    progress = Progress()
    progress.mark("gathering of layer 0", waits_for_peers=True)  # nobody collects it
    with progress.timed_waits() as waits:
        progress.mark("layer 0")
        assert waits == []
        progress.mark("reducing of layer 1", waits_for_peers=True)
        time.sleep(0.02)
        progress.mark("gathering of layer 0", waits_for_peers=True)  # the same wait goes on
        time.sleep(0.02)
        progress.mark("layer 0, backward")
        time.sleep(0.1)
        progress.mark("reducing of layer 0", waits_for_peers=True)
        time.sleep(0.01)
    assert len(waits) == 2
    assert 0.04 <= seconds_of(waits[:1]) < 0.1
    assert 0.01 <= seconds_of(waits[1:]) < 0.1
    progress.mark("layer 0")
    assert len(waits) == 2


def test_moments_on_the_cpu_are_seconds_apart() -> None:
    first = StreamTimestamp(CPU)
    assert 0.0 <= StreamTimestamp(CPU).since_s(first) < 1.0


@pytest.mark.gpu
def test_a_busy_device_is_seen_where_it_is() -> None:
    device = torch.device("cuda", 0)
    progress = Progress(device)
    progress.mark("layer 0")
    torch.cuda.synchronize()
    torch.cuda._sleep(10**9)
    progress.mark("layer 1")
    assert progress.passed().doing == "layer 0"
    progress.synchronize()
    assert progress.passed().doing == "layer 1"
