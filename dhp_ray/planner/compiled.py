"""Compiles the planner's inner loops. Each stays plain Python too: with NUMBA_DISABLE_JIT=1 the same source runs uncompiled, the oracle of the tests.

The loops use nothing whose result differs between the two: no fast-math, stable sorts only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from numba import njit

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """Compile at the first call; keep the machine code beside the source, or where the user's caches are, if either can be written."""
    try:
        return cast(Function, njit(cache=True)(function))
    except RuntimeError:  # numba found no folder for its cache
        return cast(Function, njit(function))
