"""Whether a rank's inputs are ready before their step: pictures that one decoder and two decode, in turn; then the same
through the worker's prefetch thread, which collates beside them. `python benchmarks/feeding.py`

Pictures are JPEGs of smooth noise with 2 megapixels. One process, no Ray.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import torch  # noqa: E402
from PIL import Image  # noqa: E402

from dhp_ray.data.processor import Processor, ProcessorSpec  # noqa: E402
from dhp_ray.model.build import build_model  # noqa: E402
from dhp_ray.planner.plan.types import Pack, RankPlan, Sample  # noqa: E402
from dhp_ray.runtime.worker.prefetch import DECODED_AHEAD, decodings, futures_of, load_inputs  # noqa: E402
from tests.data.samples import talk  # noqa: E402
from tests.packs import make_pack  # noqa: E402

LARGE = (1664, 1248)
"""Sides of pictures, in pixels."""
BATCH = 50


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", type=int, default=200, help="pictures, each way")
    parser.add_argument("--rounds", type=int, default=2, help="how often each way")
    options = parser.parse_args()
    torch.set_num_threads(1)
    compare_decoders(ProcessorSpec("tiny").load(), options.pictures, options.rounds)


def large_picture() -> bytes:
    noise = np.random.default_rng(0).integers(0, 256, (LARGE[1] // 8, LARGE[0] // 8, 3), np.uint8)
    stream = io.BytesIO()
    Image.fromarray(noise).resize(LARGE, Image.Resampling.BICUBIC).save(stream, "JPEG", quality=85)
    return stream.getvalue()


def rows_of(processor: Processor, picture: bytes, count: int) -> tuple[list[Sample], list[dict[str, Any]]]:
    """So many samples that show one picture each."""
    encoded = processor.encode(talk("<image>What?", "Noise."), [LARGE])
    samples = [Sample(str(number), encoded.text_tokens, encoded.vision_tokens, encoded.grids)
               for number in range(count)]
    rows = [{"id": sample.id, "input_ids": encoded.input_ids, "labels": encoded.labels, "grids": encoded.grids,
             "media": encoded.media, "seconds": encoded.seconds, "images": [picture]} for sample in samples]
    return samples, rows


def plan_of(samples: Sequence[Sample]) -> RankPlan:
    """A pack for every ten samples, on one rank."""
    packs: list[Pack] = [make_pack(first // 10, [0], samples[first:first + 10])
                             for first in range(0, len(samples), 10)]
    return RankPlan(1, 0, (), tuple(packs))


def compare_decoders(processor: Processor, num_pictures: int, rounds: int) -> None:
    samples, rows = rows_of(processor, large_picture(), BATCH)
    plan, adapter = plan_of(samples), build_model("tiny", "", processor.token_ids, 0)
    calls = [call for row in rows for call in decodings(row, [True] * len(row["grids"]), processor)]

    def decode_all(num_decoders: int) -> None:
        with ThreadPoolExecutor(num_decoders) as decoders:
            for future in futures_of(calls, decoders, DECODED_AHEAD * num_decoders):
                future.result()

    def load_all(num_decoders: int) -> None:
        _, failures = load_inputs(plan, rows, processor, adapter, num_decoders)
        assert not failures

    print(f"| {num_pictures} JPEGs of {LARGE[0]}x{LARGE[1]} | pictures/s | CPU s |\n|---|---|---|")
    for name, way in {"decoded": decode_all, "decoded and collated": load_all}.items():
        seconds: dict[int, list[float]] = {1: [], 2: []}
        for _ in range(rounds):
            for decoders, found in seconds.items():
                begun, used = perf_counter(), process_time()
                for _ in range(num_pictures // BATCH):
                    way(decoders)
                found.append(perf_counter() - begun)
                print(f"| {name}, {decoders} decoder{'s' * (decoders > 1)} | {num_pictures / found[-1]:.1f} | "
                      f"{process_time() - used:.1f} |", flush=True)
        print(f"| {name}: two over one, the best round each | {min(seconds[1]) / min(seconds[2]):.2f} | |", flush=True)
    print(flush=True)


if __name__ == "__main__":
    main()
