from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dhp_ray.data.errors import DataError
from dhp_ray.data.reader import read_payloads
from dhp_ray.data.stream import GlobalBatch, SourceStream, Stream, furthest_behind, rows_given, shares
from dhp_ray.schema import Data, Model, Source
from tests.data.samples import talk, write_rows

TINY = Model(preset="tiny")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Data:
    """40 rows of JSON, one of them bad, and 10 of parquet; three to one."""
    folder = tmp_path_factory.mktemp("sources")
    large = [{"id": f"a{number}", "conversations": talk("a", "b") if number != 7 else []} for number in range(40)]
    write_rows(folder / "large.json", large)
    pq.write_table(pa.table({"id": [f"b{number}" for number in range(10)], "conversations": [talk("c", "d")] * 10}),
                   folder / "small.parquet", row_group_size=4)
    return Data(format="llava", sources=[Source(path=str(folder / "large.json"), weight=1.5),
                                         Source(path=str(folder / "small.parquet"), weight=0.5, format="parquet")])


@pytest.fixture
def mixture(ray_cluster: None, data: Data) -> Iterator[Stream]:
    opened = Stream(data, TINY, seed=3)
    yield opened
    opened.close()


def told(batch: GlobalBatch | None) -> object:
    assert batch is not None
    return (batch.epoch, batch.samples, batch.skipped, batch.cursor)


def test_batches_have_every_source_in_its_share(mixture: Stream) -> None:
    batches = []
    for epoch in (0, 1):
        while (batch := mixture.next_batch(8)) is not None:
            assert batch.epoch == epoch
            batches.append(batch)
        mixture.start_epoch(epoch + 1)
    ids = [sample.id for batch in batches for sample in batch.samples]
    bad = [item for batch in batches for item in batch.skipped]
    assert bad in (["0/a7"], ["0/a7", "0/a7~2"])
    assert len(set(ids)) == len(ids) == 100 - len(bad)
    for batch in batches:
        assert abs(sum(sample.id.startswith("1/") for sample in batch.samples) - len(batch.samples) / 4) <= 1
    passes = Counter((name[0], name.partition("~")[2]) for name in ids)
    assert passes["1", ""] == passes["1", "2"] == 10  # all of the small source before any again
    rows = [row for batch in batches for source, row, _ in batch.rows if source == 1]
    assert rows[:20] == [*range(1, 11)] * 2
    assert [batch.cursor["row"] for batch in batches if len(batch.samples) < 8] == [50, 50]
    assert {name for name in ids if name.startswith("0/")
            and "~" not in name} == {f"0/a{number}" for number in range(40) if number != 7}
    orders = ["".join(name.partition("~")[0][3:] for name in ids if name.startswith("1/")
                      and name.partition("~")[2] == part) for part in ("", "2")]
    assert orders[0] != orders[1]


def test_sources_share_what_one_source_would_read_with(
    ray_cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(write_rows(tmp_path / "rows.json", [{"id": "a", "conversations": talk("a", "b")}]))
    limits: list[tuple[int, float]] = []
    monkeypatch.setattr("ray.cluster_resources", lambda: {"CPU": 128.0, "object_store_memory": 16e9})
    monkeypatch.setattr(SourceStream, "_part", lambda source, *found: limits.append(found) or 1)
    monkeypatch.setattr(SourceStream, "_blocks", lambda *arguments: iter(()))
    weights = (0.001, 1.0, 2.0, 5.0)
    for source in Stream(Data(sources=[Source(path=path, weight=weight) for weight in weights], format="llava"),
                         TINY, seed=0).sources:
        source._plan_parts()
    assert [tasks for tasks, _ in limits] == [1, 3, 7, 19]
    assert sum(most_bytes for _, most_bytes in limits) == pytest.approx(1e9)


def test_the_payload_is_the_samples(mixture: Stream) -> None:
    import ray

    batch = mixture.next_batch(12)
    assert batch is not None
    for sample in batch.samples:
        reference, row = batch.payload[sample.id]
        assert read_payloads(ray.get(reference), [row])[0]["id"] == sample.id


def test_a_restored_cursor_goes_on_exactly(mixture: Stream, data: Data) -> None:
    first = mixture.next_batch(8)
    assert first is not None
    undisturbed = [told(mixture.next_batch(8)) for _ in range(5)]
    mixture.start_epoch(1)
    undisturbed.append(told(mixture.next_batch(8)))
    again = Stream(data, TINY, seed=3)
    again.restore(json.loads(json.dumps(first.cursor)))
    assert [told(again.next_batch(8)) for _ in range(5)] == undisturbed[:5]
    again.start_epoch(1)
    assert told(again.next_batch(8)) == undisturbed[5]
    again.close()
    with pytest.raises(DataError, match=": 50 rows, the saved run's had 49"):
        again.restore(first.cursor | {"num_rows": 49})
    with pytest.raises(DataError, match=r"^data.sources: .*small.parquet: it has as many rows as the saved run's data"):
        again.restore(first.cursor | {"digest_1": 7})


def test_ids_that_look_like_those_of_a_later_pass_stay_apart(ray_cluster: None, tmp_path: Path) -> None:
    """Or else a batch that has the second pass's `a` and the first one's `a~2` would hold one of them twice."""
    given = ["a", "a~2", "a~2~2", "a~1", "b~", "c~x2"]
    small = write_rows(tmp_path / "small.json", [{"id": name, "conversations": talk("a", "b")} for name in given])
    mixture = Stream(Data(format="llava", sources=[Source(path=str(small))]), TINY, seed=3)
    ids = []
    for epoch in range(3):
        mixture.start_epoch(epoch)
        batch = mixture.next_batch(8)
        assert batch is not None
        ids += [sample.id for sample in batch.samples]
    assert sorted(ids[:6]) == ["0/a", "0/a~1~1", "0/a~2~1", "0/a~2~2~1", "0/b~", "0/c~x2"]
    assert len(set(ids)) == len(ids) == 18
    mixture.close()


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=6), st.integers(0, 300))
def test_counts_follow_the_shares(weights: list[float], num_rows: int) -> None:
    parts = shares(weights)
    given_rows = rows_given(parts, num_rows)
    assert given_rows.sum() == num_rows
    assert np.abs(given_rows - parts * num_rows).max() <= len(parts)
    following = given_rows.copy()
    following[furthest_behind(given_rows, parts)] += 1
    assert np.array_equal(following, rows_given(parts, num_rows + 1))


def test_a_source_that_is_not_there_is_named(data: Data) -> None:
    with pytest.raises(DataError, match="no file or folder /absent"):
        Stream(Data(format="llava", sources=[*data.sources, Source(path="/absent")]), TINY, 0)
