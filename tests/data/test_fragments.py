from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from dhp_ray.data import index
from dhp_ray.data.fragments import Fragment, Fragments, packed
from dhp_ray.data.index import index_fragments
from dhp_ray.schema import Data
from tests.data.samples import talk, write_rows


def test_a_table_holds_what_was_packed() -> None:
    made = [Fragment("a.json", "json", 0, 2, 6, spans=((1, 5), (7, 9)), names=((1, "größer"),)),
            Fragment("b.parquet", "parquet", 0, 7, 2**40, 3, 256),
            Fragment("a.json", "json", 2, 1, 2**40, spans=((10, 2**40),))]
    table = Fragments(packed(made))
    assert list(table) == made
    assert (len(table), table.num_rows, table[-1], list(table)) == (3, 10, made[2], made)
    assert list(Fragments(packed([]))) == []


def digest_of(path: Path) -> int:
    return index_fragments(Data(format="llava", path=str(path))).digest


def test_a_digest_is_of_where_rows_begin(tmp_path: Path) -> None:
    """Two rows of other lengths are swapped far from the samples that a digest reads."""
    rows = [{"id": f"r{number:02d}", "conversations": talk("a", "b" * (3000 + number))} for number in range(32)]
    first = digest_of(write_rows(tmp_path / "rows.jsonl", rows))
    rows[5], rows[6] = rows[6], rows[5]
    assert digest_of(write_rows(tmp_path / "rows.jsonl", rows)) != first


def test_a_digest_is_of_what_the_files_hold(tmp_path: Path) -> None:
    """Not of where they are, or of when they were written."""
    rows = [{"id": f"r{number:02d}", "conversations": talk("a", "b")} for number in range(70)]
    digests = {}
    for name, changed in {"first": rows, "copy": rows, "reversed": rows[::-1],
                          "one more sign": [{**rows[0], "x": ""}, *rows[1:]]}.items():
        folder = tmp_path / name
        folder.mkdir()
        digests[name] = digest_of(write_rows(folder / "rows.jsonl", changed))
    os.utime(tmp_path / "first" / "rows.jsonl", (1, 1))
    assert digests["copy"] == digests["first"] == digest_of(tmp_path / "first" / "rows.jsonl")
    (tmp_path / "copy" / "rows.jsonl").rename(tmp_path / "copy" / "others.jsonl")
    others = digest_of(tmp_path / "copy" / "others.jsonl")
    assert len({others, *digests.values()}) == 4
    assert json.loads(json.dumps(others)) == others < 2**53


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DHP_RAY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(index, "KEPT_FROM_BYTES", 100)
    return tmp_path / "cache"


def test_an_index_is_made_once_and_again_when_the_file_changes(cache: Path, tmp_path: Path) -> None:
    rows = [{"id": f"r{number % 60}", "conversations": talk("a", "b")} for number in range(70)]
    data = Data(format="llava", path=str(write_rows(tmp_path / "rows.jsonl", rows)))
    seen: list[tuple[int, int]] = []

    def progress(done: int, total: int) -> None:
        seen.append((done, total))

    first = list(index_fragments(data, progress))
    size = os.path.getsize(data.path)
    assert seen[-1] == (size, size)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    seen.clear()
    assert list(index_fragments(data, progress)) == first
    assert not seen
    write_rows(tmp_path / "rows.jsonl", rows[:40])
    assert index_fragments(data, progress).num_rows == 40
    assert seen
    assert len(list(cache.glob("*.arrow"))) == len(list(cache.iterdir())) == 2


def test_a_damaged_index_is_made_again(cache: Path, tmp_path: Path) -> None:
    data = Data(format="llava", path=str(write_rows(tmp_path / "rows.jsonl", [{"conversations": talk("a", "b")}] * 40)))
    expected = list(index_fragments(data))
    for content in (b"", b"ARROW1 and no more", next(cache.glob("*.arrow")).read_bytes()[:200]):
        next(cache.glob("*.arrow")).write_bytes(content)
        assert list(index_fragments(data)) == expected


def test_a_cache_that_cannot_be_written_is_no_hindrance(
    cache: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache.write_text("a file in its place")
    data = Data(format="llava", path=str(write_rows(tmp_path / "rows.jsonl", [{"conversations": talk("a", "b")}] * 40)))
    assert index_fragments(data).num_rows == 40
    assert "the index of the data cannot be kept in" in caplog.text


def test_without_a_home_the_index_is_kept_among_temporary_files(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("DHP_RAY_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    data = Data(format="llava", path=str(write_rows(tmp_path / "rows.jsonl", [{"conversations": talk("a", "b")}] * 40)))
    (tmp_path / "a file").touch()
    monkeypatch.setenv("HOME", str(tmp_path / "a file"))
    expected = list(index_fragments(data))
    assert len(list((tmp_path / f"dhp_ray_{os.getuid()}").glob("*.arrow"))) == 1
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", lambda number: {}[number])  # a container's number without a name
    assert list(index_fragments(data)) == expected
    assert not caplog.text


def test_ids_that_no_log_line_can_hold_are_replaced(tmp_path: Path) -> None:
    ids = ["a\nb", "x" * 201, "\ud800", "https://me:secret@host/a.png", "\x9b31ma", "a\u202eb", "fine", "s\u3000\xe9"]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"id": name, "conversations": []}) for name in ids))
    fragment = index_fragments(Data(format="llava", path=str(tmp_path / "rows.jsonl")))[0]
    assert fragment.names == tuple((number, f"rows#00000{number}") for number in range(6))


def test_made_up_ids_are_at_most_200_long(tmp_path: Path) -> None:
    for end in "ab":
        (tmp_path / f"{'x' * 240}{end}.jsonl").write_text('{"conversations": []}')
    (tmp_path / "y.jsonl").write_text("\n".join([json.dumps({"id": "y" * 200, "conversations": []})] * 2))
    names = [name for fragment in index_fragments(Data(format="llava", path=str(tmp_path)))
             for _, name in fragment.names]
    assert [len(name) <= 200 for name in names] == [True] * 3
    assert [name[-8:] for name in names] == ["a#000000", "b#000000", "y#000001"]
