"""Training without Ray: real samples, real plans, and ranks that are processes of this machine, each with the worker's
own `Rank` object.

    corpus_of(config, n)    samples and payloads, read by the data path; patches lie in a file that all ranks map
    plans_of(...)           a plan a step, by the planner
    train_world(...)        the ranks' steps, losses, final parameters
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import pyarrow as pa

from dhp_ray.comm.device import CPU
from dhp_ray.config import CONF, PREPARE_DATA, Config, load
from dhp_ray.data import synthetic
from dhp_ray.data.index import image_root, index_fragments
from dhp_ray.data.order import RowRange, fragment_order
from dhp_ray.data.processor import Processor, ProcessorSpec
from dhp_ray.data.reader import ReadFragments, make_item, read_payloads
from dhp_ray.planner import ClusterSpec, CostModel, Plan, plan_batch
from dhp_ray.planner.plan.types import RankPlan, Sample, encoded_images
from dhp_ray.runtime.messages import Membership
from dhp_ray.runtime.worker.prefetch import decodings, payload_of
from dhp_ray.runtime.worker.rank import Rank
from dhp_ray.train.collate import Payload
from dhp_ray.train.results import StepResult
from dhp_ray.train.step_inputs import collated
from tests.engine_values import full_parameters
from tests.ranks import run_processes


@dataclass
class Corpus:
    """Samples in the order of reading, and their payloads. `patches` is the file of all images' patches; its folder
    goes when the corpus does.
    """

    samples: list[Sample]
    payloads: dict[str, Payload]
    first_patch: dict[str, int]
    patches: Path
    vision_ids: frozenset[int]
    folder: tempfile.TemporaryDirectory[str] | None = field(default=None, repr=False)

    def shared(self) -> Corpus:
        """What is sent to the ranks."""
        return replace(self, folder=None)

    def batches(self, num_steps: int, batch_size: int) -> list[list[Sample]]:
        return [self.samples[step * batch_size : (step + 1) * batch_size] for step in range(num_steps)]

    def masked(self, ids: set[str]) -> Corpus:
        """The same with every label of some samples masked."""
        payloads = {name: replace(payload, labels=np.full_like(payload.labels, -100)) if name in ids else payload
                    for name, payload in self.payloads.items()}
        return replace(self, payloads=payloads)

    def without_images(self, ids: set[str]) -> Corpus:
        """The same with the images of some samples and their tokens taken out."""
        samples, payloads = list(self.samples), dict(self.payloads)
        for row, sample in enumerate(samples):
            if sample.id in ids:
                payload = payloads[sample.id]
                keep = ~np.isin(payload.input_ids, list(self.vision_ids))
                samples[row] = Sample(sample.id, int(keep.sum()))
                payloads[sample.id] = Payload(input_ids=payload.input_ids[keep], labels=payload.labels[keep],
                                              grids=np.zeros((0, 3), np.int64), pixels=[])
        return replace(self, samples=samples, payloads=payloads)

    def rank_payloads(self, plan: RankPlan) -> dict[str, Payload]:
        """Payloads of the samples that a rank needs, with the pixels of the images that it encodes and no others."""
        found = {}
        for pack in (*plan.packs, *plan.encoded):
            for sample, encoded_here in zip(pack.samples, encoded_images(pack, plan.rank)):
                payload, first, pixels = self.payloads[sample.id], self.first_patch[sample.id], []
                for (time, height, width), here in zip(sample.vision_grids, encoded_here):
                    stop = first + time * height * width
                    pixels.append(np.array(self._all_patches()[first:stop]) if here else None)
                    first = stop
                found[sample.id] = replace(payload, pixels=pixels)
        return found

    def _all_patches(self) -> np.ndarray:
        return np.load(self.patches, mmap_mode="r")


def data_overrides(test_data: str, folder: Path, num_rows: int = 854) -> list[str]:
    """The first real conversations from the folder of test data, or the synthetic set (rendered into `folder`) where
    that is not given.
    """
    if test_data:
        nlvr = Path(test_data) / "nlvr"
        rows = json.loads((nlvr / "conversations.json").read_text())[:num_rows]
        (folder / "conversations.json").write_text(json.dumps(rows))
        return ["data=llava", f"data.path={folder / 'conversations.json'}", f"data.image_root={nlvr}"]
    overrides = ["data=synthetic", f"data.path={folder / 'synthetic.parquet'}"]
    config = load([*overrides, f"data.synthetic.num_samples={min(num_rows, 256)}"], PREPARE_DATA)
    synthetic.write(config.data.path, config.data, config.seed)
    return overrides


def corpus_of(config: Config, num_samples: int, max_tokens: int = 0) -> Corpus:
    """The first samples of epoch 0 that have at most `max_tokens` tokens (0: any), in the order of the stream."""
    processor = ProcessorSpec.of(config.model, config.data).load()
    rows = rows_of(config, num_samples, max_tokens)
    folder = tempfile.TemporaryDirectory(prefix="dhp_ray_corpus_")
    path = Path(folder.name) / "patches.npy"
    samples, payloads, first_patch, place = [], {}, {}, 0
    patches = [np.zeros((0, processor.family.patch_dim), np.float32)]
    for row in rows:
        sample = Sample(row["id"], row["text_tokens"], row["vision_tokens"],
                        tuple((int(t), int(h), int(w)) for t, h, w in row["grids"]))
        samples.append(sample)
        payload = payload_of(row, [decode() for decode in decodings(row, [True] * len(sample.vision_grids), processor)])
        patches += [pixels for pixels in payload.pixels if pixels is not None]
        payloads[sample.id] = replace(payload, pixels=[None] * len(sample.vision_grids))
        first_patch[sample.id] = place
        place += sum(time * height * width for time, height, width in sample.vision_grids)
    np.save(path, np.concatenate(patches))
    return Corpus(samples, payloads, first_patch, path, _vision_ids(processor), folder)


def rows_of(config: Config, num_samples: int, max_tokens: int = 0) -> list[dict[str, Any]]:
    """Rows as the reading stage makes them, images encoded as stored; see `corpus_of`."""
    fragments = index_fragments(config.data)
    reader = ReadFragments(ProcessorSpec.of(config.model, config.data), image_root(config.data), config.seed)
    rows: list[dict[str, Any]] = []
    for position, number in enumerate(fragment_order(config.seed, 0, len(fragments)).tolist()):
        item = make_item(0, [(RowRange(position, 0, fragments[number].num_rows), number, fragments[number])])
        block = pa.concat_tables(reader(pa.Table.from_pylist([item])))
        texts, visions = block["text_tokens"].to_pylist(), block["vision_tokens"].to_pylist()
        lengths = [text + vision for text, vision in zip(texts, visions)]
        kept = [row for row, length in enumerate(lengths) if length and not 0 < max_tokens < length]
        rows += read_payloads(block, kept)
        if len(rows) >= num_samples:
            return rows[:num_samples]
    raise ValueError(f"{config.data.path}: {len(rows)} usable samples; {num_samples} are needed")


def _vision_ids(processor: Processor) -> frozenset[int]:
    return frozenset(processor.token_ids[name] for name in ("image", "vision_start", "vision_end"))


def plans_of(
    batches: Sequence[Sequence[Sample]], num_ranks: int, planner: str, sync: str, tokens_per_rank: int = 0,
    encoder: str = "group",
) -> list[Plan]:
    """A plan a batch. By default the longest sample of all just fits on all ranks together."""
    longest = max(sample.num_tokens for batch in batches for sample in batch)
    cluster = ClusterSpec(num_ranks, num_ranks, tokens_per_rank or -(-longest // num_ranks))
    cost = CostModel.load(CONF / "cost" / "cpu.yaml")
    return [plan_batch(batch, cluster, cost, planner=planner, sync=sync, encoder=encoder) for batch in batches]


@dataclass
class Outcome:
    """What a world's training came to. `steps` are rank 0's reports, whose sums are those of all ranks."""

    steps: list[StepResult]
    parameters: dict[str, np.ndarray]
    pools: list[dict[str, int]]
    seconds: float

    @property
    def losses(self) -> list[float]:
        return [step.loss_sum / step.num_valid_tokens if step.num_valid_tokens else 0.0 for step in self.steps]


def train_world(
    config: Config, plans: Sequence[Plan], corpus: Corpus, num_ranks: int, timeout_s: float = 300.0
) -> Outcome:
    """One step a plan on `num_ranks` processes, from the weights of `config.seed`."""
    begin = perf_counter()
    results = run_processes(_train, num_ranks, num_ranks, config, list(plans), corpus.shared(), timeout_s=timeout_s)
    steps, parameters, _ = results[0]
    return Outcome(steps, parameters, [pool for _, _, pool in results], perf_counter() - begin)


def _train(rank: int, port: int, num_ranks: int, config: Config, plans: list[Plan],
           corpus: Corpus) -> tuple[list[StepResult], dict[str, np.ndarray], dict[str, int]]:
    member = Rank(config, Membership(rank, num_ranks, 1, "127.0.0.1", port), CPU)
    steps = []
    for step, plan in enumerate(plans, 1):
        rank_plan = plan.rank_plan(step, rank)
        inputs = collated(rank_plan, corpus.rank_payloads(rank_plan), member.adapter, config.train.precision)
        steps.append(member.stepper.run(inputs, member.learning_rate_factor(step, len(plans))))
    parameters = {name: tensor.numpy() for name, tensor in full_parameters(member.engine).items()}
    pool = member.stepper.transport.counters()
    member.close()
    return steps, parameters, pool
