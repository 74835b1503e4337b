"""Whether data keeps up: rows a second of the stream, the driver's memory, and steps that wait. `python
benchmarks/data.py [rows] [memory] [task] [waits] [index]`

    rows     pyarrow  every row group read into memory, columns as they are: nothing tokenized, no header read
             stream   `dhp_ray.data.stream.Stream` to its last batch: headers, chat template, tokens, labels,
                      blocks in Ray's object store
             model    forward and backward of the tiny model on one rank, one sample after the other,
                      images decoded as a worker does
    memory   the resident memory of the process that takes batches from the stream, over samples with a picture
             of 4 kB each, then of 4 MB
    task     the most memory of one reading task and its largest block, of rows of 16 MB in several forms, and of a
             small file that unpacks to gigabytes
    index    the resident memory of a process that indexes JSONL, with ids and without, and of one that finds the
             index kept
    waits    a run of `jobs/train.py`: the steps whose start waited, for their batch, their plan or their decoded images

All of them on data made here in a temporary folder: the synthetic set (jobs/prepare_data.py's), and pictures of noise.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import pyarrow as pa  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402
import ray  # noqa: E402
import torch  # noqa: E402
from PIL import Image  # noqa: E402

from dhp_ray.comm.pack_communicator import PackCommunicator  # noqa: E402
from dhp_ray.data.blocks import BlockRows, fetch_rows  # noqa: E402
from dhp_ray.data.processor import ProcessorSpec  # noqa: E402
from dhp_ray.data.stream import GlobalBatch, Stream  # noqa: E402
from dhp_ray.data.synthetic import write  # noqa: E402
from dhp_ray.model.build import build_model  # noqa: E402
from dhp_ray.planner.plan.types import Pack, RankPlan, Sample  # noqa: E402
from dhp_ray.runtime.worker.prefetch import load_inputs  # noqa: E402
from dhp_ray.schema import Data, Model, PreparedData, Synthetic  # noqa: E402
from dhp_ray.train.pack import pack_loss  # noqa: E402

BATCH = 16
SECTIONS = ("rows", "memory", "task", "waits", "index")
FORMS = {"files": "parquet that names files", "tar": "tar", "parquet": "parquet, a page a row",
         "repeated": "parquet, one picture for all", "zeros": "64 rows of 24 MB of zeros in 50 kB of parquet"}
LARGE_BYTES = 16 * 2**20
PICTURES = {"4 kB": (36, 36), "4 MB": (1180, 1180)}
"""Sides of pictures of noise, which stored as they are take so much."""
WAIT_SHARE, WAIT_S = 0.01, 0.005
"""A step has waited when its start came so much later than the end of the step before: this share of its own time, but
at least so many seconds.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", metavar="section",
                        help=f"any of {', '.join(SECTIONS)}; all of them by default")
    parser.add_argument("--samples", type=int, default=1024, help="rows: samples of the synthetic set")
    parser.add_argument("--model-samples", type=int, default=48, help="rows: samples that the model is timed on")
    parser.add_argument("--pictures", type=int, default=2000, help="memory: samples of each size")
    parser.add_argument("--large-rows", type=int, default=256, help="task: rows of 16 MB")
    parser.add_argument("--steps", type=int, default=40, help="waits: steps of the run")
    parser.add_argument("--step-samples", type=int, default=48,
                        help="waits: samples of a step, which should take half a second or more")
    parser.add_argument("--index-rows", type=int, default=10_000_000, help="index: rows of the file")
    options = parser.parse_args()
    if unknown := set(options.sections) - set(SECTIONS):
        parser.error(f"no section {unknown.pop()!r}; there are {', '.join(SECTIONS)}")
    torch.set_num_threads(1)
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    sections = options.sections or SECTIONS
    if "index" in sections:
        with tempfile.TemporaryDirectory(prefix="dhp_ray_data_") as folder:
            compare_indexes(Path(folder), options.index_rows)
    if "task" in sections:
        with tempfile.TemporaryDirectory(prefix="dhp_ray_data_") as folder:
            compare_tasks(Path(folder), options.large_rows)
    if set(sections) <= {"index", "task"}:
        return
    ray.init(address="local", num_cpus=os.cpu_count(), include_dashboard=False, configure_logging=False,
             log_to_driver=False)
    with tempfile.TemporaryDirectory(prefix="dhp_ray_data_") as folder:
        if "rows" in sections:
            compare_rates(Path(folder), options.samples, options.model_samples)
        if "memory" in sections:
            compare_memory(Path(folder), options.pictures)
        if "waits" in sections:
            count_waits(Path(folder), options.steps, options.step_samples)
    ray.shutdown()


