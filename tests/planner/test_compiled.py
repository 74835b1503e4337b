"""The planner's machine code is compiled once for all copies of the source, whatever the user's folders are like."""

from __future__ import annotations

import importlib.util
import os
import resource
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import dhp_ray
from dhp_ray.planner.primitives import compiled as module

PACKAGE = Path(dhp_ray.__file__).parent
SOURCE = """
from dhp_ray.planner.primitives.compiled import compiled

@compiled
def double(value):
    return 2 * value
"""

Double = Callable[[str], Any]


def loaded(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec
    assert spec.loader
    found = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


@pytest.fixture
def double(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Double:
    """Load the loop of SOURCE from a folder, as another process would, and call it."""
    monkeypatch.setenv("DHP_RAY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # where no file may be long, Python writes a part of it

    def load(copy: str, source: str = SOURCE) -> tuple[int, int]:
        path = tmp_path / copy / "loop_of_test.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(source)
        found = loaded("loop_of_test", path)
        module._source_digest.cache_clear()
        assert found.double(21) == 42
        return sum(found.double.stats.cache_hits.values()), sum(found.double.stats.cache_misses.values())

    return load


LOADED, COMPILED = (1, 0), (0, 1)


def test_a_copy_of_the_source_elsewhere_is_not_compiled_again(double: Double, tmp_path: Path) -> None:
    assert double("a") == COMPILED
    assert double("a") == double("b") == LOADED
    assert not list(tmp_path.rglob("__pycache__/*.nb?"))


def test_another_source_or_version_is(double: Double, monkeypatch: pytest.MonkeyPatch) -> None:
    assert double("a") == COMPILED
    assert double("b", SOURCE.replace("2 * value", "value + value")) == COMPILED
    monkeypatch.setattr(module, "DIGEST", 64 * "0")
    assert double("a") == COMPILED
    assert double("a") == LOADED


def test_the_version_is_of_all_files_of_the_planner_and_not_of_where_they_lie(tmp_path: Path) -> None:
    def version_of(folder: str, added: str = "") -> str:
        copy = tmp_path / folder / "planner"
        shutil.copytree(PACKAGE / "planner", copy, ignore=shutil.ignore_patterns("__pycache__"))
        (copy / "limits.py").open("a").write(added)
        return str(loaded("compiled_of_test", copy / "primitives" / "compiled.py").version())

    assert version_of("a") == version_of("b") == module.version() != version_of("c", "\n# changed")


def test_a_damaged_file_is_compiled_again(double: Double, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert double("a") == COMPILED
    (file,) = (tmp_path / "cache" / module.version()).iterdir()
    whole = file.read_bytes()
    for content in (b"", b"no machine code", whole[: len(whole) // 2]):
        file.write_bytes(content)
        caplog.clear()
        assert double("a") == COMPILED
        assert "is damaged and compiled again" in caplog.text
        assert double("a") == LOADED


@pytest.mark.parametrize("home", ["a file", "absent"])
def test_without_a_home_code_is_kept_among_temporary_files(
    double: Double, home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a file").touch()
    monkeypatch.delenv("DHP_RAY_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "a file") if home == "a file" else "")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    if home == "absent":
        monkeypatch.setattr("os.path.expanduser", lambda path: path)  # what it does for an unknown user
    assert double("a") == COMPILED
    assert double("b") == LOADED
    assert [path.name for path in (tmp_path / f"dhp_ray_{os.getuid()}").iterdir()] == [module.version()]


def test_code_that_nothing_can_keep_is_compiled_and_said_once(
    double: Double, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a file").touch()
    monkeypatch.setenv("DHP_RAY_CACHE", str(tmp_path / "a file"))
    assert double("a") == double("a") == COMPILED
    assert caplog.text.count("the planner's machine code cannot be kept") == 1


def test_a_full_disk_stops_no_plan(double: Double, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "loop_of_test.py").write_text(SOURCE)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(SOURCE), before[1]))  # a file may be this long
    try:
        assert double("a") == COMPILED
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "cannot be kept" in caplog.text
    assert list((tmp_path / "cache" / module.version()).iterdir()) == []
    assert double("a") == COMPILED
    assert double("a") == LOADED


def test_versions_that_are_no_longer_used_are_deleted(double: Double, tmp_path: Path) -> None:
    unused, used, others = f"planner-{32 * 'a'}", f"planner-{32 * 'b'}", ["other", "planner-of-a-user"]
    for name, days in ((unused, 40), (used, 20), *((other, 40) for other in others)):
        (tmp_path / "cache" / name).mkdir(parents=True)
        os.utime(tmp_path / "cache" / name, (time.time() - days * 86400,) * 2)
    module._delete_unused.cache_clear()
    assert double("a") == COMPILED
    assert {path.name for path in (tmp_path / "cache").iterdir()} == {*others, module.version(), used}
    os.utime(tmp_path / "cache" / module.version(), (0, 0))
    assert double("b") == LOADED
    assert (tmp_path / "cache" / module.version()).stat().st_mtime > time.time() - 3600
