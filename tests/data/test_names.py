from __future__ import annotations

import gc
import json
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dhp_ray.data.fragments import Fragments, HashSet, UniqueIds
from dhp_ray.data.index import index_fragments
from dhp_ray.schema import Data


def bytes_kept(make: Callable[[], object]) -> tuple[int, int]:
    """Bytes that what is made keeps, and the most that there were while it was made."""
    gc.collect()
    tracemalloc.start()
    made = make()
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    del made
    return kept, peak


@given(st.lists(st.integers(1, 60) | st.integers(1, 2**64 - 1), max_size=4000))
def test_a_hash_set_is_a_set(numbers: list[int]) -> None:
    ours, plain = HashSet(), set()
    for number in numbers:
        assert ours.add(number) == (number not in plain)
        plain.add(number)
    assert ours._count == len(plain)


def test_a_hash_set_grows() -> None:
    ours = HashSet()
    assert all(ours.add(number * 2**40) for number in range(1, 1000))
    assert not any(ours.add(number * 2**40) for number in range(1, 1000))


@pytest.mark.parametrize("file", [b"a\xff.jsonl", b"a\nb.jsonl"], ids=["not UTF-8", "two lines"])
def test_rows_of_a_file_with_a_strange_name_have_names_for_one_line(tmp_path: Path, file: bytes) -> None:
    (tmp_path / os.fsdecode(file)).write_text('{"conversations": []}\n')
    found = index_fragments(Data(format="llava", path=str(tmp_path)))[0]
    assert found.names == ((0, f"{os.fsdecode(file)[0]}?{os.fsdecode(file)[2:-6]}#000000"),)


def test_ids_of_one_hash_get_different_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dhp_ray.data.fragments._hash", lambda name: 1 + len(name))
    names = UniqueIds()
    assert [names.claim(wanted, "rows.json", row)
            for row, wanted in enumerate("abc")] == [None, "b#000001", "c#000002+"]


def test_taken_ids_stay_small() -> None:
    def claim() -> UniqueIds:
        names = UniqueIds()
        for row in range(20_000):
            assert names.claim(f"photograph-{row:012d}", "rows.json", row) is None
        return names

    kept, peak = bytes_kept(claim)
    assert kept < 25 * 20_000
    assert peak < 40 * 20_000


@pytest.mark.seconds
def test_an_index_of_rows_without_ids_stays_small(tmp_path: Path) -> None:
    short, long = tmp_path / "short.jsonl", tmp_path / "rows.jsonl"
    for path, num_rows in ((short, 1), (long, 20_000)):
        path.write_text((json.dumps({"conversations": []}) + "\n") * num_rows)
    index_fragments(Data(format="llava", path=str(short)))  # what pyarrow imports at first use
    found: list[Fragments] = []
    kept, peak = bytes_kept(lambda: found.append(index_fragments(Data(format="llava", path=str(long)))))
    assert kept < 60 * 20_000
    assert peak < 120 * 20_000
    assert found[0][1].names[0] == (0, "rows#000032")
