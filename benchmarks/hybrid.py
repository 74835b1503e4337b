"""Models of gated delta nets and attention (Qwen3.5) in long packs. `python benchmarks/hybrid.py [PART ...]`

bytes     what a rank sends in a layer, forward and backward: keys and values with their gradients go round a ring, of
          states there are as many at any length. By the cost model; tests/model/test_delta_rule.py counts them
cpu       CPU seconds of the preset tiny_qwen3_5 on one sequence of 8,192 tokens, by two ranks together and by one, in
          turns. Exit status 1: the median of the ratios is over 1.2
million   one sequence of 2^20 tokens on 64 ranks, four layers: a rank's peak memory by a trace of the real code over
          tensors without memory, beside the memory model's. `jobs/simulate.py` plans and simulates it
"""

from __future__ import annotations

import statistics
import sys
import time
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dhp_ray.comm.device import CPU
from dhp_ray.comm.transport import Transport
from dhp_ray.planner.cost.derived import ring_bytes_per_token, state_bytes
from dhp_ray.planner.memory.model import MemoryModel, MemorySettings
from dhp_ray.train.collate import collate
from dhp_ray.train.pack import pack_loss
from tests.memory_trace import fake_world, traced
from tests.packs import make_pack, make_sample, rough_model
from tests.published_configs import published_config, shape_of
from tests.ranks import run_ranks

MODEL, RANKS = "Qwen3.5-9B", 64
PRESET, NUM_TOKENS, ROUNDS, MOST, TIMEOUT = "tiny_qwen3_5", 8192, 8, 1.2, timedelta(seconds=1200)
SETTINGS = MemorySettings(sync="micro_batch", world_size=RANKS, precision="bf16", recomputes=True, keeps_attention=True)


def bytes_of_layers() -> None:
    print(f"\n{MODEL}: MB that a rank sends in a layer, forward and backward\n")
    print("| ranks | states | keys and values of 2^14 tokens | 2^17 | 2^20 |\n|" + "---|" * 5)
    memory = MemoryModel(shape_of(MODEL), SETTINGS)
    states, attention = memory.shape.language
    for degree in (2, 8, RANKS):
        others = (degree - 1) * state_bytes(memory) / states.count
        ring = [(degree - 1) / degree * tokens * ring_bytes_per_token(memory) / attention.count
                for tokens in (2**14, 2**17, 2**20)]
        print(f"| {degree} | " + " | ".join(f"{count / 1e6:,.0f}" for count in (others, *ring)) + " |")


def rounds_on(rank: int) -> list[tuple[float, float]]:
    """This rank's CPU seconds of a pass over the whole sequence, and of its part of one by both, in every round."""
    transport = Transport("parent", rank, 2, CPU, 0, TIMEOUT)
    adapter = rough_model(preset=PRESET)
    sample, payload = make_sample("long", [NUM_TOKENS], preset=PRESET)

    def seconds(ranks: tuple[int, ...]) -> float:
        link = transport.link(ranks, 0)
        inputs = collate(make_pack(0, ranks, [sample]), {sample.id: payload}, rank, adapter)
        begin = time.process_time()
        pack_loss(adapter, inputs, link).backward()
        return time.process_time() - begin

    return [(seconds((rank,)), seconds((0, 1))) for _ in range(ROUNDS)]


def cpu() -> bool:
    mine, others = run_ranks(rounds_on, 2, timeout_s=TIMEOUT.total_seconds())
    ratios = [2 * (part + other_part) / (whole + other_whole)
              for (whole, part), (other_whole, other_part) in zip(mine[1:], others[1:])]  # the first round warms up
    print(f"\n{PRESET}, {NUM_TOKENS:,} tokens: CPU time by two ranks over that by one, median of {len(ratios)}: "
          f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")
    return statistics.median(ratios) <= MOST


def million() -> None:
    with fake_world(RANKS):
        found = traced(published_config(MODEL, 4), [(2**20, ())], SETTINGS, RANKS)
    model = MemoryModel(shape_of(MODEL, 4), SETTINGS).memory(found.load)
    print(f"\n{MODEL}, four layers: a sequence of 2^20 tokens on {RANKS} ranks adds {found.pack_bytes / 1e9:.2f} GB on "
          f"one of them (memory model: {sum(model.pack.values()) / 1e9:.2f})")


def main() -> int:
    parts = sys.argv[1:] or ["bytes", "million", "cpu"]
    if "bytes" in parts:
        bytes_of_layers()
    if "million" in parts:
        million()
    return 0 if "cpu" not in parts or cpu() else 1


if __name__ == "__main__":
    sys.exit(main())
