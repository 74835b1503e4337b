"""ByteScale's curve of activation offload (arXiv 2502.21231, figure 21), each row over the first: what a share of
activations in host memory, or recomputation, saves of a device's memory and costs in time.

What is saved follows from the model's shape, what is added in time from the device's link to host memory and from the
share of compute that the forward pass has. The first row's seconds and bytes are given, the others are predicted from
these; nothing is fitted.
"""

from __future__ import annotations

from typing import NamedTuple

from benchmarks.published_ratios import Ratio
from dhp_ray.config import CONF
from dhp_ray.planner import ClusterSpec
from dhp_ray.planner.cost.derived import Device, derived_cost
from dhp_ray.planner.cost.rates import waits_s
from dhp_ray.planner.memory.model import MemoryModel, MemorySettings, PackLoad
from dhp_ray.planner.memory.model_shape import LayerShape, ModelShape

OFFLOAD_URL = "https://arxiv.org/abs/2502.21231"

LLAMA_7B = ModelShape(
    family="llama", vocabulary_size=32000, tied=False, language_rest=4096,
    language=(LayerShape(count=32, width=4096, mlp_width=11008, heads=32, key_value_heads=32, head_width=128,
                         num_parameters=4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096, layer_norms=True),))
"""LLaMA-7B (arXiv 2302.13971, table 2). `layer_norms`: fused norms keep their input in the computing type, as in the
trainer that the figure is of; those of transformers keep fp32."""


class Row(NamedTuple):
    """A row of the figure: the share that is moved, whether layers are computed again, gigabytes and seconds."""

    share: float
    recomputes: bool
    gigabytes: float
    seconds: float

    def __str__(self) -> str:
        return "recomputation" if self.recomputes else f"share {self.share}"


FIGURE_21 = (Row(0.0, False, 59, 5.08), Row(0.5, False, 40, 5.08), Row(1.0, False, 27, 6.49), Row(0.0, True, 27, 6.70))
TOKENS, RANKS, DEVICE = 65_536, 8, "a800"
"""Of the figure's sequence; and the ranks that it is taken to run on: half of the layers' activations of so many tokens
a rank are the 19 GB that share 0.5 saves. The figure names neither its layout nor its devices."""


def predicted(row: Row) -> Row:
    """A row, from the first one's seconds and bytes."""
    device, first, tokens = Device.load(CONF / "device" / f"{DEVICE}.yaml"), FIGURE_21[0], TOKENS // RANKS
    plain, memory = (MemoryModel(LLAMA_7B, MemorySettings(sync="micro_batch", world_size=RANKS, precision="bf16",
                                                          recomputes=again)) for again in (False, row.recomputes))
    costs, load = [derived_cost(each, device, 1) for each in (plain, memory)], PackLoad(tokens, 0, tokens, 0, 1, RANKS)
    held_bytes = [max(sum(terms.values()) for name, terms in each.moments(load._replace(offload=share)).items()
                      if name.startswith("language")) for each, share in ((plain, 0.0), (memory, row.share))]
    packs_s = [cost.pack_time_s([TOKENS], range(RANKS), ClusterSpec(RANKS, RANKS, tokens)) for cost in costs]
    compute_s = first.seconds * packs_s[1] / packs_s[0]
    copied_s = memory.moved_bytes(load._replace(offload=row.share)) / device.host_bytes_per_s
    return Row(row.share, row.recomputes, first.gigabytes - (held_bytes[0] - held_bytes[1]) / 1e9,
               compute_s + waits_s(compute_s, copied_s, costs[1].forward))


def offload_curve() -> list[Ratio]:
    """Seconds and gigabytes of every row but the first, over the first's."""
    first, found = FIGURE_21[0], []
    for row in FIGURE_21[1:]:
        ours = predicted(row)
        found += [Ratio(f"{row}, time", row.seconds / first.seconds, ours.seconds / first.seconds),
                  Ratio(f"{row}, memory", row.gigabytes / first.gigabytes, ours.gigabytes / first.gigabytes)]
    return found