def compare_rates(folder: Path, num_samples: int, num_model_samples: int) -> None:
    path = folder / "synthetic.parquet"
    data = PreparedData(path=str(path), synthetic=Synthetic(num_samples=num_samples))
    write(path, data, 0)
    plain = num_samples / plain_seconds(path)
    stream = Stream(data, Model(preset="tiny"), seed=0)
    first_s, epoch_s, samples, blocks = stream_seconds(stream)
    model = num_model_samples / model_seconds(samples[:num_model_samples], blocks, data)
    stream.close()
    print(f"The stream's first batch took {first_s:.1f} s (its reading tasks start).\n")
    print(f"| {num_samples} samples | rows/s |\n|---|---|\n| plain pyarrow | {plain:.0f} |\n"
          f"| stream, after the first batch | {len(samples) / epoch_s:.0f} |\n| tiny model, one rank | {model:.1f} |\n",
          flush=True)


def plain_seconds(path: Path) -> float:
    begun = time.perf_counter()
    with pq.ParquetFile(path) as file:
        for group in range(file.num_row_groups):
            file.read_row_group(group)
    return time.perf_counter() - begun


Payload = dict[str, tuple[ray.ObjectRef, int]]


def stream_seconds(stream: Stream) -> tuple[float, float, list[Sample], Payload]:
    """Seconds to the first batch and from there to the last, the samples after the first batch, and where their payload
    lies.
    """
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
    link = PackCommunicator((0,), 0, None)
    packs = [Pack((0,), (), 0.0, encoders=(0,) * len(sample.vision_grids), index=number, samples=(sample,))
             for number, sample in enumerate(samples)]
    begun = time.perf_counter()
    for pack in packs:
        reference, row = blocks[pack.samples[0].id]
        inputs, failures = load_inputs(RankPlan(1, 0, (), (pack,)), fetch_rows([BlockRows([reference], [row])]),
                                       processor, adapter)
        assert not failures
        pack_loss(adapter, inputs.inputs[0], link).backward()
    return time.perf_counter() - begun


def compare_memory(folder: Path, num_samples: int) -> None:
    print(
        f"| {num_samples} samples with a picture of | image bytes read | resident at the first batch | most after it | "
        "growth |\n|---|---|---|---|---|"
    )
    for name, size in PICTURES.items():
        path = folder / name.replace(" ", "_")
        num_bytes = write_pictures(path, size, num_samples)
        first, most = driver_memory(Stream(Data(format="llava", path=str(path / "rows.jsonl")), Model(preset="tiny"),
                                           seed=0), num_samples)
        print(
            f"| {name} | {num_bytes / 1e6:,.0f} MB | {first / 1e6:.0f} MB | {most / 1e6:.0f} MB | "
            f"{(most - first) / 1e6:.0f} MB |",
            flush=True,
        )
    print(flush=True)


def write_pictures(folder: Path, size: tuple[int, int], num_samples: int) -> int:
    """Conversations that show one of eight pictures of noise; the bytes that reading them all takes."""
    folder.mkdir()
    for number in range(8):
        noise = np.random.default_rng(number).integers(0, 256, (*size, 3), np.uint8)
        Image.fromarray(noise).save(folder / f"{number}.png", compress_level=0)
    talk = [{"from": "human", "value": "<image>\nWhat is it?"}, {"from": "gpt", "value": "Noise."}]
    rows = (json.dumps({"id": f"{row:06d}", "image": f"{row % 8}.png", "conversations": talk})
            for row in range(num_samples))
    (folder / "rows.jsonl").write_text("\n".join(rows))
    return sum((folder / f"{row % 8}.png").stat().st_size for row in range(num_samples))


