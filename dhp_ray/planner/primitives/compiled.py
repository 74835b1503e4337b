"""Compiles the planner's inner loops. Each loop is plain Python too: with NUMBA_DISABLE_JIT=1 the same source runs
uncompiled, which the tests compare with.

The loops use nothing whose result differs between the two: no fast-math, only stable sorts. Compiled functions release
Python's lock: planning in a thread does not stop other threads.

Machine code is kept in the user's cache folder (numba keeps it beside the source, where each copy of the source would
compile anew). These functions call each other across files, so a digest of all of the planner's files is the version;
each has a folder, and folders that no process has used for long are deleted.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import logging
import os
import pickle
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
from numba import njit
from numba.core.caching import NullCache
from numba.core.compiler import CompileResult
from numba.core.serialize import dumps
from numba.extending import register_jitable

from dhp_ray.user_cache import cache_folders, keep

Function = TypeVar("Function", bound=Callable[..., Any])

DIGEST = hashlib.sha256(
    b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.parent.rglob("*.py")))
    + f"{numba.__version__} {sys.version}".encode()
).hexdigest()
VERSIONS = f"planner-{32 * '[0-9a-f]'}"
"""The folders of all versions, and no others: DHP_RAY_CACHE may be a folder with other things in it."""
UNUSED_S = 30 * 86400.0


class KeptCode(NullCache):  # type: ignore[misc]
    """The machine code of one function: a file for each signature and kind of processor."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def load_overload(self, sig: Any, target_context: Any) -> CompileResult | None:
        """The kept machine code; None if there is none that can be read, and it is compiled again."""
        target_context.refresh()
        name = self._name(sig, target_context.codegen())
        for folder in (folder / version() for folder in cache_folders()):
            try:
                content = (folder / name).read_bytes()
            except OSError:
                continue
            with contextlib.suppress(OSError):  # of an image that cannot be written
                os.utime(folder)  # says when a process last used this version
            try:
                found = CompileResult._rebuild(target_context, *pickle.loads(content))
            except Exception as error:  # whatever a damaged file makes of it
                _log().warning("%s is damaged and compiled again: %r", folder / name, error)
                continue
            if found.signature.args == tuple(sig):  # types of one name may differ
                return found
        return None

    def save_overload(self, sig: Any, data: CompileResult) -> None:
        content = dumps(data._reduce())
        _delete_unused()
        refused = keep(f"{version()}/{self._name(sig, data.codegen)}", lambda path: path.write_bytes(content))
        if refused:
            _tell_not_kept(refused)

    def _name(self, sig: Any, codegen: Any) -> str:
        key = (_source_digest(inspect.getfile(self._function)), str(sig), codegen.magic_tuple())
        name = f"{self._function.__module__}.{self._function.__qualname__}"
        return f"{name}.{hashlib.sha256(repr(key).encode()).hexdigest()[:32]}"


def compiled(function: Function) -> Function:
    """Compile a function at its first call."""
    return cast(Function, _cached(njit(nogil=True)(function), function))


def inner(function: Function) -> Function:
    """Like `compiled`, for functions that only compiled functions call: without an entry point for Python, which takes
    long to compile.
    """
    options: Any = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    return cast(Function, _cached(njit(**options)(function), function))


def shared(function: Function) -> Function:
    """Leave a function to Python, and compile it into each compiled function that calls it."""
    return cast(Function, register_jitable(function))


def version() -> str:
    """The name of the folder of this version's machine code."""
    return f"planner-{DIGEST[:32]}"


def _cached(dispatcher: Any, function: Callable[..., Any]) -> Any:
    if hasattr(dispatcher, "_cache"):  # not with NUMBA_DISABLE_JIT
        dispatcher._cache = KeptCode(function)
    return dispatcher


@functools.cache
def _delete_unused() -> None:
    for version in (found for folder in cache_folders() for found in folder.glob(VERSIONS)):
        with contextlib.suppress(OSError):  # another process has deleted it, or it belongs to an image
            if time.time() - version.stat().st_mtime > UNUSED_S:
                shutil.rmtree(version)


@functools.cache
def _source_digest(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


@functools.cache
def _tell_not_kept(reason: str) -> None:
    _log().warning("the planner's machine code cannot be kept, each start compiles it anew: %s", reason)


def _log() -> logging.Logger:
    return logging.getLogger(__name__)
