from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from dhp_ray.user_cache import cache_folders, keep


@pytest.fixture(autouse=True)
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user with an empty home and an empty folder of temporary files."""
    for name in ("DHP_RAY_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def test_the_users_folder_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    temporary = tmp_path / f"dhp_ray_{os.getuid()}"
    assert cache_folders() == [tmp_path / "home" / ".cache" / "dhp_ray", temporary]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folders() == [tmp_path / "xdg" / "dhp_ray", temporary]
    monkeypatch.setenv("DHP_RAY_CACHE", str(tmp_path / "named"))
    assert cache_folders() == [tmp_path / "named"]


def test_a_user_without_a_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", lambda number: {}[number])  # a container's number without a name
    assert cache_folders() == [tmp_path / f"dhp_ray_{os.getuid()}"]


@pytest.mark.parametrize("planted", ["another user", "open to all", "a link", "a file"])
def test_what_others_can_write_is_not_used(planted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / f"dhp_ray_{os.getuid()}"
    if planted == "a link":
        (tmp_path / "elsewhere").mkdir()
        folder.symlink_to(tmp_path / "elsewhere")
    elif planted == "a file":
        folder.touch()
    else:
        folder.mkdir()
        folder.chmod(0o777 if planted == "open to all" else 0o700)
    if planted == "another user":
        other = os.getuid() + 1
        folder.rename(tmp_path / f"dhp_ray_{other}")
        monkeypatch.setattr(os, "getuid", lambda: other)
    assert cache_folders() == [tmp_path / "home" / ".cache" / "dhp_ray"]


def test_a_file_is_kept_where_it_can_be(tmp_path: Path) -> None:
    temporary, text = tmp_path / f"dhp_ray_{os.getuid()}", "kept"
    (tmp_path / "home").touch()  # no folder can be made there
    assert keep("below/name", lambda path: path.write_text(text)) is None
    assert (temporary / "below" / "name").read_text() == text
    (temporary / "other").touch()
    refused = keep("other/name", lambda path: path.write_text(text))
    assert refused
    assert refused.startswith(f"{temporary}: ")


def test_what_fails_to_write_leaves_nothing(tmp_path: Path) -> None:
    def fails(path: Path) -> None:
        path.write_text("half")
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        keep("name", fails)
    assert list((tmp_path / "home" / ".cache" / "dhp_ray").iterdir()) == []
