"""Finds where a program reads numbers of the device, so that the host waits for it: by source line.

    cuda    torch warns of every call that synchronises (`torch.cuda.set_sync_debug_mode`)
    cpu     host and device are one there: a mode of torch's counts the operators and methods whose result the host
            needs, and copies of numbers that it has
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).resolve().parent.parent.parent
OPERATORS = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "equal",
             "is_nonzero"}
"""Whose result, or its size, the host takes from the device."""
METHODS = {"tolist", "numpy", "__array__", "cpu"}
"""Of a tensor; they call no operator on the CPU."""
COPIES = {"tensor", "as_tensor", "asarray", "from_numpy", "new_tensor"}
"""Of numbers that the host has, from memory that is not pinned: the host waits for the copy to the device."""


class Place(NamedTuple):
    """What read, the source line that did, and the innermost line of this package that led there."""

    what: str
    line: str
    led_there: str


@contextmanager
def counted(device: torch.device) -> Iterator[Counter[Place]]:
    """Count reads of this thread and of backward passes that it starts."""
    found: Counter[Place] = Counter()
    with ExitStack() as stack:
        if device.type == "cuda":
            stack.enter_context(_warned(found))
        else:
            stack.enter_context(_Operators(found))
            stack.enter_context(_Methods(found))
        yield found


@contextmanager
def _warned(found: Counter[Place]) -> Iterator[None]:
    def show(message: Any, category: type[Warning], filename: str, lineno: int, *rest: Any) -> None:
        if "called a synchronizing" in str(message):
            _count(found, "synchronisation", sys._getframe(1))

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = show  # type: ignore[assignment]
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


class _Operators(TorchDispatchMode):
    def __init__(self, found: Counter[Place]) -> None:
        super().__init__()
        self._found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().partition("::")[2].partition(".")[0]
        by_mask = name in ("index", "index_put", "index_put_") and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
        by_counts = name == "repeat_interleave" and (kwargs or {}).get("output_size") is None
        if name in OPERATORS or by_mask or by_counts:
            _count(self._found, "a mask as index" if by_mask else name, sys._getframe(1))
        return func(*args, **(kwargs or {}))


class _Methods(TorchFunctionMode):
    def __init__(self, found: Counter[Place]) -> None:
        super().__init__()
        self._found = found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in COPIES or (name in METHODS and args and isinstance(args[0], torch.Tensor)):
            _count(self._found, name, sys._getframe(1))
        return func(*args, **(kwargs or {}))


def _count(found: Counter[Place], what: str, frame: FrameType | None) -> None:
    line = led_there = ""
    while frame is not None:
        file = frame.f_code.co_filename
        inside = "/torch/" in file or file.startswith("<") or file == __file__ or file.endswith("/warnings.py")
        if not inside and not line:
            line = f"{_short(file)}:{frame.f_lineno}"
        if file.startswith(str(ROOT / "dhp_ray")) and not led_there:
            led_there = f"{_short(file)}:{frame.f_lineno}"
        frame = frame.f_back
    found[Place(what, line, led_there)] += 1


def _short(file: str) -> str:
    """A file as its project knows it."""
    if file.startswith(str(ROOT)) and "site-packages" not in file:
        return file.removeprefix(f"{ROOT}/")
    return file.rpartition("site-packages/")[2]
