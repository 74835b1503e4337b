"""Standard output and error of a command, which may fail while it works: nobody reads any more (`| head -1`, a terminal
that was closed), or the disk of a log is full. What cannot be written is lost, and the command goes on.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Callable
from typing import Any

NOBODY_READS = (errno.EPIPE, errno.EIO)  # a closed pipe, and a terminal that is gone


class LastingFile(io.FileIO):
    """The open file `descriptor`, for writing. Writes never fail; `error` keeps the first one that did."""

    def __init__(self, descriptor: int, name: str) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self.name = name
        self.error: OSError | None = None

    def write(self, content: Any) -> int:
        size = memoryview(content).nbytes
        try:
            written = super().write(content)
        except OSError as error:
            self.error = self.error or error
            return size
        return size if written is None else written  # None: whoever reads does not keep up, and is not waited for


def run_command(main: Callable[[list[str]], int], goes_on: bool = False) -> int:
    """Return the exit status of `main` with the arguments of this process, whose output may fail meanwhile. If a disk
    was full, that is said in one line, and the status is 1 unless the command `goes_on`: its result lies in files.
    """
    output, _ = _lasting("stdout"), _lasting("stderr")
    status = main(sys.argv[1:])
    sys.stdout.flush()
    if output.error and output.error.errno not in NOBODY_READS:
        level = "warning" if goes_on else "error"
        print(f"{level}: standard output was not written whole: {output.error.strerror}", file=sys.stderr, flush=True)
        return status if goes_on else status or 1
    return status


def _lasting(name: str) -> LastingFile:
    """Replace a standard stream of `sys`."""
    stream = getattr(sys, name)
    if stream is None:  # it was closed before the command began; nothing else is to get its number
        while (descriptor := os.open(os.devnull, os.O_RDWR)) < {"stdout": 1, "stderr": 2}[name]:
            pass
        os.set_inheritable(descriptor, True)
        options: dict[str, Any] = {"encoding": "utf-8", "errors": "backslashreplace"}
    else:
        descriptor = stream.fileno()
        options = {option: getattr(stream, option)
                   for option in ("encoding", "errors", "line_buffering", "write_through")}
    file = LastingFile(descriptor, f"<{name}>")
    setattr(sys, name, io.TextIOWrapper(io.BufferedWriter(file), **options))
    return file
