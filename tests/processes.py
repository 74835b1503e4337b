"""Which tests start processes: what they name, and what the functions and fixtures of the tests that they use name."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest

STARTERS = frozenset({"Popen", "multiprocessing", "ray", "run_processes", "run_ranks", "run_tensors", "subprocess"})
ROOT = f"{Path(__file__).parent.parent}/"
TESTS, PACKAGE = f"{ROOT}tests/", f"{ROOT}dhp_ray/"
HARMLESS: dict[int, Any] = {}
"""By their ids the values that lead to none of STARTERS: each is looked through once, not once a test."""


def starts_processes(item: pytest.Function) -> bool:
    """Whether a test, or a fixture of the tests that it asks for, starts a process or uses a Ray cluster."""
    fixtures = [found[-1].func for found in item._fixtureinfo.name2fixturedefs.values()]
    own = [item.function, *(function for function in fixtures if _is_below(function, TESTS))]
    return any(_starts(function) for function in own)


@cache
def _starts(function: Any) -> bool:
    seen: dict[int, Any] = {}
    if any(names & STARTERS for names in _names_used(function, seen)):
        return True
    HARMLESS.update(seen)
    return False


def _names_used(value: Any, seen: dict[int, Any]) -> Iterator[frozenset[str]]:
    """The names in a function, or in the methods of a class, and in the functions that it uses. Of the package only
    functions count, and not the name `ray`: what needs a cluster is asked for by tests and benchmarks.
    """
    if id(value) in seen or id(value) in HARMLESS:
        return
    seen[id(value)] = value
    if isinstance(value, type):
        methods = [getattr(member, "__func__", getattr(member, "fget", member)) for member in vars(value).values()]
        for method in methods:
            if not _is_below(method, PACKAGE):
                yield from _names_used(method, seen)
    function = getattr(value, "__wrapped__", value)
    if not isinstance(function, FunctionType) or not _is_below(function, ROOT):
        return
    if hypothesis := getattr(function, "hypothesis", None):
        yield from _names_used(hypothesis.inner_test, seen)
    names = _names_of(function.__code__)
    yield names - {"ray"} if _is_below(function, PACKAGE) else names
    for name in names & function.__globals__.keys():
        yield from _names_used(function.__globals__[name], seen)


def _is_below(function: Any, folder: str) -> bool:
    code = getattr(function, "__code__", None)
    return isinstance(code, CodeType) and code.co_filename.startswith(folder)


@cache
def _names_of(code: CodeType) -> frozenset[str]:
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return frozenset({*code.co_names, *code.co_freevars}).union(*map(_names_of, inner))
