from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest

from dhp_ray.data.errors import DataError
from dhp_ray.data.formats import read_rows
from dhp_ray.data.index import index_fragments
from dhp_ray.schema import Data
from tests.data.samples import talk


def saved(folder: Path, num_rows: int = 100, batch_rows: int = 50) -> Path:
    folder.mkdir(exist_ok=True)
    table = pa.table({"id": [f"r{number}" for number in range(num_rows)], "conversations": [talk("a", "b")] * num_rows,
                      "extra": list(range(num_rows))})
    with pa.OSFile(str(folder / "data-00000-of-00001.arrow"),
                   "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=batch_rows)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))
    return folder


def data(path: Path) -> Data:
    return Data(format="huggingface", path=str(path))


def test_rows_of_a_batch_are_read_in_parts(tmp_path: Path) -> None:
    fragments = index_fragments(data(saved(tmp_path)))
    assert [(fragment.first_row, fragment.num_rows, fragment.offset)
            for fragment in fragments] == [(0, 32, 0), (32, 18, 32), (50, 32, 0), (82, 18, 32)]
    rows = [row for fragment in fragments for row in read_rows(fragment)]
    assert [row.id for row in rows] == [f"r{number}" for number in range(100)]
    assert set(rows[0].fields) == {"id", "conversations"}
    assert rows[-1].fields["conversations"] == talk("a", "b")


def test_a_set_of_splits_wants_one(tmp_path: Path) -> None:
    for name in ("train", "test"):
        saved(tmp_path / name)
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(DataError, match="holds the splits train, test; allowed: one of their folders"):
        index_fragments(data(tmp_path))
    assert index_fragments(data(tmp_path / "test")).num_rows == 100


@pytest.mark.parametrize(("state", "message"), [
    ({"_data_files": [{"filename": "data-00000-of-00001.arrow"}], "_indices_files": [{"filename": "i.arrow"}]},
     "allowed: a set saved after flatten_indices"),
    ({"_data_files": [{"filename": "data-7.arrow"}]}, "state.json names data-7.arrow; allowed: a whole folder"),
    ({"_data_files": [{"filename": "../../etc/passwd"}]}, "state.json names passwd"),
    ({}, "state.json names no file"),
    ([], "holds list; allowed: an object"),
])
def test_a_folder_that_lacks_something_is_refused(state: object, message: str, tmp_path: Path) -> None:
    saved(tmp_path)
    (tmp_path / "state.json").write_text(json.dumps(state))
    with pytest.raises(DataError, match=message) as caught:
        index_fragments(data(tmp_path))
    assert "\n" not in str(caught.value)


def test_what_is_no_arrow_stream_is_refused(tmp_path: Path) -> None:
    file = saved(tmp_path) / "data-00000-of-00001.arrow"
    whole = file.read_bytes()
    for content in (b"", b"hello world, this is no arrow", whole[: len(whole) // 2]):
        file.write_bytes(content)
        with pytest.raises(DataError, match=r"is not an Arrow stream|holds no rows") as caught:
            index_fragments(data(tmp_path))
        assert "\n" not in str(caught.value)


def test_an_empty_folder_is_no_set(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is no saved set; allowed: a folder of save_to_disk"):
        index_fragments(data(tmp_path))
