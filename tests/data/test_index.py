from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dhp_ray.data.errors import DataError
from dhp_ray.data.formats import read_rows
from dhp_ray.data.formats.rows import ROWS_PER_FRAGMENT
from dhp_ray.data.index import check_form, data_files, image_root, index_fragments, mean_file_bytes
from dhp_ray.data.media import file_bytes
from dhp_ray.schema import Data
from tests.data.samples import talk, write_rows


def llava(path: Path, **keys: str) -> Data:
    return Data(format="llava", path=str(path), **keys)


def rows_of(data: Data) -> list[dict]:
    return [dict(row.fields) for fragment in index_fragments(data) for row in read_rows(fragment)]


def ids_of(data: Data) -> list[str]:
    return [row.id for fragment in index_fragments(data) for row in read_rows(fragment)]


LEAVES = st.none() | st.booleans() | st.integers() | st.text()
JSON = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3))


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    rows=st.lists(st.dictionaries(st.text(), JSON, max_size=3), min_size=1, max_size=40),
    indent=st.sampled_from([None, 2]),
    ascii_only=st.booleans(),
    lines=st.booleans(),
    mark=st.booleans(),
)
def test_any_json_is_read_row_by_row(
    rows: list[dict], indent: int | None, ascii_only: bool, lines: bool, mark: bool, tmp_path: Path
) -> None:
    rows = [{"conversations": talk("a", "b"), **row} for row in rows]
    path = tmp_path / "rows.json"
    text = "\n".join(json.dumps(row, ensure_ascii=ascii_only)
                     for row in rows) if lines else json.dumps(rows, indent=indent, ensure_ascii=ascii_only)
    path.write_bytes((b"\xef\xbb\xbf" if mark else b"") + text.encode("utf-8", "surrogatepass"))
    fragments = index_fragments(llava(path))
    assert [fragment.num_rows for fragment in list(fragments)[:-1]] == [ROWS_PER_FRAGMENT] * (len(fragments) - 1)
    assert [fragment.first_row for fragment in fragments] == list(range(0, len(rows), ROWS_PER_FRAGMENT))
    assert rows_of(llava(path)) == json.loads(json.dumps(rows))


def test_json_and_jsonl_hold_the_same_rows(tmp_path: Path) -> None:
    rows = [{"id": f"r{number}", "conversations": talk("größer {[\"", "]}\\")} for number in range(70)]
    assert rows_of(llava(write_rows(tmp_path / "a.json",
                                    rows))) == rows_of(llava(write_rows(tmp_path / "a.jsonl", rows))) == rows


def test_a_folder_is_read_by_name(tmp_path: Path) -> None:
    for name in ("b.json", "a.jsonl", "_draft.json", ".hidden.json", "notes.txt"):
        write_rows(tmp_path / name, [{"id": name, "conversations": []}])
    assert ids_of(llava(tmp_path)) == ["a.jsonl", "b.json"]
    assert data_files(llava(tmp_path)) == [str(tmp_path / "a.jsonl"), str(tmp_path / "b.json")]


@pytest.mark.parametrize("form", ["llava", "parquet", "webdataset", "huggingface"])
def test_files_of_several_splits_are_refused(form: str, tmp_path: Path) -> None:
    suffix = {"llava": ".jsonl", "webdataset": ".tar"}.get(form, ".parquet")
    for name in ("my_train-1", "my_train-2", "other"):
        (tmp_path / f"{name}{suffix}").touch()
    assert len(data_files(Data(format=form, path=str(tmp_path)))) == 3
    (tmp_path / f"val{suffix}").touch()
    with pytest.raises(DataError, match=r"holds the splits of my_train-1.*, for training, and of val.*, held out; "):
        data_files(Data(format=form, path=str(tmp_path)))
    assert data_files(Data(format=form, path=str(tmp_path / f"val{suffix}"))) == [str(tmp_path / f"val{suffix}")]


