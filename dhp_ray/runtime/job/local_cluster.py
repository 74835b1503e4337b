"""A Ray cluster of this machine alone, as a program of its own: `start_cluster` runs it.

It has a session of its own, and all that it starts is in there. So what a terminal, `timeout` or a batch system sends
to the process group of a run does not end the run's cluster beside it. Signals that a whole control group receives
(systemd, Slurm) are blocked in it, and in all that it starts: the run ends it, once it needs it no more.

It ends with its standard input: when the run closes it, or when the run's process is gone, however that has ended.
Imports nothing of dhp_ray, since it is run by its path.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

BLOCKED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

END_S = 10.0  # how long the program may take to end what it has started


def start_cluster() -> subprocess.Popen[str]:
    """Start the program; `answer_of` waits until its cluster is there."""
    return subprocess.Popen([sys.executable, "-P", __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                            stderr=subprocess.DEVNULL, start_new_session=True, text=True)


def answer_of(program: subprocess.Popen[str]) -> dict[str, str]:
    """Return what the program has to say: the `address` of its cluster, or the `error` why there is none."""
    assert program.stdout is not None
    said = program.stdout.readline()
    return json.loads(said) if said else {"error": "the process that starts it has ended"}


def end_cluster(program: subprocess.Popen[str]) -> None:
    assert program.stdin is not None
    program.stdin.close()
    try:
        program.wait(END_S)
    except subprocess.TimeoutExpired:
        program.kill()  # Linux then ends Ray's own processes


def main() -> None:
    # before anything else: what is started here inherits it
    signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED)
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Ray may print something
    import ray

    scratch: Path | None = None
    try:
        context: Any = ray.init("local", include_dashboard=False, log_to_driver=False, configure_logging=False)
        address = context.address_info
        said, scratch = {"address": address["gcs_address"]}, Path(address["session_dir"])
    except Exception as error:
        said = {"error": (str(error).strip().splitlines() or [type(error).__name__])[0]}
    with suppress(OSError):  # nobody waits for it any more
        print(json.dumps(said), file=answer, flush=True)
        sys.stdin.buffer.read()
    if not Path("/proc/self").exists():
        ray.shutdown()
        return
    # Ray asks its processes to end, which are not to listen, and waits a second for each
    for process in of_this_session():
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    for spilled in scratch.glob("ray_spilled_objects*") if scratch else ():
        shutil.rmtree(spilled, ignore_errors=True)
    os._exit(0)


def of_this_session() -> list[int]:
    """Return the other processes of this process's session."""
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(ValueError, ProcessLookupError):
            if os.getsid(int(entry.name)) == os.getsid(0) and int(entry.name) != os.getpid():
                found.append(int(entry.name))
    return found


if __name__ == "__main__":
    main()
