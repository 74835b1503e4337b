"""Published ratios: what two ways of running the same batch on the same machine take, one over the other.

dynamic CP   packs of a fixed degree over packs of degrees 1, 2 and 4, whichever hold a sequence: our `static` layout of
             that degree, and `pow2`, in `sync=step`, under a constant that every step takes besides
encoder      a language model whose encoder runs on a rank of its own over one that runs it itself: the encoder on one
             device, the language model on all TP x PP devices of a rank, one after the other or side by side
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import numpy as np

from benchmarks.published_points import shape_of
from dhp_ray.config import CONF
from dhp_ray.planner import ClusterSpec, Sample, checked_problem, plan_batch, plan_uniform
from dhp_ray.planner.baselines.static import Layout
from dhp_ray.planner.derived_cost import Device, derived_cost
from dhp_ray.planner.memory import MemoryModel
from dhp_ray.planner.memory_terms import MemorySettings
from dhp_ray.planner.model_shape import ModelShape

DYNAMIC_CP_URL = ("https://github.com/NVIDIA/Megatron-LM/blob/10ce7bc4e5c2176bf1a1abb45214f53398b2a571/examples/"
                  "dynamic_context_parallel/README.md")
DYNAMIC_CP = {4: (195.269, 151.906), 8: (220.119, 155.850), 16: (226.775, 187.125), 32: (286.206, 208.088),
              64: (271.988, 181.912)}
"""Milliseconds of a step, trimmed means, by GPUs: fixed degree 4, dynamic degrees; single runs on nodes of four GPUs
that are not named. 12 layers, 2,048 wide; 8 sequences for each four GPUs, lognormal with mean 1,024 and sigma 1.5 in
[128, 8192], 2,048 tokens a rank."""
EXCHANGE_S = (20e-6, 200e-6, 400e-6, 600e-6, 1000e-6)
"""Seconds of an exchange that are tried: fitted beside the step's constant, on the other rows. The model is so small
that launches and the host's work take nearly all of a step."""
SEEDS = 12

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
    """Fixed over dynamic degrees, each row by the exchange's seconds and the constant that fit the other rows best."""
    found = []
    for left_out, (fixed_ms, dynamic_ms) in DYNAMIC_CP.items():
        rows = [gpus for gpus in DYNAMIC_CP if gpus != left_out]
        _, exchange_s, constant_ms = min(_fit(exchange_s, rows) for exchange_s in EXCHANGE_S)
        ours = [constant_ms + ms for ms in _steps_ms(exchange_s, left_out)]
        found.append(Ratio(f"{left_out} GPUs", fixed_ms / dynamic_ms, ours[0] / ours[1]))
    return found


def _fit(exchange_s: float, rows: Sequence[int]) -> tuple[float, float, float]:
    """(error, the exchange's seconds, the best constant in ms) over some rows."""
    ours = np.array([_steps_ms(exchange_s, gpus) for gpus in rows])
    theirs = np.array([DYNAMIC_CP[gpus] for gpus in rows])
    constant = float((theirs - ours).mean())
    return float((((ours + constant) / theirs - 1) ** 2).sum()), exchange_s, constant


@cache
def _steps_ms(exchange_s: float, gpus: int) -> tuple[float, float]:
    """Milliseconds of a step on H100 with the fixed degree and with dynamic ones, means over batches."""
    device = replace(Device.load(CONF / "device" / "h100.yaml"), message_s=exchange_s)
    shape = shape_of({"count": 12, "width": 2048, "heads": 16, "vocabulary_size": 131072, "like": "mpt"}, 8192)
    memory = MemoryModel(shape, MemorySettings(sync="step", world_size=gpus, precision="bf16", recomputes=False))
    cost, cluster = derived_cost(memory, device, 1), ClusterSpec(gpus, 4, 2048)
    cost = replace(cost, fixed_s=0.0, fixed_s_by_sync={})  # in the constant
    times = []
    for seed in range(SEEDS):
        lengths = np.exp(np.log(1024) - 1.5**2 / 2 + 1.5 * np.random.default_rng(seed).standard_normal(2 * gpus))
        samples = [Sample(str(row), int(length)) for row, length in enumerate(np.clip(lengths, 128, 8192))]
        fixed = plan_uniform(checked_problem(samples, cluster, cost), Layout(4, 2048))
        dynamic = plan_batch(samples, cluster, cost, planner="pow2")
        times.append((fixed.predicted_time_s, dynamic.predicted_time_s))
    fixed_s, dynamic_s = (statistics.fmean(column) for column in zip(*times))
    return 1e3 * fixed_s, 1e3 * dynamic_s


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
