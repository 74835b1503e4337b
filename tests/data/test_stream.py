from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray

from dhp_ray.data.errors import DataError
from dhp_ray.data.processor import ProcessorSpec
from dhp_ray.data.reader import read_payloads
from dhp_ray.data.stream import GlobalBatch, Stream
from dhp_ray.schema import Data, Model
from tests.data.samples import picture, talk, write_rows

TINY = Model(preset="tiny")
BAD = (5, 6, 40, 41, 42, 69)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """70 rows in three fragments, six of them bad; every third has pictures."""
    folder = tmp_path_factory.mktemp("rows")
    for number in range(4):
        (folder / f"{number}.png").write_bytes(picture(56 + 28 * number, 56))
    content = []
    for number in range(70):
        images = [f"{number % 4}.png"] * (number % 3)
        answers = talk("<image>" * len(images) + "Count.", "one " * (1 + number % 9))
        content.append({"id": f"r{number}", "image": images, "conversations": [] if number in BAD else answers})
    return write_rows(folder / "rows.json", content)


@pytest.fixture
def stream(ray_cluster: None, rows: Path) -> Iterator[Stream]:
    opened = open_stream(rows)
    yield opened
    opened.close()


def open_stream(path: Path, seed: int = 0, **arguments: object) -> Stream:
    return Stream(Data(format="llava", path=str(path)), TINY, seed, **arguments)  # type: ignore[arg-type]


def epoch_of(stream: Stream, num_samples: int = 8) -> list[GlobalBatch]:
    batches = []
    while (batch := stream.next_batch(num_samples)) is not None:
        batches.append(batch)
    return batches


def told(batches: list[GlobalBatch]) -> list[tuple]:
    """What a batch says, without its references."""
    return [(batch.epoch, batch.samples, batch.skipped, batch.cursor) for batch in batches]


def test_an_epoch_has_every_row_once(stream: Stream) -> None:
    batches = epoch_of(stream)
    used = [sample.id for batch in batches for sample in batch.samples]
    skipped = [item for batch in batches for item in batch.skipped]
    assert stream.num_rows == 70
    assert sorted(used + skipped) == sorted(f"r{number}" for number in range(70))
    assert sorted(skipped) == sorted(f"r{number}" for number in BAD)
    assert {reason for batch in batches for reason in batch.skipped.values()} == {
        "the conversation is empty; allowed: a list of turns with from and value, or role and content"}
    assert [len(batch.samples) for batch in batches] == [8] * 8
    assert stream.next_batch(8) is None


def test_the_payload_is_where_the_batch_says(stream: Stream) -> None:
    batch = stream.next_batch(20)
    assert batch is not None
    assert set(batch.payload) == {sample.id for sample in batch.samples}
    for sample in batch.samples:
        reference, row = batch.payload[sample.id]
        record = read_payloads(ray.get(reference), [row])[0]
        assert record["id"] == sample.id
        assert len(record["input_ids"]) == sample.num_tokens
        assert np.array_equal(record["grids"].reshape(-1, 3), np.array(sample.vision_grids).reshape(-1, 3))
        assert len(record["images"]) == len(sample.vision_grids) == int(sample.id[1:]) % 3
        assert sum(math.prod(grid) for grid in sample.vision_grids) == 4 * sample.vision_tokens


def test_the_order_is_of_seed_and_epoch_alone(stream: Stream, rows: Path) -> None:
    first = told(epoch_of(stream))
    stream.start_epoch(1)
    second = told(epoch_of(stream))
    assert {batch[0] for batch in second} == {1}
    assert [batch[1] for batch in first] != [batch[1] for batch in second]
    other = open_stream(rows)
    other.start_epoch(1)
    assert told(epoch_of(other)) == second
    seeded = open_stream(rows, seed=1)
    assert [batch[1] for batch in told(epoch_of(seeded))] != [batch[1] for batch in first]
    # The size of a batch moves its borders only.
    stream.start_epoch(0)
    assert [sample for batch in epoch_of(stream, 11)
            for sample in batch.samples] == [sample for batch in first for sample in batch[1]]