def driver_memory(stream: Stream, num_samples: int) -> tuple[int, int]:
    """Resident bytes of this process at the first batch, and the most at any later one. Like the driver, it keeps a
    batch and the one that follows.
    """
    kept: list[GlobalBatch] = []
    resident: list[int] = []
    count = 0
    while (batch := stream.next_batch(BATCH)) is not None:
        kept = [*kept[-1:], batch]
        count += len(batch.samples)
        resident.append(resident_bytes())
    assert count == num_samples, batch
    stream.close()
    return resident[0], max(resident[1:])


def resident_bytes() -> int:
    return next(1024 * int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines()
                if line.startswith("VmRSS"))


INDEX_ONCE = """
import resource, sys
from dhp_ray.data.index import index_fragments
from dhp_ray.schema import Data
found = index_fragments(Data(format="llava", path=sys.argv[1]))
peak = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
usage = resource.getrusage(resource.RUSAGE_SELF)
print(found.num_rows, peak, usage.ru_utime + usage.ru_stime)
"""


def compare_indexes(folder: Path, num_rows: int) -> None:
    """In a process each; the peak is the kernel's, and counts the pages of the file that are mapped."""
    print(f"| {num_rows:,} rows | file | peak resident | CPU |\n|---|---|---|---|")
    for name, row in {"with ids": '{"id": "photograph-%012d", "conversations": []}\n',
                      "without": '{"conversations": [], "n": %d}\n'}.items():
        path = folder / "rows.jsonl"
        with open(path, "w") as file:
            for first in range(0, num_rows, 100_000):
                file.write("".join(row % number for number in range(first, min(first + 100_000, num_rows))))
        for form in (name, "kept"):
            environment = os.environ | {"DHP_RAY_CACHE": str(folder / "cache"), "PYTHONPATH": str(ROOT)}
            output = subprocess.run([sys.executable, "-c", INDEX_ONCE, str(path)], check=True, env=environment,
                                    stdout=subprocess.PIPE, text=True).stdout
            rows, peak, seconds = output.split()
            assert int(rows) == num_rows
            print(
                f"| {form} | {path.stat().st_size / 1e6:,.0f} MB | {int(peak) * 1024 / 1e6:,.0f} MB | "
                f"{float(seconds):.0f} s |",
                flush=True,
            )
    print(flush=True)


READ_ONCE = """
import sys, time
import pyarrow as pa
from dhp_ray.data.index import image_root, index_fragments
from dhp_ray.data.order import RowRange
from dhp_ray.data.processor import ProcessorSpec
from dhp_ray.data.reader import ReadFragments, make_item
from dhp_ray.schema import Data
data = Data(format=sys.argv[1], path=sys.argv[2])
read, rows, errors, largest, begun = ReadFragments(ProcessorSpec("tiny"), image_root(data), 0), 0, 0, 0, time.time()
for number, fragment in enumerate(index_fragments(data)):
    item = make_item(0, [(RowRange(number, 0, fragment.num_rows), number, fragment)])
    for block in read(pa.Table.from_pylist([item])):
        rows, largest = rows + block.num_rows, max(largest, block.nbytes)
        errors += sum(map(bool, block["error"].to_pylist()))
        del block
# not of getrusage: its peak begins with that of the process which started this one
peak = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(rows, errors, largest, peak * 1024, time.time() - begun)
"""


def compare_tasks(folder: Path, num_rows: int) -> None:
    """In a process each, without Ray."""
    print("| rows | bad | largest block | most memory of the task | time |\n|---|---|---|---|---|")
    for form, name in FORMS.items():
        rows, errors, largest, peak, seconds = task_of(form, folder, num_rows)
        print(f"| {rows} in {name} | {errors} | {largest / 2**20:.0f} MB | {peak / 2**20:.0f} MB | {seconds:.1f} s |",
              flush=True)
    print(flush=True)


def task_of(form: str, folder: Path, num_rows: int) -> tuple[int, int, int, int, float]:
    """Of one reading task: its rows, those of them that are bad, the bytes of its largest block and of the process at
    its peak, and its seconds.
    """
    data_format, path = write_large(form, folder, num_rows)
    output = subprocess.run([sys.executable, "-c", READ_ONCE, data_format, str(path)], check=True, text=True,
                            env=os.environ | {"DHP_RAY_CACHE": str(folder / "cache"), "PYTHONPATH": str(ROOT)},
                            stdout=subprocess.PIPE).stdout
    path.unlink()
    *numbers, seconds = output.split()
    rows, errors, largest, peak = map(int, numbers)
    return rows, errors, largest, peak, float(seconds)


