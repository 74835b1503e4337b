from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from dhp_ray.data.index import index_fragments
from dhp_ray.data.media import file_bytes
from dhp_ray.data.sizes import mean_file_bytes
from dhp_ray.schema import Data
from tests.data.samples import talk, write_rows


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
