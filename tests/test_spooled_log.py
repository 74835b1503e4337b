from __future__ import annotations

import json
import subprocess
import sys
import threading
import tracemalloc
from itertools import islice, pairwise
from pathlib import Path

import pytest

from dhp_ray.spooled_log import SpooledLog, UploadTimer, json_text
from dhp_ray.storage import Folder, StorageError
from tests.disks import fill


def test_log_appends_reads_truncates_and_continues(folder: Folder) -> None:
    log = SpooledLog(folder, "ledger.jsonl")
    for step in range(1, 6):
        log.append({"step": step, "name": "ü"})
    assert [line["step"] for line in log.lines()] == [1, 2, 3, 4, 5]
    log.truncate(lambda line: line["step"] <= 3)
    log.append({"step": 4})
    log.close()
    again = SpooledLog(folder, "ledger.jsonl")
    assert [line["step"] for line in again.lines()] == [1, 2, 3, 4]
    again.append({"step": 5})
    again.close()
    assert [json.loads(line)["step"] for line in folder.read("ledger.jsonl").decode().splitlines()] == [1, 2, 3, 4, 5]


def test_a_long_log_is_cut_back_by_its_last_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lines that stay are copied: none of them is parsed, and they need not be in memory."""
    log, parsed = SpooledLog(Folder(str(tmp_path)), "ledger.jsonl"), list[bytes]()
    for step in range(1, 501):
        log.append({"step": step, "sample_ids": [f"sample-{step:06d}-{number:06d}" for number in range(200)]})
    loads = json.loads
    monkeypatch.setattr("json.loads", lambda text: parsed.append(text[:12]) or loads(text))
    tracemalloc.start()
    for last, num_parsed in ((500, 1), (497, 4)):
        log.truncate(lambda line: line["step"] <= last)  # noqa: B023
        assert len(parsed) == num_parsed
        parsed.clear()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 500_000  # the file has 2.8 MB
    assert [line["step"] for line in log.lines()] == list(range(1, 498))
    assert [line["step"] for _, line in islice(log.last_lines(), 2)] == [497, 496]
    log.truncate(lambda line: False)
    assert list(log.lines()) == list(log.last_lines()) == []
    log.close()


def test_a_process_that_has_a_cut_log_open_cannot_reach_it(tmp_path: Path) -> None:
    """Also if no line goes: it may be the driver that is believed to be dead."""
    late, log = (SpooledLog(Folder(str(tmp_path)), "ledger.jsonl") for _ in range(2))
    log.append({"step": 1})
    log.truncate(lambda line: True)
    late.append({"step": 2})
    assert list(log.lines()) == [{"step": 1}]


def test_a_line_that_a_crash_cut_short_is_dropped(folder: Folder) -> None:
    folder.write("ledger.jsonl", b'{"step": 1}\n{"step": 2}\n{"ste')
    log = SpooledLog(folder, "ledger.jsonl")
    log.append({"step": 3})
    assert [line["step"] for line in log.lines()] == [1, 2, 3]
    log.close()
    assert folder.read("ledger.jsonl") == b'{"step": 1}\n{"step": 2}\n{"step": 3}\n'


def test_a_line_that_does_not_fit_leaves_nothing(tmp_path: Path) -> None:
    """A real limit on the size of files, in a process of its own; Python gets an error there, not the signal."""
    program = (
        "import resource, sys; from dhp_ray.spooled_log import SpooledLog; from dhp_ray.storage import Folder, "
        "StorageError\n"
        "log = SpooledLog(Folder(sys.argv[1]), 'log'); log.append({'step': 1})\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (40, 40))\n"
        "for line in ({'text': 'x' * 100}, {'step': 2}, {'text': 'x' * 100}):\n"
        "    try: log.append(line)\n"
        "    except StorageError as error: print(error)"
    )
    finished = subprocess.run([sys.executable, "-c", program, str(tmp_path)], cwd=Path(__file__).parent.parent,
                              capture_output=True, text=True, check=True)
    assert finished.stdout.splitlines() == [f"{tmp_path}/log: cannot be written: File too large"] * 2
    assert list(SpooledLog(Folder(str(tmp_path)), "log").lines()) == [{"step": 1}, {"step": 2}]


def test_a_long_line_that_a_crash_cut_short_is_dropped(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path))
    folder.write("log", b'{"step": 1}\n' + b"x" * 200_000)
    assert [line["step"] for line in SpooledLog(folder, "log").lines()] == [1]
    folder.write("log", b"x" * 200_000)
    assert list(SpooledLog(folder, "log").lines()) == []


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path))
    folder.write("log", b'{"step": 1}\n[1]\n{"step": 3}\n')
    with pytest.raises(StorageError, match=r"log: line 2 is not a JSON object"):
        list(SpooledLog(folder, "log").lines())


def test_a_local_line_is_there_at_once_and_an_object_after_flush(folder: Folder) -> None:
    log = SpooledLog(folder, "metrics.jsonl")
    log.append({"step": 1})
    assert folder.exists("metrics.jsonl") == (folder.local_path() is not None)
    log.flush()
    assert folder.read("metrics.jsonl") == b'{"step": 1}\n'


def test_json_has_no_nan() -> None:
    line = json_text({"loss": float("nan"), "norms": [float("inf"), 1.0], "inner": {"x": float("-inf")}, "none": None,
                      "flag": True})
    assert json.loads(line) == {"loss": None, "norms": [None, 1.0], "inner": {"x": None}, "none": None, "flag": True}


def test_a_line_waits_for_room(small_disk: Path) -> None:
    log = SpooledLog(Folder(str(small_disk)), "ledger.jsonl")
    log.append({"step": 1})
    fill(small_disk / "part")
    threading.Timer(0.5, (small_disk / "part").unlink).start()
    line = {"step": 2, "sample_ids": ["x" * 5000]}
    log.append(line)
    assert list(log.lines()) == [{"step": 1}, line]


def test_uploads_that_take_long_come_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("dhp_ray.spooled_log.monotonic", lambda: clock[0])
    timer, took_s, begun_s = UploadTimer(10.0), 0.0, []
    for second in range(1000):
        clock[0] = second + took_s
        if timer.due:
            begun_s.append(clock[0])
            with timer.uploading():
                seconds = 0.1 if len(begun_s) < 3 else 4.0
                clock[0] += seconds
                took_s += seconds
    between = [later - earlier for earlier, later in pairwise(begun_s)]
    assert between[:2] == pytest.approx([11.0, 11.0], abs=1.1)
    assert between[2:] == pytest.approx([84.0] * len(between[2:]), abs=1.1), "80 s between two of 4 s"
    assert len(begun_s) > 8
