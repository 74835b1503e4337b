"""Runs parts one after the other, each in a process of its own that is ended with all of its children at its limit.

python -m benchmarks.device_parts.processes NAME COMMAND key=value...    one part, in this process
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.device_parts.record import CheckError, NotRun, Record, write
from benchmarks.device_parts.settings import LIMITS_S, WORLD_LIMITS_S, Settings

ROOT = Path(__file__).resolve().parent.parent.parent
MODULES = {"tests": "gpu_tests", "abort": "aborts", **dict.fromkeys(WORLD_LIMITS_S, "world")}
"""Of parts whose module has another name."""
POLL_S = 0.05
RunPart = Callable[[Settings, str, str], dict[str, Any]]


def run_parts(settings: Settings, command: list[str], run: RunPart | None = None) -> list[dict[str, Any]]:
    """Run every part of the settings (by `run_part`), with a line as it begins and as it ends; what each has written
    down.
    """
    settings.out.mkdir(parents=True, exist_ok=True)
    records = []
    for part in settings.parts:
        print(f"{part}: begins (at most {settings.limit_of(part):g} s)", flush=True)
        record = (run or run_part)(settings, part, " ".join(command))
        how = "FAILED" if record["status"] == "failed" else record["status"]
        print(f"{part}: {how} after {record['seconds']:.1f} s{': ' * bool(record['said'])}{record['said']}", flush=True)
        records.append(record)
    return records


def run_part(
    settings: Settings, part: str, command: str, is_over: Callable[[], bool] = lambda: False
) -> dict[str, Any]:
    """Run one part to its end or its limit, or until `is_over`; its record, also where its process could not write
    one.
    """
    file, log = settings.out / f"{part}.json", settings.out / f"{part}.log"
    for name in (file, file.with_suffix(".md"), log):
        name.unlink(missing_ok=True)
    begin = time.monotonic()
    what = run_process(
        [sys.executable, "-m", "benchmarks.device_parts.processes", part, command, *settings.arguments()], log,
        settings.limit_of(part), is_over)
    seconds = round(time.monotonic() - begin, 1)
    record: dict[str, Any] = (json.loads(file.read_text()) if file.exists()
                              else {"part": part, "command": command, "device": settings.device, "versions": {},
                                    "figures": {}, "status": "running"})
    if record["status"] == "running":
        record |= {"status": "failed", "said": f"{what}; {last_line(log)}"}
    record["seconds"] = seconds
    write(file, json.dumps(record, indent=2) + "\n")
    return record


def run_process(command: list[str], log: Path, limit_s: float, is_over: Callable[[], bool] = lambda: False) -> str:
    """Run a command at the root of the checkout, and end it, at its limit or when it `is_over`, with all that it has
    started; how it ended.
    """
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TOKENIZERS_PARALLELISM": "false"}
    late = over = False
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=output,
                                   stderr=subprocess.STDOUT, start_new_session=True)
        deadline = time.monotonic() + limit_s
        try:
            while process.poll() is None and not (late or over):
                time.sleep(POLL_S)
                late, over = time.monotonic() > deadline, is_over()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # also what it has left
            status = process.wait()
    if late:
        return f"over its limit of {limit_s:g} s"
    if over:
        return "ended, since the part was over elsewhere"
    return f"its process died of {signal.Signals(-status).name}" if status < 0 else f"its process ended with {status}"


def last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return f"{log.name} ends with: {lines[-1][:200]}" if lines else f"{log.name} is empty"


def summary(settings: Settings, records: list[dict[str, Any]]) -> str:
    """Every part's table, and one of all parts, in markdown."""
    lines = []
    for record in records:
        file = settings.out / f"{record['part']}.md"
        if file.exists() and (text := file.read_text().strip()):
            lines += ["", f"### {record['part']}", "", text]
    lines += ["", f"### Summary: {records[0]['device'] if records else settings.device}", "",
              "| part | | seconds | |", "|---|---|---|---|"]
    lines += [f"| {record['part']} | {record['status']} | {record['seconds']:.0f} | {record['said']} |"
              for record in records]
    return "\n".join([*lines, "", f"JSON, tables and logs: {settings.out}"])


def main(part: str, command: str, arguments: list[str]) -> int:
    settings = Settings.of(arguments, LIMITS_S | WORLD_LIMITS_S)
    begin = time.monotonic()
    record = Record(settings.out, part, command, settings.device)
    try:
        said = importlib.import_module(f"benchmarks.device_parts.{MODULES.get(part, part)}").run(settings, record)
        status = "done"
    except NotRun as reason:
        status, said = "not run", str(reason)
    except CheckError as error:
        status, said = "failed", str(error)
    except Exception as error:
        import traceback

        traceback.print_exc()
        first = str(error).strip().split("\n")[0][:300]
        status, said = "failed", f"{type(error).__name__}: {first}"
    record.end(status, said, time.monotonic() - begin)
    sys.stdout.flush()
    os._exit(0)  # not held up by a thread or a communicator that never ends


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
