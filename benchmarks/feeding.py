"""Whether a rank's inputs are ready before their step. `python benchmarks/feeding.py [decoders] [memory] [step]`

    decoders  pictures that one decoder and two decode, in turn; then the same through the worker's prefetch thread,
              which collates beside them
    memory    the resident memory of a process that does so with many pictures, then with many videos, batch by batch
    step      what making a step's inputs takes beside the step, and what share of the step is still spent on them

Pictures are JPEGs of smooth noise with 2 megapixels; those of `memory`, and the videos, are small ones. One process, no
Ray. The share of a step is that of the functions in `step_inputs.py` and `collate.py`, by Python's profiler.
"""

from __future__ import annotations

import argparse
import cProfile
import io
import pstats
import statistics
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

from benchmarks.data import resident_bytes  # noqa: E402
from benchmarks.device_parts.workload import OwnStep, batch_of, config_of  # noqa: E402
from dhp_ray.data.families.base import Size  # noqa: E402
from dhp_ray.data.processor import Processor, ProcessorSpec  # noqa: E402
from dhp_ray.data.video import read_clip  # noqa: E402
from dhp_ray.model.build import build_model  # noqa: E402
from dhp_ray.planner.plan.types import Pack, RankPlan, Sample  # noqa: E402
from dhp_ray.runtime.worker.prefetch import DECODED_AHEAD, decodings, futures_of, load_inputs  # noqa: E402
from dhp_ray.train.step_inputs import collated  # noqa: E402
from tests.data.samples import talk, video  # noqa: E402
from tests.packs import make_pack  # noqa: E402

SECTIONS = ("decoders", "memory", "step")
LARGE, SMALL = (1664, 1248), (168, 112)
"""Sides of pictures, in pixels."""
BATCH = 50
OURS = ("step_inputs.py", "collate.py")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", metavar="section", help=f"any of {', '.join(SECTIONS)}; all by default")
    parser.add_argument("--pictures", type=int, default=200, help="decoders: pictures, each way")
    parser.add_argument("--rounds", type=int, default=2, help="decoders: how often each way")
    parser.add_argument("--small-pictures", type=int, default=10_000, help="memory: pictures")
    parser.add_argument("--videos", type=int, default=500, help="memory: videos")
    parser.add_argument("--steps", type=int, default=5, help="step: steps that count")
    options = parser.parse_args()
    if unknown := set(options.sections) - set(SECTIONS):
        parser.error(f"no section {unknown.pop()!r}; there are {', '.join(SECTIONS)}")
    torch.set_num_threads(1)
    sections = options.sections or SECTIONS
    processor = ProcessorSpec("tiny").load()
    if "decoders" in sections:
        compare_decoders(processor, options.pictures, options.rounds)
    if "memory" in sections:
        print("| through a rank's prefetch | resident at the start | in the middle | at the end |\n|---|---|---|---|")
        follow_memory(processor, f"{options.small_pictures:,} pictures", picture(SMALL, 0), options.small_pictures)
        film = video(48, *SMALL, rate=12, codec="libx264", g="12")
        follow_memory(processor, f"{options.videos:,} videos", film, options.videos)
        print(flush=True)
    if "step" in sections:
        share_of_a_step(options.steps)


def picture(size: tuple[int, int], seed: int) -> bytes:
    noise = np.random.default_rng(seed).integers(0, 256, (size[1] // 8, size[0] // 8, 3), np.uint8)
    stream = io.BytesIO()
    Image.fromarray(noise).resize(size, Image.Resampling.BICUBIC).save(stream, "JPEG", quality=85)
    return stream.getvalue()


def rows_of(processor: Processor, media: bytes, count: int) -> tuple[list[Sample], list[dict[str, Any]]]:
    """So many samples that show one picture, or one video, each."""
    is_video = not media.startswith(b"\xff\xd8")
    size: Size = read_clip(media, processor.family.limits) if is_video else Image.open(io.BytesIO(media)).size
    encoded = processor.encode(talk("<video>What?" if is_video else "<image>What?", "Noise."), [size])
    samples = [Sample(str(number), encoded.text_tokens, encoded.vision_tokens, encoded.grids)
               for number in range(count)]
    rows = [{"id": sample.id, "input_ids": encoded.input_ids, "labels": encoded.labels, "grids": encoded.grids,
             "media": encoded.media, "seconds": encoded.seconds, "images": [media]} for sample in samples]
    return samples, rows


def plan_of(samples: Sequence[Sample]) -> RankPlan:
    """A pack for every ten samples, on one rank."""
    packs: list[Pack] = [make_pack(first // 10, [0], samples[first:first + 10])
                             for first in range(0, len(samples), 10)]
    return RankPlan(1, 0, (), tuple(packs))


def compare_decoders(processor: Processor, num_pictures: int, rounds: int) -> None:
    samples, rows = rows_of(processor, picture(LARGE, 0), BATCH)
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


def follow_memory(processor: Processor, name: str, media: bytes, count: int) -> None:
    """Two decoders; the start is after the third batch, by when all that stays has been loaded."""
    samples, rows = rows_of(processor, media, BATCH)
    plan, adapter = plan_of(samples), build_model("tiny", "", processor.token_ids, 0)
    resident = []
    for _ in range(max(6, count // BATCH)):
        _, failures = load_inputs(plan, rows, processor, adapter, 2)
        assert not failures
        resident.append(resident_bytes())
    start, middle, end = resident[2], resident[len(resident) // 2], resident[-1]
    print(f"| {name} | {start / 1e6:.0f} MB | {middle / 1e6:.0f} MB | {end / 1e6:.0f} MB |", flush=True)


def share_of_a_step(num_steps: int) -> None:
    cpu = torch.device("cpu")
    own = OwnStep(config_of("tiny"), cpu, "fp32", recomputes=False)
    batch = batch_of([512, 256, 128, 64, 32, 32], cpu, with_images=True)
    plan = RankPlan(1, 0, (), (make_pack(0, [0], [sample for sample, _ in batch]),))
    ahead_s, steps_s, shares = [], [], []
    for step in range(num_steps + 1):
        begun = perf_counter()
        inputs = collated(plan, dict((sample.id, payload) for sample, payload in batch), own.adapter)
        made = perf_counter()
        profile = cProfile.Profile()
        profile.runcall(own.step.run, inputs, 1.0)
        if step:  # the first one has what happens once
            ahead_s.append(made - begun)
            steps_s.append(perf_counter() - made)
            shares.append(in_ours_s(profile) / steps_s[-1])
    own.release()
    step_s = statistics.median(steps_s)
    print(f"| a step of {sum(sample.num_tokens for sample, _ in batch)} tokens, tiny model, one rank | |\n|---|---|\n"
          f"| step | {1e3 * step_s:.0f} ms |\n"
          f"| collating its inputs, ahead of it | {1e3 * statistics.median(ahead_s):.1f} ms "
          f"({100 * statistics.median(ahead_s) / step_s:.1f} % of a step) |\n"
          f"| on the step's path | {100 * statistics.median(shares):.3f} % of a step |", flush=True)


def in_ours_s(profile: cProfile.Profile) -> float:
    """Seconds inside functions of ours that make inputs, and in all that these call."""
    entries: Any = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    ours = {place for place in entries if Path(place[0]).name in OURS}
    return float(sum(cumulative for place, (_, _, _, _, callers) in entries.items() if place in ours
                     for caller, (_, _, _, cumulative) in callers.items() if caller not in ours))


if __name__ == "__main__":
    main()
