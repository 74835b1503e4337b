"""Counts of a Qwen2.5-VL 7B with `sync=step` in bf16, on fake tensors over the operators of CUDA; no device is needed.

    python benchmarks/counts.py             the tables of benchmarks/README.md
    python benchmarks/counts.py operators   every operator of a layer and of the rest of a pack: how often, MB moved

A layer of the language model, and a pack of 8,192 tokens of text, not the first of its step, forward and backward:
operators launched (each may be several kernels; views and allocations are none), bytes of their inputs and outputs, and
bytes kept for the backward pass. All layers of a pack are as its second one. `fused`: norms, rotations and SwiGLU are
one operator each (Liger). And the end of a step on so many ranks: its update and its gather of parameters.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch.distributed as dist

from dhp_ray.model.build import meta_model
from dhp_ray.train.flat_engine import FlatEngine
from dhp_ray.train.pack import pack_loss
from dhp_ray.train.state.optimizer import OptimizerSettings
from tests.memory_trace import SilentLink, fake_world, make_inputs, memory_trace
from tests.operator_trace import FusedOperators, OperatorTrace
from tests.published_configs import published_config, stored_shape

MODEL, SEQUENCES, RANKS = "7B", (4096, 2048, 1024, 1024), (8, 64, 512)
CASES = [(fused, degree, level) for fused, levels in ((True, ("false", "selective", "true")), (False, ("false",)))
         for degree in (1, 2) for level in levels]


class Counts(NamedTuple):
    """Of a pack on one rank, forward and backward, and what it keeps in between."""

    forward: OperatorTrace
    backward: OperatorTrace
    kept_bytes: int

    def numbers(self) -> list[float]:
        """Operators, GB moved, both forward and backward; GB kept."""
        passes = (self.forward, self.backward)
        return [*(each.launched.total() for each in passes), *(each.moved_bytes.total() / 1e9 for each in passes),
                self.kept_bytes / 1e9]


def engine_of(adapter: Any, world: dist.ProcessGroup | None = None, ranks: int = 1) -> FlatEngine:
    adapter.module.to_empty(device="cpu")
    return FlatEngine(adapter.module, OptimizerSettings(lambda name: 1e-5, adapter.decays, 0.1, (0.9, 0.95), 1e-8, 1.0),
                      world, ranks, 0, "bf16")


@cache
def pack_counts(layers: int, level: str = "false", degree: int = 1, fused: bool = True) -> Counts:
    """Of the first of `degree` ranks, with so many layers and a level of `train.activation_checkpointing`."""
    adapter = meta_model(published_config(MODEL, layers))
    inputs, _ = make_inputs([(length, []) for length in SEQUENCES], adapter, degree)
    if fused:
        adapter.fuse(FusedOperators())
    if level != "false":
        adapter.set_activation_checkpointing(keeps_attention=level == "selective")
    forward, backward = OperatorTrace(), OperatorTrace()
    with memory_trace() as trace:
        engine = engine_of(adapter)
        before_bytes = trace.live_bytes
        with forward:
            loss = pack_loss(adapter, inputs, SilentLink(degree))
        kept_bytes = trace.live_bytes - before_bytes
        with backward:
            loss.backward()
        engine.release()
    return Counts(forward, backward, kept_bytes)


def end_of_step(ranks: int) -> tuple[OperatorTrace, int]:
    """What rank 0 runs, and the bytes that it takes for that."""
    adapter, found = meta_model(published_config(MODEL)), OperatorTrace()
    with fake_world(ranks), memory_trace() as trace:
        engine = engine_of(adapter, dist.group.WORLD, ranks)
        before_bytes = trace.live_bytes
        trace.begin()
        with found:
            engine.update(1)
        taken_bytes = trace.peak_bytes - before_bytes
        engine.release()
    return found, taken_bytes


def rows() -> list[str]:
    """The tables of benchmarks/README.md."""
    more = stored_shape(MODEL).language[0].count - 1
    found = ["| operators | ranks | recomputed | a layer: operators | GB moved | GB kept | the pack: operators "
             "| GB moved | GB kept |", "|" + "---|" * 9]
    for fused, degree, level in CASES:
        one, two = (pack_counts(layers, level, degree, fused).numbers() for layers in (1, 2))
        layer = [second - first for first, second in zip(one, two)]
        pack = [first + more * each for first, each in zip(one, layer)]
        cells = [f"{a:,.0f} + {b:,.0f} | {c:,.1f} + {d:,.1f} | {kept:,.2f}" for a, b, c, d, kept in (layer, pack)]
        found.append(f"| {'fused' if fused else 'own'} | {degree} | {level} | {' | '.join(cells)} |")
    found += ["", "| ranks | exchanges at the end of a step | other operators | GB moved by these | MB taken |",
              "|" + "---|" * 5]
    for ranks in RANKS:
        trace, taken_bytes = end_of_step(ranks)
        exchanges, sent = trace.launched["c10d"], trace.moved_bytes["c10d"]
        found.append(f"| {ranks} | {exchanges} | {trace.launched.total() - exchanges:,} | "
                     f"{(trace.moved_bytes.total() - sent) / 1e9:.1f} | {taken_bytes / 1e6:,.0f} |")
    return found


def operators() -> list[str]:
    found = []
    for fused, degree, level in CASES:
        one, two = (pack_counts(layers, level, degree, fused) for layers in (1, 2))
        for name, few, many in (("forward", one.forward, two.forward), ("backward", one.backward, two.backward)):
            found.append(f"{'fused' if fused else 'own'}, {degree} ranks, {level}, {name}")
            for operator, total in many.launched.items():
                count, moved = total - few.launched[operator], many.moved_bytes[operator] - few.moved_bytes[operator]
                found.append(f"    {operator:28} {count:4} {moved / 1e6:9,.1f}    {few.launched[operator] - count:4} "
                             f"{(few.moved_bytes[operator] - moved) / 1e6:9,.1f}")
    return found


def main(words: Sequence[str]) -> int:
    if {"-h", "--help"} & set(words):
        print(__doc__)
        return 0
    if list(words) not in ([], ["operators"]):
        print(f"counts.py: {' '.join(words)}: takes nothing, or operators", file=sys.stderr)
        return 2
    print("\n".join(operators() if words else rows()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
