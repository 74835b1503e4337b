"""Published ratios: what two ways of running the same batch on the same machine take, one over the other.

dynamic CP   packs of a fixed degree over packs of degrees 1, 2 and 4, whichever hold a sequence: the former filled in
             the order that sequences come, the latter our `pow2` in `sync=step`; a step takes a constant besides
encoder      a language model whose encoder runs on a rank of its own over one that runs it itself: the encoder on one
             device, the language model on all TP x PP devices of a rank, one after the other or side by side
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from typing import NamedTuple

import numpy as np

from benchmarks.published_points import shape_of
from dhp_ray.config import CONF
from dhp_ray.planner import ClusterSpec, Sample, plan_batch
from dhp_ray.planner.cost.derived import Device, derived_cost
from dhp_ray.planner.memory.model import MemoryModel, MemorySettings
from dhp_ray.planner.memory.model_shape import ModelShape

DYNAMIC_CP_URL = ("https://github.com/NVIDIA/Megatron-LM/blob/10ce7bc4e5c2176bf1a1abb45214f53398b2a571/examples/"
                  "dynamic_context_parallel/README.md")
DEGREE, RANK_TOKENS = 4, 2048
DYNAMIC_CP = {4: (195.269, 151.906), 8: (220.119, 155.850), 16: (226.775, 187.125), 32: (286.206, 208.088),
              64: (271.988, 181.912)}
"""Milliseconds of a step, trimmed means, by GPUs: fixed degree 4, dynamic degrees; single runs on nodes of four GPUs
that are not named. 12 layers, 2,048 wide; 8 sequences for each four GPUs, lognormal with mean 1,024 and sigma 1.5 in
[128, 8192], 2,048 tokens a rank."""
LAUNCHES = tuple(product((200e-6, 400e-6, 600e-6, 800e-6, 1000e-6), (10e-3, 20e-3, 30e-3, 40e-3)))
"""Seconds of an exchange and of a pack's launches that are tried: with the step's constant, the three numbers that are
fitted on the other rows. The model is so small that launches and the host's work take nearly all of a step."""
SEEDS = 24

ENCODER_URL = ("https://github.com/NVIDIA-NeMo/Megatron-Bridge/blob/22435348381659864f660f56a97aa74ca10b7a92/tutorials/"
               "megatron_mimo/qwen35-vl-non-colocated-sft.md")
ENCODER = {(2048, 32): 0.276, (2048, 64): 0.350, (4096, 32): 0.237, (4096, 64): 0.279}
"""By tokens of a sequence and sequences of a batch, the share of a step's time that is saved, on RDR: an image of 768 x
768 pixels a sample. Of the other sets the sizes of images are not given. Qwen3.5-VL 27B, TP 4, PP 2, DP 2 on H100."""
RANK_DEVICES = 8


class Ratio(NamedTuple):
    """Of times, as published and as predicted."""

    name: str
    published: float
    predicted: float

    @property
    def error(self) -> float:
        return self.predicted / self.published - 1


def dynamic_cp() -> list[Ratio]:
    """Fixed over dynamic degrees, each row by the three numbers that fit the other rows best."""
    found = []
    for left_out, (fixed_ms, dynamic_ms) in DYNAMIC_CP.items():
        rows = [gpus for gpus in DYNAMIC_CP if gpus != left_out]
        _, launches, constant_ms = min(_fit(launches, rows) for launches in LAUNCHES)
        ours = [constant_ms + ms for ms in _steps_ms(left_out, *launches)]
        found.append(Ratio(f"{left_out} GPUs", fixed_ms / dynamic_ms, ours[0] / ours[1]))
    return found


def scatter(ratios: Sequence[Ratio]) -> float:
    """How far the published ratio farthest from a straight line lies, of the line that fits all of them best in the
    order given: no smooth prediction comes nearer to them all."""
    rows, published = np.arange(len(ratios)), np.array([ratio.published for ratio in ratios])
    return float(np.abs(np.polyval(np.polyfit(rows, published, 1), rows) - published).max())