def test_a_restored_cursor_goes_on_exactly(stream: Stream, rows: Path) -> None:
    undisturbed = epoch_of(stream, 9)
    for place in (0, 2, 3, len(undisturbed) - 2, len(undisturbed) - 1):
        restored = open_stream(rows)
        restored.restore(json.loads(json.dumps(undisturbed[place].cursor)))
        assert told(epoch_of(restored, 9)) == told(undisturbed[place + 1 :])
        restored.close()


def test_a_closed_stream_reads_again_from_its_place(stream: Stream, rows: Path) -> None:
    undisturbed = epoch_of(stream, 9)
    closed = open_stream(rows)
    seen = [closed.next_batch(9)]
    closed.close()
    assert closed.cursor == undisturbed[0].cursor
    assert told([*seen, *epoch_of(closed, 9)]) == told(undisturbed)  # type: ignore[list-item]


def test_a_batch_mixes_the_rows_of_a_window(ray_cluster: None, tmp_path: Path) -> None:
    """256 rows in eight fragments: a batch of 32 comes from most of those in a window of 160, and from two of them at
    most where there is none.
    """
    path = write_rows(tmp_path / "rows.json", [{"id": str(row), "conversations": talk("a", "b")} for row in range(256)])
    orders = {}
    for window, most in ((160, 8), (0, 2)):
        stream = Stream(Data(format="llava", path=str(path), shuffle_window=window), TINY, 0)
        batches = [[int(sample.id) for sample in batch.samples] for batch in epoch_of(stream, 32)]
        stream.close()
        orders[window] = [row for batch in batches for row in batch]
        assert sorted(orders[window]) == list(range(256))
        mixed = [len({row // 32 for row in batch}) for batch in batches]
        assert max(mixed) <= most
        assert (np.mean(mixed) >= 3.5) == (window > 0)
    assert orders[160] != orders[0]


def test_a_cursor_of_other_data_is_refused(stream: Stream) -> None:
    with pytest.raises(DataError, match=r": 70 rows, the saved run's had 71; allowed: the same data"):
        stream.restore(stream.cursor | {"num_rows": 71})
    with pytest.raises(
        DataError,
        match=r"the saved run's version gave the rows in another order; allowed: another run.dir, or that version",
    ):
        stream.restore({"epoch": 0, "fragment": 0, "row": 0, "num_rows": 70})


def tabled(path: Path, ids: list[str], row_group_size: int) -> Path:
    """Equal rows but for their ids."""
    path.parent.mkdir(exist_ok=True)
    pq.write_table(pa.table({"id": ids, "conversations": [talk("a", "b")] * len(ids)}), path,
                   row_group_size=row_group_size)
    return path


IDS = [f"r{number:02d}" for number in range(64)]


@pytest.mark.parametrize("change", [
    lambda path: tabled(path, IDS, 10), lambda path: tabled(path, IDS[::-1], 16),
    lambda path: tabled(path, [*IDS[:-1], "else"], 16)])
def test_resuming_on_changed_data_of_as_many_rows_is_refused(
    change: Callable[[Path], object], ray_cluster: None, tmp_path: Path
) -> None:
    """It would double some rows and lose others. A copy elsewhere goes on."""
    path = tabled(tmp_path / "rows.parquet", IDS, 16)
    stream = Stream(Data(format="parquet", path=str(path)), TINY, 0)
    first = stream.next_batch(8)
    assert first is not None
    stream.close()
    copied = Stream(Data(format="parquet", path=str(tabled(tmp_path / "copy" / "rows.parquet", IDS, 16))), TINY, 0)
    copied.restore(json.loads(json.dumps(first.cursor)))
    change(path)
    changed = Stream(Data(format="parquet", path=str(path)), TINY, 0)
    with pytest.raises(DataError) as caught:
        changed.restore(json.loads(json.dumps(first.cursor)))
    assert str(caught.value) == (
        f"data.path: {path}: it has as many rows as the saved run's data, but other files, other contents or other row "
        "groups; allowed: the same data, or another run.dir")
    changed.close()
    copied.close()


def test_the_last_batch_is_left_out_when_it_is_not_full(ray_cluster: None, rows: Path) -> None:
    whole, dropped = open_stream(rows), open_stream(rows, drop_last=True)
    batches = epoch_of(whole, 10)
    assert [len(batch.samples) for batch in batches] == [10] * 6 + [4]
    assert told(epoch_of(dropped, 10)) == told(batches[:-1])
    assert dropped.next_batch(10) is None


def test_samples_beyond_the_cluster_are_skipped(ray_cluster: None, rows: Path) -> None:
    lengths = sorted((sample.num_tokens, sample.id) for batch in epoch_of(open_stream(rows))
                     for sample in batch.samples)
    limit, _ = lengths[-5]
    limited = open_stream(rows)
    limited.limit(limit)
    batches = epoch_of(limited)
    assert sorted(sample.id for batch in batches
                  for sample in batch.samples) == sorted(name for length, name in lengths if length <= limit)
    reasons = {name: reason for batch in batches for name, reason in batch.skipped.items()}
    for length, name in lengths:
        if length > limit:
            assert reasons[name] == (f"{length} tokens in one sequence; allowed: at most {limit} "
                                     "(planner.max_sequence_tokens)")


def test_parts_join_without_a_seam(ray_cluster: None, rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = told(epoch_of(open_stream(rows)))
    monkeypatch.setattr("dhp_ray.data.stream.PART_FRAGMENTS", 2)
    assert told(epoch_of(open_stream(rows))) == expected


def test_parquet_gives_the_batches_of_json(ray_cluster: None, rows: Path, tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    content = [dict(row, images=[(rows.parent / name).read_bytes() for name in row["image"]])
               for row in json.loads(rows.read_text())]
    pq.write_table(pa.Table.from_pylist([{key: row[key] for key in ("id", "images", "conversations")}
                                         for row in content]), tmp_path / "rows.parquet",
                   row_group_size=32)
    stream = Stream(Data(format="parquet", path=str(tmp_path / "rows.parquet")), TINY, 0)
    assert [batch[:3] for batch in told(epoch_of(stream))] == [batch[:3] for batch in told(epoch_of(open_stream(rows)))]


def test_no_payload_comes_to_the_driver(ray_cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 8 MB each: what this process fetches of them is lengths."""
    noise = np.random.default_rng(0).integers(0, 255, (600, 1200, 3), np.uint8)
    from PIL import Image

    Image.fromarray(noise).save(tmp_path / "noise.png")
    path = write_rows(tmp_path / "rows.json", [{"image": "noise.png", "conversations": talk("<image>", "noise")}] * 12)
    fetched: list[int] = []
    get = ray.get

    def counted(references: object, **arguments: object) -> object:
        value = get(references, **arguments)
        fetched.append(value.nbytes if hasattr(value, "nbytes") else 0)
        return value

    monkeypatch.setattr(ray, "get", counted)
    batch = open_stream(path).next_batch(12)
    assert batch is not None
    assert len(batch.samples) == 12
    assert sum(fetched) < 10_000
    reference, _ = batch.payload[batch.samples[0].id]
    assert get(reference).nbytes > 12 * 2_000_000


def test_a_set_without_a_usable_row_is_refused(ray_cluster: None, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.json", [{"id": "a", "conversations": []}, {"id": "b", "conversations": []}])
    with pytest.raises(DataError, match=r"has no usable row; the last, [ab]: the conversation is empty"):
        open_stream(path).next_batch(2)


def test_a_file_that_vanishes_is_one_line(ray_cluster: None, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.json", [{"id": "a", "conversations": talk("a", "b")}])
    stream = open_stream(path)
    os.unlink(path)
    with pytest.raises(DataError,
                       match=r"data.path: .*rows.json cannot be read: .*No such file or directory") as caught:
        stream.next_batch(1)
    assert "\n" not in str(caught.value)


def test_a_model_folder_without_tokenizer_is_refused_before_reading(
    ray_cluster: None, rows: Path, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=r"model\.path: "):
        Stream(Data(format="llava", path=str(rows)), Model(path=str(tmp_path)), 0)


def test_nlvr_streams_whole(ray_cluster: None, test_data: Path) -> None:
    stream = open_stream(test_data / "nlvr")
    samples = [sample for batch in epoch_of(stream, 64) for sample in batch.samples]
    stream.close()
    assert len(samples) == len({sample.id for sample in samples}) == 854
    assert sum(len(sample.vision_grids) for sample in samples) == 1978
    assert {grid for sample in samples
            for grid in sample.vision_grids} == {ProcessorSpec("tiny").load().family.grid((400, 100))}
