from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from dhp_ray.data.formats import read_rows
from dhp_ray.data.index import index_fragments
from dhp_ray.schema import Data
from tests.data.samples import talk


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
