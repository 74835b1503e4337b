"""A step of one rank beside what a user of plain transformers would write. `python benchmarks/plain_loop.py`

Both train the preset `small` on the same batches, from the same weights, with two threads and in fp32, and take turns:

    ours    the packs that `dhp` plans for one rank, collated, then run as a worker runs them
    loop    model(...).loss.backward() for one sample after the other, unpadded, then clipping and torch's AdamW

Batches are real conversations with images where DHP_RAY_TEST_DATA names the folder of test data, else synthetic ones.
Making tensors of decoded samples counts on both sides. Exit status 1: ours takes over 1.03 of the loop's time in the
median of the same step, or the losses of the first step differ by more than 1e-4.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path
from time import perf_counter

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from benchmarks.device_parts.workload import OwnStep  # noqa: E402
from benchmarks.worlds import Corpus, corpus_of, data_overrides, plans_of  # noqa: E402
from dhp_ray.config import load  # noqa: E402
from dhp_ray.model.presets import preset_config  # noqa: E402
from dhp_ray.planner.plan.types import Plan, RankPlan, Sample  # noqa: E402
from dhp_ray.train.collate import Payload  # noqa: E402
from dhp_ray.train.step_inputs import collated  # noqa: E402
from tests.packs import TOKEN_IDS, make_pack, plain_copy, plain_loss  # noqa: E402

MOST, LOSS_ERROR = 1.03, 1e-4


class Loop:
    """Plain transformers with its own attention (SDPA), one sample after the other."""

    def __init__(self, own: OwnStep) -> None:
        self.module = plain_copy(own.adapter).train()
        parameters = dict(self.module.named_parameters())
        groups: list[dict[str, object]] = [
            {"params": [parameters[name] for name in parameters if own.adapter.decays(name) == decays],
             "weight_decay": 0.1 * decays} for decays in (True, False)]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-5, betas=(0.9, 0.95), eps=1e-6)

    def run(self, payloads: list[Payload]) -> float:
        """One step; the mean loss of a token."""
        valid = sum(int((payload.labels[1:] != -100).sum()) for payload in payloads)
        total = 0.0
        for payload in payloads:
            mean, count = plain_loss(self.module, payload)
            if count:
                loss = mean * (count / valid)
                loss.backward()
                total += loss.item()
        torch.nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10, help="steps that count, each way; a first one does not")
    parser.add_argument("--samples", type=int, default=24, help="samples of a step")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    num_steps = options.steps + 1
    with tempfile.TemporaryDirectory(prefix="dhp_ray_loop_") as folder:
        config = load([*data_overrides(os.environ.get("DHP_RAY_TEST_DATA", ""), Path(folder)), "model=small"])
        corpus = corpus_of(config, num_steps * options.samples)
        batches = corpus.batches(num_steps, options.samples)
        plans = plans_of(batches, 1, "dhp", "step")
        own = OwnStep(preset_config("small", TOKEN_IDS), torch.device("cpu"), "fp32", recomputes=False)  # type: ignore[arg-type]
        loop = Loop(own)
        print(f"{options.samples} samples a step, {options.threads} threads, 1 rank; seconds of a step: ours/loop",
              flush=True)
        ours_s: list[float] = []
        loop_s: list[float] = []
        for step, (batch, plan) in enumerate(zip(batches, plans)):
            # the way that begins changes, so that a drift of the machine falls on both
            for kind in ("ours", "loop") if step % 2 else ("loop", "ours"):
                if kind == "ours":
                    loss, seconds = ours(own, plan, corpus)
                    ours_s.append(seconds)
                else:
                    expected, seconds = plain(loop, batch, corpus)
                    loop_s.append(seconds)
            if not step:
                error = abs(loss / expected - 1.0)
            print(f"{len(plan.groups)} pack{'s' * (len(plan.groups) > 1)}, "
                  f"{sum(sample.num_tokens for sample in batch)} tokens: {ours_s[-1]:.2f}/{loop_s[-1]:.2f}, loss "
                  f"{loss:.5f}/{expected:.5f}", flush=True)
    ratio = statistics.median(mine / theirs for mine, theirs in zip(ours_s[1:], loop_s[1:]))
    print(f"ours {sum(ours_s[1:]):.1f} s, loop {sum(loop_s[1:]):.1f} s; of the same step {ratio:.3f} (median), at most "
          f"{MOST}; losses of the first step differ by {error:.0e}")
    passed = ratio <= MOST and error <= LOSS_ERROR
    print("ok  " if passed else "FAIL", "plain loop")
    return int(not passed)


def ours(own: OwnStep, plan: Plan, corpus: Corpus) -> tuple[float, float]:
    """Mean loss and seconds."""
    rank_plan = plan.rank_plan(1, 0)
    payloads = corpus.rank_payloads(rank_plan)
    begun = perf_counter()
    loss = own.run_inputs(collated(rank_plan, payloads, own.adapter))
    return loss, perf_counter() - begun


def plain(loop: Loop, batch: list[Sample], corpus: Corpus) -> tuple[float, float]:
    """Mean loss and seconds."""
    payloads = corpus.rank_payloads(RankPlan(1, 0, (), (make_pack(0, [0], batch),)))
    begun = perf_counter()
    loss = loop.run([payloads[sample.id] for sample in batch])
    return loss, perf_counter() - begun


if __name__ == "__main__":
    sys.exit(main())
