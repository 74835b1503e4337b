from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dhp_ray.data.formats import parquet, read_rows
from dhp_ray.data.fragments import Fragment
from dhp_ray.data.index import index_fragments
from dhp_ray.schema import Data
from tests.data.samples import talk, write_rows


def test_parts_of_a_row_group_are_its_rows(tmp_path: Path) -> None:
    """700 rows in one group of many pages: fragments of at most 256 rows, of about the same size, with the same rows as
    the file.
    """
    rows = [{"id": f"r{number}", "images": [b"x" * (number % 50)] * (number % 3),
             "conversations": talk("a" * (number % 7), "b")} for number in range(700)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet", row_group_size=600, data_page_size=500)
    fragments = index_fragments(Data(format="parquet", path=str(tmp_path)))
    assert [(fragment.row_group, fragment.offset, fragment.num_rows)
            for fragment in fragments] == [(0, 0, 200), (0, 200, 200), (0, 400, 200), (1, 0, 100)]
    for fragment in (fragments[number] for number in (2, 0, 3, 1)):
        expected = rows[fragment.first_row : fragment.first_row + fragment.num_rows]
        assert [row.id for row in read_rows(fragment)] == [row["id"] for row in expected]
        assert [dict(row.fields) for row in read_rows(fragment)] == expected
    assert abs(int(fragments.num_bytes[:3].sum())
               - pq.ParquetFile(tmp_path / "rows.parquet").metadata.row_group(0).total_byte_size) < 3


def zeros(path: Path, **options: Any) -> Fragment:
    """Eight rows of 100 kB of zeros."""
    table = pa.table({"id": [f"r{number}" for number in range(8)], "image": [bytes(100_000)] * 8,
                      "conversations": [talk("<image>", "a")] * 8})
    pq.write_table(table, path, **options)
    [fragment] = index_fragments(Data(format="parquet", path=str(path)))
    return fragment


def test_a_column_that_unpacks_to_far_more_than_is_stored_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be unpacked at once, however few of its rows are read."""
    fragment = zeros(tmp_path / "rows.parquet", compression="zstd", use_dictionary=False)
    assert [row.error for row in read_rows(fragment)] == [""] * 8
    monkeypatch.setattr(parquet, "MOST_BYTES", 10_000)
    for wanted in (None, [3, 5]):
        found = list(read_rows(fragment, wanted))
        assert [row.id for row in found] == [f"r{number}" for number in wanted or range(8)]
        assert {row.error for row in found} == {"column image of the row group has 1 MB, stored as 0.0; allowed: at "
                                                "most 64 times as much as stored, or 0.00953674 MB"}
    noise = zeros(tmp_path / "plain.parquet", compression="none", use_dictionary=False)
    assert [row.error for row in read_rows(noise)] == [""] * 8


def test_few_rows_are_read_at_a_time_where_they_repeat_a_large_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet, "READ_REPEATED_BYTES", 300_000)
    for name, options, expected in (("dictionary", {}, [2] * 4), ("plain", {"use_dictionary": False}, [8])):
        path = zeros(tmp_path / f"{name}.parquet", **options).path
        assert sizes_of_batches(path) == expected


def sizes_of_batches(path: str) -> list[int]:
    return [batch.num_rows for batch in parquet._batches(pq.ParquetFile(path), path, 0, ["image"])]


@pytest.mark.parametrize("options", [
    {}, {"compression": "none"}, {"compression": "zstd", "data_page_version": "2.0"}, {"compression": "gzip"}])
def test_values_behind_a_full_dictionary_are_no_repeated_ones(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 300 rows of 50 kB the dictionary takes 32. They compress well, so its bytes in the file say nothing."""
    monkeypatch.setattr(parquet, "READ_REPEATED_BYTES", 12_000_000)
    pictures = [number.to_bytes(4) + os.urandom(1000) + bytes(49_000) for number in range(300)]
    table = pa.table({"image": pictures, "conversations": [talk("<image>", "a")] * 300})
    pq.write_table(table, tmp_path / "rows.parquet", write_batch_size=16, **options)
    sizes = sizes_of_batches(str(tmp_path / "rows.parquet"))
    assert 5 < sizes[0] < 12
    assert sum(sizes) == 300
    pq.write_table(table, tmp_path / "all.parquet", dictionary_pagesize_limit=2**30, **options)
    assert sizes_of_batches(str(tmp_path / "all.parquet")) == [1] * 300


def test_a_large_row_group_is_told(tmp_path: Path) -> None:
    rows = pa.table({"id": [str(number) for number in range(5000)], "conversations": [talk("a", "b")] * 5000})
    for size, line in ((256, ""), (4096, ""), (
            5000, f"data.path: {tmp_path}/b.parquet has a row group of 5000 rows, and to read some of them, those "
                  "before them are decoded too: reading takes about 10 times as long as with row_group_size=256")):
        pq.write_table(rows.slice(0, 10), tmp_path / "a.parquet")
        pq.write_table(rows, tmp_path / "b.parquet", row_group_size=size)
        fragments = index_fragments(Data(format="parquet", path=str(tmp_path)))
        assert parquet.row_group_warning(fragments) == line
        assert fragments.largest_row_group()[1] == size
    write_rows(tmp_path / "rows.jsonl", [{"conversations": talk("a", "b")}])
    assert parquet.row_group_warning(index_fragments(Data(format="llava", path=str(tmp_path / "rows.jsonl")))) == ""


def test_a_row_group_is_not_read_ahead(tmp_path: Path) -> None:
    """100 rows of 100 kB, a page each."""
    pictures = [os.urandom(100_000) for _ in range(100)]
    table = pa.table({"image": pictures, "conversations": [talk("<image>", "a")] * 100})
    pq.write_table(table, tmp_path / "rows.parquet", use_dictionary=False, write_batch_size=1, data_page_size=1)
    del table
    [fragment] = index_fragments(Data(format="parquet", path=str(tmp_path)))
    before = pa.total_allocated_bytes()
    rows = read_rows(fragment)
    assert len(next(rows).fields["image"]) == 100_000
    assert pa.total_allocated_bytes() - before < 7 * 2**20
