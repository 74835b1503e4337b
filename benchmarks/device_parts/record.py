"""What one part has found: figures and a table, written after every new one, so that a part that is ended leaves them.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class NotRun(Exception):  # noqa: N818 (no error)
    """A part has nothing to show on this machine; the message is why."""


class CheckError(RuntimeError):
    """A figure is not what it must be; one line."""


class Record:
    """Of one part: NAME.json and NAME.md in a folder."""

    def __init__(self, folder: Path, part: str, command: str, device: str) -> None:
        self._files = [folder / f"{part}.json", folder / f"{part}.md"]
        self.tree: dict[str, Any] = {"part": part, "command": command, "status": "running", "said": "", "seconds": 0.0,
                                     "device": describe(device), "versions": versions(), "figures": {}}
        self._tables: list[list[str]] = []
        self.save()

    def table(self, head: Sequence[str]) -> None:
        """Begin a table in markdown with these columns."""
        self._tables.append([f"| {' | '.join(head)} |", "|---" * len(head) + "|"])

    def row(self, name: str, figures: Mapping[str, Any], cells: Sequence[str]) -> None:
        """One result: its figures by name in the JSON, and a row of the table."""
        self.tree["figures"][name] = dict(figures)
        self._tables[-1].append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
        print(" ".join(cells), flush=True)
        self.save()

    def end(self, status: str, said: str, seconds: float) -> None:
        """`status`: done, not run or failed; `said`: why, in one line, or what the part comes to."""
        self.tree |= {"status": status, "said": said, "seconds": round(seconds, 1)}
        self.save()

    def save(self) -> None:
        write(self._files[0], json.dumps(self.tree, indent=2) + "\n")
        write(self._files[1], "\n\n".join("\n".join(table) for table in self._tables) + "\n")


def write(path: Path, text: str) -> None:
    """Whole or not at all."""
    partial = path.with_suffix(f"{path.suffix}.partial")
    partial.write_text(text)
    partial.replace(path)


def versions() -> dict[str, str]:
    """Of what a figure depends on; those that are not there are left out."""
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": platform.python_version()}
    for name in ("torch", "transformers", "numpy", "numba", "triton", "flash-attn", "flash-attn-3", "liger-kernel"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    import torch

    found["torch"] = torch.__version__  # with what it was built for
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    if torch.cuda.is_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def describe(device: str) -> str:
    """A device in words."""
    if device == "cpu":
        cpus = Path("/proc/cpuinfo")
        lines = cpus.read_text().splitlines() if cpus.exists() else []
        models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        return f"cpu: {models[0] if models else platform.processor()}, {len(os.sched_getaffinity(0))} cores"
    import torch

    properties = torch.cuda.get_device_properties(0)
    return (f"cuda: {properties.name}, {properties.total_memory / 2**30:.0f} GiB, compute capability "
            f"{properties.major}.{properties.minor}, 1 of {torch.cuda.device_count()}")
