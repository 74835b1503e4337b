"""Compiles the planner's inner loops. Each loop is plain Python too: with NUMBA_DISABLE_JIT=1 the same source runs
uncompiled, which the tests compare with.

The loops use nothing whose result differs between the two: no fast-math, only stable sorts.

Machine code is cached next to the source, or in the user's cache folder, if either can be written. numba looks for
changes only in a function's own file, but these functions call each other across files; so a digest of all of the
planner's files is part of the version. Compiled functions release Python's lock: planning in a thread does not stop
other threads.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

from numba import njit
from numba.core.caching import FunctionCache

Function = TypeVar("Function", bound=Callable[..., Any])

DIGEST = hashlib.sha256(
    b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.parent.rglob("*.py")))
).hexdigest()


class PackageCache(FunctionCache):  # type: ignore[misc]
    """numba's cache of a function, with the digest in its version: files of another version are not even opened (they
    may name classes that are gone).
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        self._cache_file._version += DIGEST


def compiled(function: Function) -> Function:
    """Compile a function at its first call."""
    return cast(Function, _cached(njit(nogil=True)(function), function))


def inner(function: Function) -> Function:
    """Like `compiled`, for functions that only compiled functions call: without an entry point for Python, which takes
    long to compile.
    """
    options: Any = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    return cast(Function, _cached(njit(**options)(function), function))


def _cached(dispatcher: Any, function: Callable[..., Any]) -> Any:
    if hasattr(dispatcher, "_cache"):  # not with NUMBA_DISABLE_JIT
        with contextlib.suppress(RuntimeError):  # numba found no folder that it can write to: compile in every process
            dispatcher._cache = PackageCache(function)
    return dispatcher
