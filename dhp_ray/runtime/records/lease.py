"""The lease of a run folder: of several starts, one at a time writes there.

    lease/000003_5f0c9a1e.json    the third start in this folder: which process it is, and when it has last renewed

The start with the highest number has the folder. A file is written by its own process alone, and that of the last start
stays when it ends, marked as ended: so a process that was paused, for however long, finds that a later one has been
there, and writes no more.
"""

from __future__ import annotations

import json
import os
import socket
import uuid
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from threading import Event, Thread
from time import monotonic, sleep
from typing import Any, NamedTuple

from dhp_ray.run_folder import LEASE_FOLDER
from dhp_ray.runtime.messages import RunError
from dhp_ray.storage import Folder, StorageError

RENEW_S = 1.0  # another host sees by the change that the run goes on, not by comparing clocks
EXPIRES_S = 20.0  # not renewed for this long, a lease is that of a dead run, or of one that will notice that it is lost
GIVING_WAY_S = 0.3  # how long a start of the same moment may take to give way


def take_lease(run_dir: str, say: Callable[[str], None], patience_s: float = 0.0) -> Lease:
    """Return a run folder's lease; another run may go on for `patience_s`. RunError: it goes on, or writing fails."""
    begun_s = monotonic()
    while True:
        try:
            return Lease(Folder(run_dir)).take(say)
        except StorageError as error:
            raise RunError(f"run.dir: {error}") from None
        except RunError:
            if monotonic() - begun_s >= patience_s:
                raise
        sleep(RENEW_S)


class Start(NamedTuple):
    """One start in a folder: a file of LEASE_FOLDER. Of two of the same moment and number, the larger token goes on."""

    number: int
    token: str

    @property
    def file(self) -> str:
        return f"{LEASE_FOLDER}/{self.number:06d}_{self.token}.json"


class Lease:
    """The lease of `folder`: `take` it before writing, `release` it at the end. A pickled one can only be checked."""

    def __init__(self, folder: Folder, start: Start | None = None) -> None:
        self.folder, self.start = folder, start or Start(0, "")
        self._begun = monotonic()
        self._ended = Event()
        self._renewing: Thread | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Lease, (self.folder, self.start)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def take(self, say: Callable[[str], None]) -> Lease:
        """Take the lease and keep renewing it. If the run before has died, wait until its lease has expired (`say` gets
        one line), unless it was of this machine. RunError: a run that goes on has it. StorageError: writing fails.
        """
        before = self._starts()
        while before:
            for start in before:
                if start.number == before[-1].number:  # those before have been judged by this one
                    self._wait_for_end(start, say)
            newest = self._starts()
            if newest == before:
                break
            before = newest  # somebody else has come first
        self.start = Start(before[-1].number + 1 if before else 1, uuid.uuid4().hex[:8])
        try:
            # Starts in the same moment have the same number. Each writes, and then looks, twice: the smaller token
            # gives way, unless it was running before the other has looked.
            self._write("starting")
            for start in self._rivals():
                if self._read(start)["state"] == "running":
                    self._ended.wait(GIVING_WAY_S)
                if start > self.start or self._read(start)["state"] == "running":
                    raise self._refusal(start)
            self._write("running")
            for start in self._rivals():
                if start > self.start:
                    raise self._refusal(start)
        except BaseException:
            self.folder.delete(self.start.file)
            raise
        for start in before:
            self.folder.delete(start.file)
        self._renewing = Thread(target=self._renew, name="lease", daemon=True)
        self._renewing.start()
        return self

    def check(self) -> None:
        """Call this before something is written into the folder. StorageError: another start has taken it over."""
        later = [start for start in self._starts() if start.number > self.start.number]
        if later:
            raise StorageError(f"run.dir: {self.folder.uri} was taken over by {_who(self._read(later[-1]))}, while "
                               "this run did not renew its lease; this run has ended and writes no more")

    def release(self) -> None:
        """Mark the run as ended; nothing happens if the lease is not held (any more)."""
        if self._renewing is None:
            return
        self._ended.set()
        self._renewing.join(EXPIRES_S / 4)  # the storage may not answer
        self._renewing = None
        try:
            self.check()
            self._write("ended")
        except StorageError:
            return  # it is lost, or it expires by itself

    def _starts(self) -> list[Start]:
        """All starts whose files are there, the latest last."""
        found = [name.removesuffix(".json").split("_") for name in self.folder.names(LEASE_FOLDER)]
        return sorted(Start(int(words[0]), words[1]) for words in found if len(words) == 2 and words[0].isdecimal())

    def _rivals(self) -> list[Start]:
        return [start for start in self._starts() if start.number >= self.start.number and start != self.start]

    def _wait_for_end(self, start: Start, say: Callable[[str], None]) -> None:
        """Return once a start has ended, or its lease has expired. RunError: it goes on."""
        seen = self._read(start)
        if seen["state"] == "ended":
            return
        here = bool(seen.get("place")) and seen["place"] == _place()
        if here and _born(seen["pid"]) != seen["born"]:
            return
        if here and monotonic() - seen["clock_s"] < EXPIRES_S:
            raise self._refusal(start)
        since_s, said = seen["clock_s"] if here else monotonic(), False
        while monotonic() - since_s < EXPIRES_S:
            self._ended.wait(RENEW_S / 5)
            now = self._read(start)
            if now["state"] == "ended":
                return
            if now != seen:
                raise self._refusal(start)
            if not said and monotonic() - since_s > 2 * RENEW_S:
                say(f"waiting for the lease of {_who(seen)} on {self.folder.uri}, which it does not renew; this run "
                    f"takes over {EXPIRES_S:.0f} s after the last time")
                said = True

    def _renew(self) -> None:
        while not self._ended.wait(RENEW_S):
            try:
                self.check()
                self._write("running")
            except StorageError:
                continue  # tried again; what is wrong is reported by what the run itself writes

    def _write(self, state: str) -> None:
        line = {"state": state, "host": socket.gethostname(), "pid": os.getpid(), "place": _place(),
                "born": _born(os.getpid()), "held_s": round(monotonic() - self._begun, 3),
                "clock_s": monotonic()}
        self.folder.write(self.start.file, json.dumps(line).encode())

    def _read(self, start: Start) -> dict[str, Any]:
        """What a start has written of itself; "ended" if its file is gone."""
        try:
            content = self.folder.read(start.file)
        except StorageError:
            if self.folder.exists(start.file):
                raise
            return {"state": "ended"}
        try:
            found = json.loads(content)
        except ValueError:
            found = None
        known = isinstance(found, dict) and {"state", "place", "pid", "born", "clock_s"} <= set(found)
        return dict(found) if known else {"state": "unknown"}  # then it expires, unless it changes

    def _refusal(self, start: Start) -> RunError:
        return RunError(f"run.dir: {self.folder.uri} is in use by {_who(self._read(start))}; allowed: another run.dir, "
                        "or this one once that run has ended")


def _who(seen: dict[str, Any]) -> str:
    if "pid" not in seen:
        return "another start"
    return (f"process {seen['pid']} on host {seen.get('host')}, a run of age "
            f"{timedelta(seconds=round(seen.get('held_s', 0)))}")


def _place() -> str:
    """What names this machine since its boot, and its numbering of processes; empty where nothing does."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _born(pid: int) -> str:
    """When a process of this machine began, in the kernel's units; empty if there is none (any more)."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if words[0] in "ZX" else words[19]