def _fit(launches: tuple[float, float], rows: Sequence[int]) -> tuple[float, tuple[float, float], float]:
    """(error, seconds of an exchange and of a pack's launches, the best constant in ms) over some rows."""
    ours = np.array([_steps_ms(gpus, *launches) for gpus in rows])
    theirs = np.array([DYNAMIC_CP[gpus] for gpus in rows])
    constant = float((theirs - ours).mean())
    return float((((ours + constant) / theirs - 1) ** 2).sum()), launches, constant


@cache
def _steps_ms(gpus: int, exchange_s: float, pack_s: float) -> tuple[float, float]:
    """Milliseconds of a step on H100 with the fixed degree and with dynamic ones, means over batches."""
    device = replace(Device.load(CONF / "device" / "h100.yaml"), message_s=exchange_s)
    shape = shape_of({"count": 12, "width": 2048, "heads": 16, "vocabulary_size": 131072, "like": "mpt"}, 8192)
    memory = MemoryModel(shape, MemorySettings(sync="step", world_size=gpus, precision="bf16", recomputes=False))
    cost = replace(derived_cost(memory, device, 1), pack_s=pack_s, fixed_s=0.0, fixed_s_by_sync={})
    cluster, times = ClusterSpec(gpus, DEGREE, RANK_TOKENS), []
    for seed in range(SEEDS):
        lengths = np.exp(np.log(1024) - 1.5**2 / 2 + 1.5 * np.random.default_rng(seed).standard_normal(2 * gpus))
        lengths = np.clip(lengths, 128, DEGREE * RANK_TOKENS).astype(int)
        group_s = np.zeros(gpus // DEGREE)
        for count, pack in enumerate(packs_in_order(lengths.tolist(), len(group_s))):
            group_s[count % len(group_s)] += cost.pack_time_s(pack, range(DEGREE), cluster)
        samples = [Sample(str(row), int(length)) for row, length in enumerate(lengths)]
        times.append((group_s.max(), plan_batch(samples, cluster, cost, planner="pow2").predicted_time_s))
    fixed_s, dynamic_s = (statistics.fmean(column) for column in zip(*times))
    return 1e3 * fixed_s, 1e3 * dynamic_s


def packs_in_order(lengths: Sequence[int], num_groups: int) -> list[list[int]]:
    """Packs of the fixed degree as the published baseline makes them: each takes sequences as they come until the next
    does not fit; then the last sequence of the last pack that has two becomes a pack, until all groups have as many."""
    packs: list[list[int]] = [[]]
    for length in lengths:
        if sum(packs[-1]) + length > DEGREE * RANK_TOKENS:
            packs.append([])
        packs[-1].append(length)
    last = len(packs) - 1
    while len(packs) % num_groups:
        if len(packs[last]) > 1:
            packs.append([packs[last].pop()])
        else:
            last -= 1
    return packs


def encoder_apart(matrix_flops: float, attention_flops: float, memory_bytes_per_s: float) -> list[Ratio]:
    """With the encoder on a rank of its own over without, at an H100's rates as fitted elsewhere. The language model is
    Qwen3-VL 32B's with as many layers as make 27 B parameters, the encoder its own."""
    device = replace(Device.load(CONF / "device" / "h100.yaml"), matrix_flops=matrix_flops,
                     attention_flops=attention_flops, memory_bytes_per_s=memory_bytes_per_s)
    whole = ModelShape.load(CONF / "model_shape" / "qwen3_vl_32b.yaml")
    layer = whole.language[0]
    count = round((27e9 - 2 * whole.embedding_parameters) / layer.num_parameters)
    shape = replace(whole, language=(replace(layer, count=count),))
    cost = derived_cost(MemoryModel(shape, MemorySettings(sync="step", world_size=2, precision="bf16",
                                                          recomputes=False)), device, 1)
    of_encoder = sum(block.count for block in shape.vision) / shape.num_layers  # of the launches
    encoder_s = float(cost.images_s(np.array([[1, 48, 48]], dtype=np.float64))[0]) + cost.pack_s * of_encoder
    found = []
    for (tokens, batch), saved in ENCODER.items():
        language_s = (cost.linear_s * tokens + cost.quadratic_s * tokens**2) / RANK_DEVICES
        language_s += cost.pack_s * (1 - of_encoder)
        found.append(Ratio(f"{tokens:,} tokens, {batch} sequences", 1 - saved, max(language_s, encoder_s)
                           / (language_s + encoder_s)))
    return found
