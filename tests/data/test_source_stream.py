"""Reading beside workers that have reserved every CPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
from ray.exceptions import OutOfMemoryError
from ray.util.placement_group import placement_group, remove_placement_group

from dhp_ray.data import errors
from dhp_ray.data import stream as streams
from dhp_ray.data.blocks import LOST, BlockRows, fetch_columns, fetch_rows
from dhp_ray.data.errors import DataError
from dhp_ray.data.stream import GlobalBatch, PartBlocks, Stream
from dhp_ray.schema import Data, Model, Source
from tests.data.samples import picture, talk, write_rows

LIMIT_S = 60.0


@pytest.fixture
def no_free_cpu(ray_cluster: None) -> Iterator[None]:
    reserved = placement_group([{"CPU": ray.cluster_resources()["CPU"]}])
    assert reserved.wait(30)
    yield
    remove_placement_group(reserved)


def test_rows_are_read_where_every_cpu_is_reserved(no_free_cpu: None, tmp_path: Path) -> None:
    rows = [{"id": f"r{number}", "conversations": talk("Count.", "one")} for number in range(40)]
    path = write_rows(tmp_path / "rows.json", rows)
    stream = Stream(Data(format="llava", path=str(path)), Model(preset="tiny"), seed=0)
    batches: list[GlobalBatch | None] = []
    reading = Thread(target=lambda: batches.append(stream.next_batch(40)), daemon=True)
    reading.start()  # in a thread: what waits for a CPU waits for ever
    reading.join(LIMIT_S)
    assert batches, f"no batch within {LIMIT_S:g} s"
    assert batches[0] is not None
    assert len(batches[0].samples) == 40
    stream.close()


def pictured(folder: Path, num_rows: int) -> Path:
    """Rows of which each shows an image of its own; every second image is missing."""
    for number in range(0, num_rows, 2):
        (folder / f"{number}.png").write_bytes(picture(56, 56))
    return write_rows(folder / "rows.json", [
        {"id": f"r{number}", "image": f"{number}.png", "conversations": talk("<image>What?", "a")}
        for number in range(num_rows)])


def test_fragments_of_several_blocks_give_the_same_rows(ray_cluster: None, tmp_path: Path) -> None:
    """In the same order, from any row on, and also where their blocks are lost with a node."""
    (tmp_path / "a.bmp").write_bytes(picture(20, 20, "BMP"))  # of 1254 bytes
    path = write_rows(tmp_path / "rows.json", [
        {"id": f"r{number}", "image": "a.bmp", "conversations": talk("<image>What?", f"a{number}")}
        for number in range(100)])
    ids, cursors, batches = [], [], []
    for most_bytes in (2**20, 3000):
        stream = Stream(Data(format="llava", path=str(path)), Model(preset="tiny"), seed=0)
        [source] = stream.sources
        source.reader = replace(source.reader, most_bytes=most_bytes)
        batches = [batch for _ in range(4) if (batch := stream.next_batch(30)) is not None]
        ids.append([sample.id for batch in batches for sample in batch.samples])
        cursors.append([batch.cursor for batch in batches])
        origins = {origin for batch in batches for origin in batch.origins.values()}
        most = max(Counter(origin.item for origin in origins).values())
        assert (most == 1) if most_bytes > 3000 else (most >= 11)
    assert ids[0] == ids[1]
    assert sorted(ids[0]) == sorted(f"r{number}" for number in range(100))
    assert cursors[0] == cursors[1]
    stream.restore(cursors[0][0])
    assert [sample.id for sample in stream.next_batch(70).samples] == ids[0][30:]
    for sample in batches[0].samples[:8]:
        reference, row = batches[0].payload[sample.id]
        origin = batches[0].origins[reference]
        [found] = fetch_rows([BlockRows([reference], [row], origin)])
        [again] = fetch_rows([BlockRows([reference], [row], origin._replace(node=LOST))])
        assert found["id"] == again["id"] == sample.id
        assert found["input_ids"].tolist() == again["input_ids"].tolist()
        _, block, _ = fetch_columns(reference, origin._replace(node="ab" * 28), ["id"])
        assert ray.get(block) == ray.get(reference)
    stream.close()


def test_rows_that_ray_reads_on_a_lost_node_are_read_here(
    ray_cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray Data gives nothing until its head has noticed, then all that it owes."""
    rows = [{"id": f"r{number}", "conversations": talk("Count.", f"a{number}")} for number in range(200)]
    data = Data(format="llava", path=str(write_rows(tmp_path / "rows.json", rows)))
    calm = Stream(data, Model(preset="tiny"), seed=0)
    expected = [sample.id for sample in calm.next_batch(200).samples]
    calm.close()
    lost, noticed = Event(), Event()

    def held_up(entries: Iterator[Any]) -> Iterator[Any]:
        for number, entry in enumerate(entries):
            if number == 2:
                lost.set()
                assert noticed.wait(LIMIT_S)
            yield entry

    class HeldUp(PartBlocks):
        def __init__(self, entries: Iterable[Any], *others: Any) -> None:
            super().__init__(held_up(iter(entries)), *others)

    read_here = []

    def asked(reference: Any, *others: Any) -> Any:
        read_here.append(reference is None)
        return fetch_columns(reference, *others)

    monkeypatch.setattr(streams, "fetch_columns", asked)
    monkeypatch.setattr(streams, "PartBlocks", HeldUp)
    monkeypatch.setattr(streams, "unnoticed_loss", lambda: lost.is_set() and not noticed.is_set())
    stream = Stream(data, Model(preset="tiny"), seed=0)
    batches = [stream.next_batch(20) for _ in range(5)]
    assert not any(read_here[:2])
    assert all(read_here[2:])
    noticed.set()
    batches += [stream.next_batch(20) for _ in range(5)]
    assert [sample.id for batch in batches for sample in batch.samples] == expected
    for batch in batches:
        for name, (reference, row) in batch.payload.items():
            [found] = fetch_rows([BlockRows([reference], [row], batch.origins[reference])])
            assert found["id"] == name
    stream.close()


