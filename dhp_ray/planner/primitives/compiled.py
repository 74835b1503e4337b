"""Compiles the planner's inner loops. Each stays plain Python too: with NUMBA_DISABLE_JIT=1 the same source runs
uncompiled, the oracle of the tests.

The loops use nothing whose result differs between the two: no fast-math, stable sorts only.

Machine code is kept beside the source, or where the user's caches are, if either can be written. numba looks for
changes in a function's own file only, while these call each other across files; so a digest of all of the planner's
files is part of the version. Compiled functions release Python's lock: a plan made in a thread does not stop the
others.
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
    """numba's cache of a function, with the digest in its version: what another version wrote is not even opened (it
    may name classes that are gone)."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        self._cache_file._version += DIGEST


def compiled(function: Function) -> Function:
    """Compile at the first call."""
    return cast(Function, _cached(njit(nogil=True)(function), function))


def inner(function: Function) -> Function:
    """Like `compiled`, for functions that only compiled ones call: without the entry from Python, which takes long
    to compile."""
    options: Any = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    return cast(Function, _cached(njit(**options)(function), function))


def _cached(dispatcher: Any, function: Callable[..., Any]) -> Any:
    if hasattr(dispatcher, "_cache"):  # not with NUMBA_DISABLE_JIT
        with contextlib.suppress(RuntimeError):  # numba found no folder that it can write to: compile in every process
            dispatcher._cache = PackageCache(function)
    return dispatcher