def write_large(form: str, folder: Path, num_rows: int) -> tuple[str, Path]:
    """The data format and the file of these rows, one of FORMS."""
    encoded = io.BytesIO()
    Image.new("RGB", (28, 28), "red").save(encoded, "png")
    picture = encoded.getvalue() + bytes(LARGE_BYTES - len(encoded.getvalue()))
    talk = json.dumps([{"from": "human", "value": "<image>"}, {"from": "gpt", "value": "Red."}])
    if form == "tar":
        with tarfile.open(folder / "rows.tar", "w") as archive:
            for number in range(num_rows):
                for kind, content in (("json", f'{{"conversations": {talk}}}'.encode()), ("png", picture)):
                    member = tarfile.TarInfo(f"{number}.{kind}")
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))
        return "webdataset", folder / "rows.tar"
    path = folder / "rows.parquet"
    if form == "files":
        (folder / "a.png").write_bytes(picture)
        pq.write_table(pa.table({"image": ["a.png"] * num_rows, "conversations": [talk] * num_rows}), path)
        return "parquet", path
    content, count = (bytes(24 * 2**20), 64) if form == "zeros" else (picture, num_rows)
    row = pa.table({"image": pa.array([content], pa.large_binary()), "conversations": [talk]})
    rows = pa.concat_tables([row] * count)
    if form == "repeated":  # all in one array, so that they are in the dictionary
        pq.write_table(rows.combine_chunks(), path)
    else:
        pq.write_table(rows, path, row_group_size=64, use_dictionary=False,
                       compression="zstd" if form == "zeros" else "none")
    return "parquet", path


def count_waits(folder: Path, num_steps: int, batch_size: int) -> None:
    path, run_dir = folder / "waits.parquet", folder / "run"
    num_samples = num_steps * batch_size
    write(path, PreparedData(path=str(path), synthetic=Synthetic(num_samples=num_samples)), 0)
    settings = [f"run.dir={run_dir}", f"run.steps={num_steps}", f"data.path={path}",
                f"batch.global_samples={batch_size}", "cluster.num_workers=2", "cluster.cpus_per_worker=0.5",
                "planner.tokens_per_rank=1000"]
    environment = os.environ | {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    subprocess.run([sys.executable, str(ROOT / "jobs" / "train.py"), *settings], check=True, cwd=ROOT, env=environment,
                   stdout=subprocess.DEVNULL)
    step_s = [json.loads(line)["step_time_s"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    waited_s, late_plans = waits_of(run_dir)
    waiting = [step for step, (waited, took) in enumerate(zip(waited_s, step_s, strict=True), 1)
               if waited > max(WAIT_S, WAIT_SHARE * took)]
    print(
        f"| {num_steps} steps of {batch_size} samples, jobs/train.py | |\n|---|---|\n| median step | "
        f"{statistics.median(step_s):.2f} s |\n"
        f"| steps that waited more than {100 * WAIT_SHARE:.0f} % of their time (at least {1e3 * WAIT_S:.0f} ms) | "
        f"{len(waiting)} "
        f"({100 * len(waiting) / num_steps:.1f} %): {', '.join(map(str, waiting)) or 'none'} |\n"
        f"| median wait | {1e3 * statistics.median(waited_s):.1f} ms |\n| longest wait after step 1 | "
        f"{1e3 * max(waited_s[1:]):.0f} ms |\n"
        f"| plans that came late | {late_plans} |"
    )


def waits_of(run_dir: Path) -> tuple[list[float], int]:
    """Seconds that each step of a run waited, before its start and in its slowest rank; and the plans that the
    planner's last resort replaced.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    driver, ranks = ([point.value for point in events.Scalars(tag)]
                     for tag in ("data/data_wait_s", "data/prefetch_wait_s"))
    num_late = int(sum(point.value for point in events.Scalars("plan/late")))
    return [before + inside for before, inside in zip(driver, ranks, strict=True)], num_late


if __name__ == "__main__":
    main()
