"""The lease of a run folder, between processes, threads, and hosts as far as one machine can have several."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

import dhp_ray.runtime.records.lease as lease_module
from dhp_ray.runtime.messages import RunError
from dhp_ray.runtime.records.lease import Lease, take_lease
from dhp_ray.spooled_log import SpooledLog
from dhp_ray.storage import Folder, StorageError
from tests.data.samples import talk, write_rows

ROOT = Path(__file__).parents[3]
HOLD = ("import sys, time; from dhp_ray.storage import Folder; from dhp_ray.runtime.records.lease import Lease\n"
        "with Lease(Folder(sys.argv[1])).take(print): print('held', flush=True); sys.stdin.read()")


class Holder:
    """A process that takes the lease and holds it until its standard input ends."""

    def __init__(self, folder: Folder) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", HOLD, folder.uri], cwd=ROOT, text=True,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        env=os.environ | {"PYTHONPATH": str(ROOT)})
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "held\n"

    def end(self) -> None:
        self.process.communicate()


@pytest.fixture
def hold() -> Iterator[Callable[[Folder], Holder]]:
    held: list[Holder] = []

    def begin(folder: Folder) -> Holder:
        held.append(Holder(folder))
        return held[-1]

    yield begin
    for holder in held:
        holder.process.kill()
        holder.end()


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is on another machine than those that it starts."""
    monkeypatch.setattr(lease_module, "_place", lambda: "another machine")


def silent(text: str) -> None:
    raise AssertionError(text)


def test_a_second_start_is_told_whose_the_folder_is(folder: Folder, hold: Callable[[Folder], Holder]) -> None:
    holder = hold(folder)
    begun = time.monotonic()
    line = (rf"^run\.dir: .*run\S* is in use by process {holder.process.pid} on host \S+, a run of age 0:00:\d\d; "
            "allowed: another run.dir, or .*ended$")
    with pytest.raises(RunError, match=line):
        Lease(folder).take(silent)
    assert time.monotonic() - begun < lease_module.EXPIRES_S / 2  # well before it expires
    assert len(folder.names("lease")) == 1  # what was refused leaves nothing
    holder.end()
    with Lease(folder).take(silent):
        pass


@pytest.mark.usefixtures("elsewhere")
def test_another_host_sees_that_the_run_goes_on(folder: Folder, hold: Callable[[Folder], Holder]) -> None:
    hold(folder)
    with pytest.raises(RunError, match="is in use by process"):
        Lease(folder).take(silent)


def test_a_run_killed_on_this_machine_is_followed_at_once(tmp_path: Path, hold: Callable[[Folder], Holder]) -> None:
    """Also while its parent has not noticed that it is dead."""
    holder = hold(Folder(str(tmp_path)))
    holder.process.kill()
    os.waitid(os.P_PID, holder.process.pid, os.WEXITED | os.WNOWAIT)
    begun = time.monotonic()
    with Lease(Folder(str(tmp_path))).take(silent):
        assert time.monotonic() - begun < lease_module.EXPIRES_S / 2  # well before it expires