def entry(num_rows: int) -> Any:
    return SimpleNamespace(ref="block", metadata=SimpleNamespace(num_rows=num_rows, exec_stats=None))


def failing(*entries: Any) -> Iterator[Any]:
    yield from entries
    raise OutOfMemoryError("Task was killed")


@pytest.mark.parametrize("late", [lambda: iter([entry(3), entry(10)]), failing, lambda: failing(entry(4)),
                                  lambda: iter([])], ids=["too few rows", "fails", "fails later", "ends"])
def test_what_ray_gives_late_of_a_share_ends_nothing(late: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second share began with four rows of Ray's when the node was lost; from there on all is read here."""
    noticed = Event()

    def entries() -> Iterator[Any]:
        yield from (entry(10), entry(4))
        assert noticed.wait(LIMIT_S)
        yield from late()

    monkeypatch.setattr(streams, "unnoticed_loss", lambda: not noticed.is_set())
    shares: Any = {number: SimpleNamespace(num_rows=10) for number in range(4)}
    blocks = PartBlocks(entries(), None, shares)  # type: ignore[arg-type]
    found = [next(blocks) for _ in range(3)]
    noticed.set()
    found += blocks
    assert [(origin.item, origin.rows) for _, origin in found] == [
        (0, (0, 10)), (1, (0, 4)), (1, (4, 10)), (2, (0, 10)), (3, (0, 10))]
    assert [reference for reference, _ in found] == ["block", "block", None, None, None]


def take_all(stream: Stream) -> None:
    """All batches of an epoch."""
    while stream.next_batch(8) is not None:
        pass


def test_a_folder_of_images_that_goes_away_ends_the_run_in_one_line(
    ray_cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or else the rest of the epoch would be skipped, and the run would be done."""
    monkeypatch.setattr(errors, "MOST_BAD_ROWS", 60)
    images = tmp_path / "images"
    images.mkdir()
    path = pictured(images, 400).rename(tmp_path / "rows.json")
    data = Data(format="llava", path=str(path), image_root=str(images), shuffle_window=1)
    stream = Stream(data, Model(preset="tiny"), seed=0)
    take_all(stream)  # 200 bad rows, and no 60 of them in a row
    stream.start_epoch(1)
    first = stream.next_batch(16)
    assert first is not None
    images.rename(tmp_path / "elsewhere")
    with pytest.raises(DataError, match=r"rows.json has 60 rows in a row that cannot be used; the last, r\d+: image 1: "
                                        r"\d+.png: no such file below data.image_root"):
        take_all(stream)
    (tmp_path / "elsewhere").rename(images)
    stream.restore(first.cursor)
    assert stream.next_batch(16) is not None
    stream.close()


def test_a_source_without_a_usable_row_ends_a_mixture(
    ray_cluster: None, tmp_path: Path
) -> None:
    bad = write_rows(tmp_path / "bad.json", [{"id": f"b{number}", "conversations": talk("<image>", "a")}
                                             for number in range(10)])
    good = write_rows(tmp_path / "good.json", [{"id": f"g{number}", "conversations": talk("a", "b")}
                                               for number in range(100)])
    mixture = Stream(Data(format="llava", sources=[Source(path=str(good)), Source(path=str(bad))]),
                          Model(preset="tiny"), seed=0)
    with pytest.raises(DataError, match=r"bad.json has no usable row; the last, 1/b\d: 1 <image> marks"):
        take_all(mixture)
    mixture.close()


@pytest.mark.parametrize(("megabytes", "expected"), [(1, 20), (100, 4), (2000, 1)])
def test_a_part_keeps_all_tasks_busy_within_a_share_of_the_store(
    ray_cluster: None, tmp_path: Path, megabytes: int, expected: int
) -> None:
    """Fragments that are read whole, a window of 40 MB, 16 tasks, and 400 MB of the store."""
    path = write_rows(tmp_path / "rows.json", [{"id": f"r{number}", "conversations": talk("a", "b")}
                                               for number in range(1280)])
    stream = streams.SourceStream(Data(format="llava", path=str(path)), Model(preset="tiny"), 0, "", 40 / 2048, 0)
    stream._row_bytes = np.full(40, megabytes * 1e6 / 32)
    stream._planned = len(stream._opening)
    assert stream._part(16, 400e6) == expected


def test_a_reading_task_that_ray_ends_is_one_line(
    ray_cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_rows(tmp_path / "rows.json", [{"id": "a", "conversations": talk("a", "b")}])
    stream = Stream(Data(format="llava", path=str(path)), Model(preset="tiny"), seed=0)

    def ended(*_: object) -> Iterator[tuple[ray.ObjectRef, str]]:
        raise OutOfMemoryError("Task was killed due to the node running low on memory.\nMemory on the node ...")
        yield

    monkeypatch.setattr(streams.SourceStream, "_blocks", ended)
    with pytest.raises(DataError) as caught:
        stream.next_batch(1)
    assert str(caught.value) == (f"data.path: {path}: a task that reads it failed: OutOfMemoryError: Task was killed "
                                 "due to the node running low on memory.")
