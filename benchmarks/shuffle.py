"""How well a window of rows mixes, and what it costs. `python benchmarks/shuffle.py`

Rows are sorted by four sources, in row groups of 100, with a picture of 100 kB each: the most frequent source's share
of a batch, of all and of the first 40, with a window of a tenth and without one (row group after row group), over a
perfect shuffle's; the time to the first batch, rows a second, the driver's memory; and whether a stream that is
restored in the middle goes on with the same rows. On data made here in a temporary folder (4 GB for 40,000 rows).
"""

from __future__ import annotations

import argparse
import io
import os
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import pyarrow as pa  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402
import ray  # noqa: E402
from PIL import Image  # noqa: E402

from benchmarks.data import resident_bytes  # noqa: E402
from dhp_ray.data.stream import Stream  # noqa: E402
from dhp_ray.schema import Data, Model  # noqa: E402

BATCH, SOURCES, GROUP_ROWS = 64, 4, 100
PICTURE = (182, 182)
"""Sides of a picture of noise, which stored as it is takes 100 kB."""
RESUMED_BATCHES, FIRST_BATCHES = 10, 40


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=40_000, help="rows of the set")
    options = parser.parse_args()
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    with tempfile.TemporaryDirectory(prefix="dhp_ray_shuffle_") as folder:
        path = write_rows(Path(folder) / "rows.parquet", options.rows)
        ray.init(address="local", num_cpus=os.cpu_count(), include_dashboard=False, configure_logging=False,
                 log_to_driver=False)
        compare_mixing(path, options.rows)
        ray.shutdown()


def write_rows(path: Path, num_rows: int) -> Path:
    """Rows sorted by source; ids begin with the number of the source."""
    pictures = []
    for number in range(2 * GROUP_ROWS):
        picture = io.BytesIO()
        noise = np.random.default_rng(number).integers(0, 256, (*PICTURE, 3), np.uint8)
        Image.fromarray(noise).save(picture, "png", compress_level=0)
        pictures.append(picture.getvalue())
    talk = [{"from": "human", "value": "<image>\nWhat is it?"}, {"from": "gpt", "value": "Noise."}]
    schema = pa.schema([("id", pa.string()), ("image", pa.binary()),
                        ("conversations", pa.list_(pa.struct([("from", pa.string()), ("value", pa.string())])))])
    with pq.ParquetWriter(path, schema, compression="none", use_dictionary=False) as writer:
        for first in range(0, num_rows, GROUP_ROWS):
            rows = range(first, min(first + GROUP_ROWS, num_rows))
            writer.write_table(pa.table([[f"{row * SOURCES // num_rows}-{row:06d}" for row in rows],
                                         [pictures[row % len(pictures)] for row in rows],
                                         [talk for _ in rows]], schema=schema))
    return path


def compare_mixing(path: Path, num_rows: int) -> None:
    open_stream(path, num_rows // 10).next_batch(1)  # processes that read are there, and the file is in memory
    perfect = share_of([f"{row * SOURCES // num_rows}-" for row in np.random.default_rng(0).permutation(num_rows)])
    print(
        f"| {num_rows} rows, batches of {BATCH} | most frequent source over a perfect shuffle's | "
        f"its share of the first {FIRST_BATCHES} | first batch | rows/s "
        "after it | "
        "resident at the first batch | most after it |\n|---|---|---|---|---|---|---|",
        flush=True,
    )
    for name, window in (("row group after row group", 0), ("window of a tenth", num_rows // 10)):
        stream = open_stream(path, window)
        begun = time.perf_counter()
        batches = [stream.next_batch(BATCH)]
        first_s, begun, first_bytes, most_bytes = time.perf_counter() - begun, time.perf_counter(), resident_bytes(), 0
        ids: list[list[str]] = []
        middle = None
        while (batch := batches[-1]) is not None:
            ids.append([sample.id for sample in batch.samples])
            if len(ids) == num_rows // BATCH // 2:
                middle = batch.cursor
            batches = [batch, stream.next_batch(BATCH)]  # like the driver, a batch and the one that follows are kept
            most_bytes = max(most_bytes, resident_bytes())
        rate = (num_rows - BATCH) / (time.perf_counter() - begun)
        stream.close()
        flat = [name for batch_ids in ids for name in batch_ids]
        assert len(set(flat)) == len(flat) == num_rows
        of_first = share_of(flat[: FIRST_BATCHES * BATCH])
        print(f"| {name} | {share_of(flat) / perfect:.3f} | {of_first:.2f} | {first_s:.2f} s | {rate:.0f} | "
              f"{first_bytes / 1e6:.0f} MB | {most_bytes / 1e6:.0f} MB |", flush=True)
        assert middle is not None
        restored = open_stream(path, window)
        restored.restore(middle)
        begun = time.perf_counter()
        for expected in ids[num_rows // BATCH // 2 :][:RESUMED_BATCHES]:
            again = restored.next_batch(BATCH)
            assert again is not None
            assert [sample.id for sample in again.samples] == expected
        took_s = time.perf_counter() - begun
        print(
            f"|   restored in the middle: the next {RESUMED_BATCHES} batches are the same | | | {took_s:.2f} s for all "
            "| | | |",
            flush=True,
        )
        restored.close()
    print(flush=True)


def open_stream(path: Path, window: int) -> Stream:
    return Stream(Data(format="parquet", path=str(path), shuffle_window=window), Model(preset="tiny"), seed=0)


def share_of(ids: list[str]) -> float:
    """The most frequent source's share of a batch, in the mean."""
    sources = np.array([int(name[0]) for name in ids])
    batches = [sources[start : start + BATCH] for start in range(0, len(sources), BATCH)]
    return float(np.mean([np.bincount(batch).max() / BATCH for batch in batches]))


if __name__ == "__main__":
    main()