@pytest.mark.usefixtures("elsewhere")
def test_the_lease_of_a_run_killed_elsewhere_expires(
    tmp_path: Path, hold: Callable[[Folder], Holder], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Folder(str(tmp_path))
    hold(folder).process.kill()
    monkeypatch.setattr(lease_module, "EXPIRES_S", 4.0)
    said: list[str] = []
    begun = time.monotonic()
    with Lease(folder).take(said.append):
        assert time.monotonic() - begun > 3.0
    (line,) = said
    assert line.startswith("waiting for the lease of process ")
    assert "takes over 4 s after" in line


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"null", b'{"state": "running"}'])
def test_a_lease_that_says_nothing_expires(tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Folder(str(tmp_path))
    folder.write("lease/000004_ab.json", content)
    folder.write("lease/notes.txt", b"not ours")
    monkeypatch.setattr(lease_module, "EXPIRES_S", 0.5)
    with Lease(folder).take(silent) as lease:
        assert lease.start.number == 5


def test_a_paused_run_writes_no_more_once_it_is_taken_over(
    tmp_path: Path, hold: Callable[[Folder], Holder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not dead: while its lease has not expired, the folder is its own."""
    folder = Folder(str(tmp_path))
    holder = hold(folder)
    (name,) = folder.names("lease")
    number, token = name.removesuffix(".json").split("_")
    paused = Lease(folder, lease_module.Start(int(number), token))  # as its driver has it
    paused.check()
    holder.process.send_signal(signal.SIGSTOP)
    with pytest.raises(RunError, match="is in use by process"):
        Lease(folder).take(silent)
    monkeypatch.setattr(lease_module, "EXPIRES_S", 2.0)
    time.sleep(2.5)
    with Lease(folder).take(silent) as lease:
        holder.process.send_signal(signal.SIGCONT)
        with pytest.raises(StorageError, match=r"was taken over by process \d+ on host .*writes no more$"):
            paused.check()
        time.sleep(1.5)  # it has had its chance to renew
        lease.check()
        holder.end()
        lease.check()
    with pytest.raises(StorageError, match="was taken over by"):  # also once the run that took over has ended
        paused.check()


def test_of_starts_in_the_same_moment_at_most_one_goes_on(tmp_path: Path) -> None:
    together = 6
    won = 0
    for trial in range(12):
        folder, barrier = Folder(str(tmp_path / str(trial))), Barrier(together)

        def begin(folder: Folder = folder, barrier: Barrier = barrier) -> Lease | None:
            barrier.wait()
            try:
                return Lease(folder).take(silent)
            except RunError:
                return None

        with ThreadPoolExecutor(together) as threads:
            leases = [lease for lease in threads.map(lambda _: begin(), range(together)) if lease]
        assert len(leases) <= 1
        for lease in leases:
            lease.check()
            lease.release()
        won += len(leases)
        with Lease(folder).take(silent):
            pass
    assert won > 0


def test_a_folder_that_was_taken_over_refuses_every_write(tmp_path: Path) -> None:
    """Files, deletions, and logs: also one that is open, whose file has another writer now."""
    mine, file = Folder(str(tmp_path / "run")), tmp_path / "file"
    file.write_text("content")
    first = Lease(mine).take(silent)
    mine.before_writing = first.check
    log = SpooledLog(mine, "ledger.jsonl")
    log.append({"step": 1})
    first._ended.set()  # it is not renewed any more
    theirs = Folder(mine.uri)
    theirs.write(first.start.file, json.dumps(json.loads(theirs.read(first.start.file)) | {"clock_s": -100.0}).encode())
    with Lease(theirs).take(silent):
        other = SpooledLog(theirs, "ledger.jsonl")
        other.truncate(lambda line: True)
        for write in (lambda: log.append({"step": 2}), lambda: log.truncate(lambda line: True),
                      lambda: mine.write("plan", b""), lambda: mine.delete("plan"),
                      lambda: mine.upload(file, "plan")):
            with pytest.raises(StorageError, match="was taken over by"):
                write()
        # one write that was under way when the lease was lost
        mine.before_writing = lambda: None
        log.append({"step": 2})
        other.append({"step": 3})
        assert [line["step"] for line in other.lines()] == [1, 3]


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"^run\.dir: .*file/run"):
        take_lease(str(tmp_path / "file" / "run"), silent)
    with pytest.raises(RunError, match=r"^run\.dir: unknown://bucket/run"):
        take_lease("unknown://bucket/run", silent)


def test_a_second_job_in_the_folder_ends_with_one_line_before_ray(
    tmp_path: Path, hold: Callable[[Folder], Holder]
) -> None:
    rows = write_rows(tmp_path / "rows.json", [{"conversations": talk("Name a colour.", "Red.")}])
    holder = hold(Folder(str(tmp_path / "run")))
    done = subprocess.run([sys.executable, "-X", "importtime", "jobs/train.py", f"run.dir={tmp_path / 'run'}",
                           "data=llava", f"data.path={rows}", "cluster.num_workers=1"], cwd=ROOT, capture_output=True,
                          text=True, timeout=60, env=os.environ | {"RAY_ADDRESS": "local"})
    (line,) = [line for line in done.stderr.splitlines() if not line.startswith("import time:")]
    assert (done.returncode, done.stdout) == (1, "")
    assert line.startswith(f"error: run.dir: {tmp_path / 'run'} is in use by process {holder.process.pid} on host ")
    assert not [line for line in done.stderr.splitlines() if line.endswith(("| ray", "| torch"))]
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["lease"]
