"""Time by thread and part of a program, taken around its methods."""

from __future__ import annotations

import functools
import threading
import time
from collections import defaultdict
from typing import Any


class Stopwatch:
    """Milliseconds by thread and part, without those of the parts inside."""

    def __init__(self) -> None:
        self.wall_ms: dict[tuple[str, str], float] = defaultdict(float)
        self.cpu_ms: dict[tuple[str, str], float] = defaultdict(float)
        self._inside = threading.local()

    def time(self, owner: Any, name: str, part: str) -> None:
        """From here on, calls of a method count."""
        method = getattr(owner, name)

        @functools.wraps(method)
        def call(*arguments: Any, **options: Any) -> Any:
            result, stack = None, self._inside.__dict__.setdefault("stack", [])
            stack.append([0.0, 0.0])
            wall, cpu = time.perf_counter(), time.thread_time()
            try:
                result = method(*arguments, **options)
                if hasattr(result, "__next__"):
                    result = iter(list(result))  # generators of messages: their work is done when they are gone through
                return result
            finally:
                spent = (time.perf_counter() - wall, time.thread_time() - cpu)
                inner = stack.pop()
                key = ("main" if threading.current_thread() is threading.main_thread() else "planning", part)
                self.wall_ms[key] += 1e3 * (spent[0] - inner[0])
                self.cpu_ms[key] += 1e3 * (spent[1] - inner[1])
                if stack:
                    stack[-1] = [before + now for before, now in zip(stack[-1], spent)]

        setattr(owner, name, call)
