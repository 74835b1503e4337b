"""Rows a second of the data stream, beside plain pyarrow on the same file and the consumption of the tiny model: `python benchmarks/data.py`.

Three measurements in one run, on the synthetic set (jobs/prepare_data.py's, made here in a temporary folder):

    pyarrow   every row group read into memory, columns as they are: nothing tokenized, no header read
    stream    `dhp_ray.data.stream.Stream` to its last batch: headers, chat template, tokens, labels, blocks in Ray's object store
    model     forward and backward of the tiny model on one rank, one sample after the other, images decoded as a worker does
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path

import pyarrow.parquet as pq
import ray
import torch

from dhp_ray.comm.link import Link
from dhp_ray.data.processor import ProcessorSpec
from dhp_ray.data.stream import Stream
from dhp_ray.data.synthetic import write
from dhp_ray.model.build import build_model
from dhp_ray.planner.plan import RankPack, RankPlan, Sample
from dhp_ray.runtime.messages import BlockRows
from dhp_ray.runtime.prefetch import load_payloads
from dhp_ray.schema import Data, Model, Synthetic
from dhp_ray.train.collate import collate
from dhp_ray.train.pack import pack_loss

BATCH = 16


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--samples", type=int, default=1024)
    arguments.add_argument("--model-samples", type=int, default=48, help="samples that the model is timed on")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    ray.init(num_cpus=os.cpu_count(), include_dashboard=False, configure_logging=False, log_to_driver=False)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "synthetic.parquet"
        data = Data(path=str(path), synthetic=Synthetic(num_samples=options.samples))
        write(path, data, 0)
        plain = options.samples / plain_seconds(path)
        stream = Stream(data, Model(preset="tiny"), seed=0)
        first_s, epoch_s, samples, blocks = stream_seconds(stream)
        model = options.model_samples / model_seconds(samples[: options.model_samples], blocks, data)
        stream.close()
    print(f"The stream's first batch took {first_s:.1f} s (its reading tasks start).\n")
    print(f"| {options.samples} samples | rows/s |\n|---|---|\n| plain pyarrow | {plain:.0f} |\n"
          f"| stream, after the first batch | {len(samples) / epoch_s:.0f} |\n| tiny model, one rank | {model:.1f} |")
    ray.shutdown()


def plain_seconds(path: Path) -> float:
    begun = time.perf_counter()
    with pq.ParquetFile(path) as file:
        for group in range(file.num_row_groups):
            file.read_row_group(group)
    return time.perf_counter() - begun


Payload = dict[str, tuple[ray.ObjectRef, int]]


def stream_seconds(stream: Stream) -> tuple[float, float, list[Sample], Payload]:
    """Seconds to the first batch and from there to the last, the samples after the first batch, and where their payload lies."""
    begun = time.perf_counter()
    stream.next_batch(BATCH)
    first_s, begun = time.perf_counter() - begun, time.perf_counter()
    samples: list[Sample] = []
    blocks: Payload = {}
    while (batch := stream.next_batch(BATCH)) is not None:
        samples += batch.samples
        blocks |= batch.payload
    return first_s, time.perf_counter() - begun, samples, blocks


def model_seconds(samples: list[Sample], blocks: Payload, data: Data) -> float:
    """Seconds in which one rank decodes these samples and runs them forward and backward."""
    processor = ProcessorSpec.of(Model(preset="tiny"), data).load()
    adapter = build_model("tiny", "", processor.token_ids, 0)
    link = Link((0,), 0, None)
    packs = [RankPack(number, (0,), (sample,), (0,) * len(sample.vision_grids), 0.0) for number, sample in enumerate(samples)]
    begun = time.perf_counter()
    for pack in packs:
        reference, row = blocks[pack.samples[0].id]
        payloads, failures = load_payloads(RankPlan(1, 0, (), (pack,)), [BlockRows([reference], [row])], processor, adapter)
        assert not failures
        pack_loss(adapter, collate(pack, payloads, 0, adapter), link).backward()
    return time.perf_counter() - begun


if __name__ == "__main__":
    main()
