"""How well a window of rows mixes, and what it costs. `python benchmarks/shuffle.py [mixing] [bytes]`

    mixing   rows sorted by four sources, in row groups of 100, with a picture of 100 kB each: the most frequent
             source's share of a batch, of all and of the first 40, with a window
             of a tenth and without one (row group after row group), over a perfect shuffle's; the time to the first
             batch, rows a second, the driver's memory; and whether a stream that is restored in the middle goes on with
             the same rows
    bytes    two nodes on this machine with a rank on each: the bytes that came into a rank's node in a step,
             over those of its own rows there

On data made here in a temporary folder (4 GB for 40,000 rows).
"""

from __future__ import annotations

import argparse
import io
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import pyarrow as pa  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402
import ray  # noqa: E402
from PIL import Image  # noqa: E402
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy  # noqa: E402

from dhp_ray.data.blocks import BlockRows, fetch_rows  # noqa: E402
from dhp_ray.data.stream import GlobalBatch, Stream  # noqa: E402
from dhp_ray.schema import Data, Model  # noqa: E402

SECTIONS = ("mixing", "bytes")
BATCH, SOURCES, GROUP_ROWS = 64, 4, 100
PICTURE = (182, 182)
"""Sides of a picture of noise, which stored as it is takes 100 kB."""
RESUMED_BATCHES, FIRST_BATCHES = 10, 40
STILL_S = 4
"""bytes: reading ahead has come to its end when nothing has been added to a node's store for so many seconds."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", metavar="section",
                        help=f"any of {', '.join(SECTIONS)}; all of them by default")
    parser.add_argument("--rows", type=int, default=40_000, help="mixing: rows of the set")
    parser.add_argument("--steps", type=int, default=5, help="bytes: steps measured")
    options = parser.parse_args()
    if unknown := set(options.sections) - set(SECTIONS):
        parser.error(f"no section {unknown.pop()!r}; there are {', '.join(SECTIONS)}")
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    with tempfile.TemporaryDirectory(prefix="dhp_ray_shuffle_") as folder:
        if "mixing" in (options.sections or SECTIONS):
            path = write_rows(Path(folder) / "rows.parquet", options.rows)
            ray.init(address="local", num_cpus=os.cpu_count(), include_dashboard=False, configure_logging=False,
                     log_to_driver=False)
            compare_mixing(path, options.rows)
            ray.shutdown()
        if "bytes" in (options.sections or SECTIONS):
            count_bytes(write_rows(Path(folder) / "few.parquet", 40 * GROUP_ROWS), options.steps)


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


def resident_bytes() -> int:
    return next(1024 * int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines()
                if line.startswith("VmRSS"))


@ray.remote(num_cpus=0)
class Reader:
    """A rank's prefetch, without what it does with the rows."""

    def fetch(self, blocks: list[BlockRows]) -> int:
        """Bytes of the rows themselves."""
        return sum(row["input_ids"].nbytes + row["labels"].nbytes + sum(map(len, row["images"]))
                   for row in fetch_rows(blocks))


def count_bytes(path: Path, num_steps: int) -> None:
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    cluster.add_node(num_cpus=1)
    ray.init(address=cluster.address, configure_logging=False, log_to_driver=False)
    try:
        nodes = [node for node in ray.nodes() if node["Alive"]]
        ranks = [Reader.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)).remote()
                 for node in nodes]
        stream = open_stream(path, 10 * GROUP_ROWS)
        print(f"| step of {BATCH} samples on two nodes | "
              + " | ".join(f"rank {rank}: received over its rows that lay elsewhere" for rank in range(len(ranks)))
              + " | the whole blocks would be |\n|---|" + "---|" * (len(ranks) + 1), flush=True)
        for step in range(1, num_steps + 1):
            for _ in range(3):
                batch = stream.next_batch(BATCH)
            assert batch is not None
            ratios = []
            for number, (rank, node) in enumerate(zip(ranks, nodes)):
                blocks = blocks_of(batch, number, len(ranks))
                before = settled_bytes(node)
                own = ray.get(rank.fetch.remote(blocks))
                num_far = sum(len(block.rows) for block in blocks if block.origin.node != node["NodeID"])
                far = num_far / sum(len(block.rows) for block in blocks)
                ratios.append((settled_bytes(node) - before) / (far * own) if far else 0.0)
            whole = sum(ray.get(block_bytes.remote([reference]))
                        for reference in batch.origins) / (BATCH / len(ranks) * 100e3)
            print(f"| {step} | " + " | ".join(f"{ratio:.2f}" for ratio in ratios) + f" | {whole:.1f} |", flush=True)
        stream.close()
    finally:
        ray.shutdown()
        cluster.shutdown()


def blocks_of(batch: GlobalBatch, rank: int, num_ranks: int) -> list[BlockRows]:
    """Every so many-th sample is a rank's."""
    rows: dict[ray.ObjectRef, list[int]] = {}
    for sample in batch.samples[rank::num_ranks]:
        reference, row = batch.payload[sample.id]
        rows.setdefault(reference, []).append(row)
    return [BlockRows([reference], sorted(found), batch.origins[reference]) for reference, found in rows.items()]


@ray.remote(num_cpus=0)
def block_bytes(reference: list[ray.ObjectRef]) -> int:
    return int(ray.get(reference[0]).nbytes)


def settled_bytes(node: dict[str, Any]) -> int:
    """All bytes that a node's object store has ever taken in, once that stands still for some seconds: reading ahead is
    done.
    """
    from ray._private.internal_api import node_stats

    seen: list[int] = []
    while len(seen) < STILL_S or len(set(seen[-STILL_S:])) > 1:
        stats = node_stats(node["NodeManagerAddress"], node["NodeManagerPort"], include_memory_info=False)
        seen.append(int(stats.store_stats.cumulative_created_bytes))
        time.sleep(1.0)
    return seen[-1]


if __name__ == "__main__":
    main()