@pytest.mark.parametrize(("names", "refused"), [
    (["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"], False),
    (["data/train_sft-00000-of-00001.parquet", "data/test_sft-00000-of-00001.parquet"], True),
    (["ai2d/train-00000-of-00001-2ce340398c113b79.parquet", "chart/train-00000-of-00001.parquet"], False),
    (["default/train/0000.parquet", "default/test/0000.parquet"], True),
    (["year=2025/a.parquet", "year=2026/a.parquet", "contest.parquet", "retrain.parquet"], False),
    (["a_val.parquet", "b_validation.parquet"], False),
    (["ocr_train.parquet", "llava_training.parquet", "data/part2-00000-of-00001.parquet"], False),
])
def test_splits_of_a_folder_from_the_hub(names: list[str], refused: bool, tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    data = Data(format="huggingface", path=str(tmp_path))
    if not refused:
        assert data_files(data) == sorted(str(tmp_path / name) for name in names)
        return
    with pytest.raises(DataError, match=r"holds the splits of .*, for training, and of .*, held out"):
        data_files(data)


def test_data_that_is_left_out_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("a.jsonl", "a.jsonl.gz", "b/a.png", "notes.gz", "_c/a.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"conversations": []}')
    check_form(llava(tmp_path))
    assert not caplog.messages
    for name in ("b.jsonl.gz", "c.json.zst", "d/a.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    check_form(llava(tmp_path))
    [message] = caplog.messages
    assert message == (f"{tmp_path}: files read: 1; compressed, left out: 2 (b.jsonl.gz, ...); "
                       "sub-folders with such files, left out: 1 (d)")


def test_every_row_has_a_name_of_its_own(tmp_path: Path) -> None:
    rows = [{"id": name, "conversations": []}
            for name in ("a", "b", "a", None, 7, "7", "", "a#000002", ["x"])] + [{"conversations": []}]
    write_rows(tmp_path / "one.json", rows)
    write_rows(tmp_path / "two.json", rows[:1])
    names = ids_of(llava(tmp_path))
    assert names == ["a", "b", "a#000002", "one#000003", "7", "7#000005", "one#000006", "a#000002#000007", "one#000008",
                     "one#000009", "a#000000"]
    assert len(set(names)) == len(names)


def test_a_row_that_is_not_json_keeps_its_place(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"id": "a", "conversations": []}\n{"id": "b", \n[1]\n\n{"id": "c", "conversations": []}\n')
    rows = [row for fragment in index_fragments(llava(path)) for row in read_rows(fragment)]
    expected = [("a", False), ("rows#000001", True), ("rows#000002", True), ("c", False)]
    assert [(row.id, bool(row.error)) for row in rows] == expected
    assert rows[1].error.startswith("the row is not JSON: ")
    assert rows[2].error == "the row holds list; allowed: an object"


@pytest.mark.parametrize(("content", "message"), [
    ("", "is empty"), (" \n ", "is empty"), ("hello", "is not JSON"), ("{'id': 1}", "is not JSON"),
    ("[1, 2]", "is not JSON: expected an object"),
    ('[{"conversations": []} {"conversations": []}]', "is not JSON: expected an object at byte 22"),
    ('[{"conversations": []}', "does not end"),
    ('[{"conversations": []}, ]', "is not JSON"), ('[{"conversations": []}] x', "text after the array, at byte 23"),
    ('[{"conversations": [}', "is not JSON"), ("[]", "holds no rows"),
    ('[{"id": 1, "text": "a"}]', "no row has conversations"), ('"text"', "holds str as its first row"),
    ("\x00\x01\x02", "is not JSON"),
    ('{\n "data": []\n}', r"is not JSON: .* \(in its first row; rows are the objects of one array, or one a line\)"),
])
def test_what_is_not_llava_is_refused_in_one_line(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(content)
    with pytest.raises(DataError, match=message) as caught:
        index_fragments(llava(path))
    assert str(caught.value).startswith("data.path: ")
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("data", "message"), [
    (Data(format="llava", path=""), "data.path: empty; allowed: a file or a folder"),
    (Data(format="llava", path="/absent/rows.json"), "data.path: no file or folder /absent/rows.json"),
    (Data(format="synthetic", path="/absent/rows.parquet"), "/absent/rows.parquet; jobs/prepare_data.py writes it"),
    (Data(format="webdataset", path="/absent"), "data.path: no file or folder /absent"),
    (Data(format="webdataset", path=__file__), "is no file of the format webdataset; allowed: a name ending in .tar"),
    (Data(format="llava", path=__file__), "is no file of the format llava; allowed: a name ending in .json or .jsonl"),
    (Data(format="huggingface", path=__file__),
     "is no file of the format huggingface; allowed: a name ending in .arrow or .parquet"),
])
def test_what_is_not_there_is_refused_in_one_line(data: Data, message: str) -> None:
    with pytest.raises(DataError, match=message):
        index_fragments(data)


@pytest.mark.parametrize("target", ["gone", "b.jsonl"])
def test_a_link_to_nothing_is_refused_in_one_line(target: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"conversations": []}')
    (tmp_path / "b.jsonl").symlink_to(target)
    with pytest.raises(DataError, match=r"^data\.path: \S*/b\.jsonl cannot be read: (No such file|Too many levels)"):
        index_fragments(llava(tmp_path))


@pytest.mark.parametrize("code", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
@pytest.mark.parametrize("text", ['[{"conversations": []}]', '{"conversations": []}\n{"conversations": []}\n'])
def test_json_in_another_encoding_is_refused(code: str, text: str, tmp_path: Path) -> None:
    """Its first line alone may be read by Python, so that a file of lines would lose all others."""
    (tmp_path / "a.jsonl").write_bytes(text.encode(code))
    with pytest.raises(DataError, match=r"a\.jsonl is not JSON in UTF-8: it begins with b'"):
        index_fragments(llava(tmp_path))


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError,
                       match=r"holds no file of the format llava; allowed: names ending in \.json or \.jsonl"):
        index_fragments(llava(tmp_path))


def test_a_fragment_of_parquet_is_a_row_group(tmp_path: Path) -> None:
    table = pa.table({"id": [f"r{number}" for number in range(10)] , "conversations": [talk("a", "b")] * 10,
                      "source": ["x"] * 10})
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=4)
    data = Data(format="parquet", path=str(tmp_path / "rows.parquet"))
    fragments = index_fragments(data)
    assert [(fragment.first_row, fragment.num_rows, fragment.row_group)
            for fragment in fragments] == [(0, 4, 0), (4, 4, 1), (8, 2, 2)]
    assert [row.id for row in read_rows(fragments[1])] == ["r4", "r5", "r6", "r7"]
    assert set(next(read_rows(fragments[0])).fields) == {"id", "conversations"}


def stored_in_all_formats(folder: Path, rows: list[dict[str, Any]]) -> dict[str, Data]:
    """Rows with their images inside: in JSON as text."""
    table = pa.Table.from_pylist(rows)
    pq.write_table(table, folder / "rows.parquet", use_dictionary=False)
    with pa.ipc.new_stream(folder / "rows.arrow", table.schema) as writer:
        writer.write_table(table)
    write_rows(folder / "rows.json", [row | {"image": row["image"].hex()[: len(row["image"])]} for row in rows])
    with tarfile.open(folder / "rows.tar", "w") as archive:
        for row in rows:
            for name, content in (("json", json.dumps(row["conversations"]).encode()), ("png", row["image"])):
                member = tarfile.TarInfo(f"{row['id']}.{name}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    return {name: Data(format=form, path=str(folder / name))
            for form, name in (("parquet", "rows.parquet"), ("huggingface", "rows.arrow"), ("llava", "rows.json"),
                               ("webdataset", "rows.tar"))}


def test_fragments_are_cut_by_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for parquet's, which would be unpacked again and again; the reading stage cuts their blocks."""
    for module in ("rows", "arrow"):
        monkeypatch.setattr(f"dhp_ray.data.formats.{module}.MOST_BYTES", 20_000)
    rows = [{"id": f"r{number}", "image": os.urandom(size), "conversations": talk("<image>", "a")}
            for number, size in enumerate([8000, 8000, 30_000, 8000, 8000, 8000, 100, 100])]
    stored = stored_in_all_formats(tmp_path, rows)
    cuts = {name: [fragment.num_rows for fragment in index_fragments(data)] for name, data in stored.items()}
    assert cuts == {"rows.parquet": [8], "rows.arrow": [2, 2, 2, 2], "rows.json": [2, 1, 2, 3],
                    "rows.tar": [2, 1, 2, 3]}
    for data in stored.values():
        assert ids_of(data) == [row["id"] for row in rows]


def test_a_row_above_the_limit_is_a_bad_row_and_not_read(tmp_path: Path) -> None:
    rows = [{"id": f"r{number}", "image": os.urandom(size), "conversations": talk("<image>", "a")}
            for number, size in enumerate([1000, 3 * 2**20, 1000])]
    for name, data in stored_in_all_formats(tmp_path, rows).items():
        [fragment] = index_fragments(data)
        found = list(read_rows(fragment, max_bytes=2**20))
        assert [row.id for row in found] == ["r0", "rows#000001" if name == "rows.json" else "r1", "r2"]
        assert [row.error for row in found] == ["", "the row has 3.0 MB; allowed: at most 1 (data.max_file_mb)", ""]
        assert not found[1].fields
        assert [row.id for row in read_rows(fragment, [0, 2])] == ["r0", "r2"]


@pytest.mark.parametrize(("columns", "message"), [
    ({"id": ["a"], "text": ["b"]},
     r"has no column conversations or messages \(it has id, text\); allowed: id, image or images"),
    ({"conversations": [1]}, "column conversations holds int64; allowed: a list of structs"),
    ({"conversations": ["[]"], "image": [1]}, "column image holds int64; allowed: bytes"),
])
def test_parquet_without_the_columns_is_refused(columns: dict, message: str, tmp_path: Path) -> None:
    pq.write_table(pa.table(columns), tmp_path / "rows.parquet")
    with pytest.raises(DataError, match=message):
        index_fragments(Data(format="parquet", path=str(tmp_path)))


def test_a_file_that_is_not_parquet_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.parquet").write_text("hello")
    with pytest.raises(DataError, match="is not parquet"):
        index_fragments(Data(format="parquet", path=str(tmp_path)))


def test_the_image_root_is_the_folder_of_the_data(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.json", [])
    (tmp_path / "pictures").mkdir()
    assert image_root(llava(path)) == image_root(llava(tmp_path)) == str(tmp_path)
    assert image_root(llava(path, image_root=str(tmp_path / "pictures"))) == str(tmp_path / "pictures")
    with pytest.raises(DataError, match=r"data\.image_root: no folder"):
        image_root(llava(path, image_root=str(tmp_path / "absent")))


def test_a_string_of_escapes_takes_no_more_memory_than_itself() -> None:
    """The search for the rows of a JSON array took 60 times a string of escapes."""
    code = ("import resource; from dhp_ray.data.formats.json_text import _STRUCTURE\n"
            "text = b'[\"' + b'\\\\n' * 2_000_000 + b'\"]'\n"
            "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
            "before = peak(); found = sum(1 for _ in _STRUCTURE.finditer(text)); print(found, peak() - before)")
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    found, kilobytes = map(int, done.stdout.split())
    assert found == 3
    assert kilobytes < 40_000


def test_files_that_rows_name_are_counted(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"x" * 70_000)
    (tmp_path / "b.mp4").write_bytes(b"x" * 900)
    named = [{"image": "a.png"}, {"images": ["a.png", {"path": "a.png"}], "video": "b.mp4"}, {"image": "absent.png"},
             {"image": "../a.png"}, {}]
    assert [file_bytes(row, str(tmp_path)) for row in named] == [70_000, 140_900, 0, 0, 0]
    parts = [{"type": "image_url", "image_url": {"url": "a.png"}},
             {"type": "text", "text": "a.png"}, {"type": "video", "video": "b.mp4"}, "text", {"type": [1]}]
    assert file_bytes({"messages": [{"role": "user", "content": parts}, {"role": "user", "content": "a.png"}, 7]},
                      str(tmp_path)) == 70_900
    write_rows(tmp_path / "rows.jsonl", [{"image": "a.png", "conversations": talk("<image>", "a")} for _ in range(100)])
    assert mean_file_bytes(index_fragments(Data(format="llava", path=str(tmp_path))), str(tmp_path)) == 70_000


def test_rows_that_hold_their_images_name_none(tmp_path: Path) -> None:
    rows = [{"image": b"x" * 40_000, "conversations": talk("<image>", "a")} for _ in range(8)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet", row_group_size=4, use_dictionary=False)
    fragments = index_fragments(Data(format="parquet", path=str(tmp_path)))
    assert mean_file_bytes(fragments, str(tmp_path)) == 0
    assert fragments.num_bytes.sum() >= 8 * 40_000


def test_text_that_is_not_utf_8_is_left_to_the_reader(tmp_path: Path) -> None:
    broken = pa.Array.from_buffers(pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\2\0\0\0"), pa.py_buffer(b"\xff\xfe")])
    pq.write_table(pa.table({"conversations": [talk("a", "b")], "image": broken}), tmp_path / "rows.parquet")
    assert mean_file_bytes(index_fragments(Data(format="parquet", path=str(tmp_path))), str(tmp_path)) == 0
