"""Activations in host memory (train.activation_offload), modelled: what the planner makes of it, and a sequence of 2M
tokens on 1,024 ranks, planned and simulated, of which one rank's share is traced. (ByteScale's own curve is a part of
benchmarks/published.py.)

    python benchmarks/offload.py plans       batches with it and without
    python benchmarks/offload.py sequence    2,097,152 tokens in one sequence

Nothing here has run on a device. The trace runs the model's layers on fake tensors, as tests/planner/test_memory.py
does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import geometric_mean
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dhp_ray.config import CONF
from dhp_ray.planner import ClusterSpec, Sample, plan_batch
from dhp_ray.planner.cost.derived import Device
from dhp_ray.planner.memory.model_shape import ModelShape
from dhp_ray.planner.plan.cluster import NO_OFFLOAD, regular_nodes
from dhp_ray.planner.problem import problem_of
from dhp_ray.simulate.step import simulate_step
from dhp_ray.simulate.training import Ranks, Training, Wanted, training_of
from tests.memory_trace import fake_world, traced
from tests.published_configs import published_config

RANKS_PER_NODE, NODE_BYTES = 8, 2 * 2**40
"""Of a node: its ranks, and its memory (NVIDIA DGX H100 datasheet: 2 TB)."""


class Case(NamedTuple):
    """A model, in a mode, on so many devices: names of files of conf/model_shape and conf/device."""

    model: str
    device: str
    kind: str
    gibibytes: int
    sync: str
    num_ranks: int
    recomputes: bool

    def __str__(self) -> str:
        return f"{self.model}, {self.num_ranks} {self.device}, {self.sync}{', recomputation' * self.recomputes}"

    def training(self) -> Training:
        """What a run decides there with `train.activation_offload=auto`."""
        ranks = Ranks(device=Device.load(CONF / "device" / f"{self.device}.yaml"), kind=self.kind,
                      memory_bytes=self.gibibytes * 2**30, nodes=regular_nodes(self.num_ranks, RANKS_PER_NODE),
                      node_memory_bytes=NODE_BYTES)
        wanted = Wanted(sync=self.sync, recomputes=str(self.recomputes).lower(), activation_offload="auto",
                        mirror_every_steps="1")
        return training_of(ModelShape.load(CONF / "model_shape" / f"{self.model}.yaml"), ranks, wanted)

    def cluster(self, training: Training, offload: bool, joins: bool = False) -> ClusterSpec:
        """`joins`: also sequences that are packed together may have as many tokens as one."""
        return ClusterSpec(self.num_ranks, RANKS_PER_NODE, training.most_tokens if joins else training.tokens_per_rank,
                           offload=training.offload if offload else NO_OFFLOAD)


def mixed(count: int, longest: int, seed: int, long_share: float = 0.05) -> list[Sample]:
    """Some 700 tokens each, or by a share some 40,000, `longest` at most."""
    draw = np.random.default_rng(seed)
    is_long = draw.random(count) < long_share
    lengths = np.where(is_long, np.exp(draw.normal(10.6, 0.6, count)), np.exp(draw.normal(6.6, 0.7, count)))
    return [Sample(str(row), int(length)) for row, length in enumerate(np.clip(lengths, 64, longest))]


QWEN_7B = ("qwen2_5_vl_7b", "h100", "cuda", 80)
CASES = [Case(*QWEN_7B, "micro_batch", 64, False), Case(*QWEN_7B, "micro_batch", 8, True),
         Case(*QWEN_7B, "step", 32, True), Case("qwen2_5_vl_32b", "h100", "cuda", 80, "micro_batch", 32, True),
         Case("qwen2_5_vl_7b", "ascend_910b", "npu", 64, "micro_batch", 16, True),
         Case("internvl3_8b", "ascend_910b", "npu", 64, "step", 64, True)]
MIXES, SEEDS, LONGEST = ((512, 0.05), (64, 0.5)), range(3), 131_072
"""Sequences of a batch, and the share of long ones."""


def plans() -> None:
    """Batches that fit without, planned with nothing moved, by the planner's choice, and with packs of several
    sequences as large as one of a single sequence may be."""
    print("| model, devices, mode | sequences, long | tokens a rank | at most | packs moved | largest share | "
          "degrees up to | off, s | auto | joined too |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for case in CASES:
        found = case.training()
        for count, long_share in MIXES:
            longest = min(LONGEST, case.num_ranks * found.tokens_per_rank)
            batches = [mixed(count, longest, seed, long_share) for seed in SEEDS]
            off, auto, joined = ([plan_batch(batch, case.cluster(found, *moved), found.cost, sync=case.sync)
                                  for batch in batches] for moved in ((False,), (True,), (True, True)))
            shares = [group.offload for plan in auto for group in plan.groups if group.offload]
            over = [geometric_mean(plan.predicted_time_s / plain.predicted_time_s for plan, plain in zip(way, off))
                    for way in (auto, joined)]
            degrees = [max(max(plan.degrees()) for plan in way) for way in (off, auto)]
            print(f"| {case} | {count}, {long_share:.0%} | {found.tokens_per_rank:,} | {found.most_tokens:,} | "
                  f"{len(shares)} of {sum(len(plan.groups) for plan in auto)} | {max(shares, default=0.0):.2f} | "
                  f"{degrees[0]}, {degrees[1]} | {geometric_mean(plan.predicted_time_s for plan in off):.2f} | "
                  f"{over[0]:.3f} | {over[1]:.3f} |")


LONG = 2**21
SEQUENCE = Case("qwen3_vl_32b", "h100", "cuda", 80, "micro_batch", 1024, False)


def sequence() -> None:
    """One sequence of 2M tokens beside 1,000 of the mix above. Without recomputation 1,024 ranks hold it in no other
    way; with it fewer ranks do. The steps are simulated, and of the former plan one rank's share is traced."""
    for case in (SEQUENCE, SEQUENCE._replace(recomputes=True)):
        found = case.training()
        cluster = case.cluster(found, True)
        samples = [Sample("long", LONG), *mixed(1000, LONGEST, 0)]
        plan = plan_batch(samples, cluster, found.cost, sync=case.sync)
        [group] = [group for group in plan.groups if 0 in group.pack.sequences]
        print(f"{case}: a rank holds {found.tokens_per_rank:,} tokens, up to {found.most_tokens:,} with activations in "
              "host memory")
        print(f"    planned: {LONG:,} tokens on {group.degree} ranks, {LONG / group.degree:,.0f} each, share "
              f"{group.offload:.3f}: {group.predicted_time_s:.1f} s, of the plan's {plan.predicted_time_s:.1f} s; "
              f"planned in {plan.planning_time_s:.2f} s")
        step = simulate_step(plan, problem_of(samples, cluster, found.cost, case.sync))
        shares = ", ".join(f"{name} {100 * share:.0f} %" for name, share in step.shares().items())
        print(f"    simulated: {step.time_s:.1f} s; of the ranks' time {shares}; a device holds "
              f"{step.memory_bytes().max() / 1e9:.1f} GB at most")
        if group.offload:
            traced_share(found, group.offload, -(-LONG // group.degree))


def traced_share(found: Training, share: float, tokens: int) -> None:
    """Peak memory of one of the ranks, predicted and traced, on the device and in host memory. What a pack adds is the
    same on two ranks as on many, and among as many ranks as there are in all: the trace is of a pack of two, among 64.
    """
    image, tokens_of_image = (1, 32, 32), 32 * 32 // 4 + 1  # and one of text behind it
    count, settings = 2 * tokens // tokens_of_image, replace(found.memory.settings, world_size=64)
    with fake_world(settings.world_size):
        got = traced(published_config("Qwen3-VL-32B"), [(2 * tokens - count * tokens_of_image, [image] * count)],
                     settings, 2, share=share)
    for name, predicted, bytes_ in (
            ("on the device beside its state", sum(found.memory.memory(got.load).pack.values()), got.pack_bytes),
            ("in host memory", found.memory.moved_bytes(got.load), got.host_bytes)):
        print(f"    traced: one rank's {got.load.tokens:,} tokens and {got.load.patches:,} patches take, {name}, "
              f"{bytes_ / 1e9:.2f} GB; predicted {predicted / 1e9:.2f} ({100 * (predicted / bytes_ - 1):+.1f} %)")


PARTS: dict[str, Callable[[], None]] = {"plans": plans, "sequence": sequence}


def main(words: Sequence[str]) -> int:
    if not words or {"-h", "--help"} & set(words):
        print(__doc__)
        return 0 if words else 2
    if unknown := [word for word in words if word not in PARTS]:
        print(f"offload.py: {unknown[0]}: no such part; allowed: {', '.join(PARTS)}", file=sys.stderr)
        return 2
    for word in words:
        PARTS[word]()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
