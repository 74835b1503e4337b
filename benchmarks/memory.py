"""Which model fits which devices: tokens of a pack that a rank holds beside its state, by the memory model.

    python benchmarks/memory.py

In bf16, with recomputation, nothing frozen, images as large as `data.max_pixels` allows by default, packs of vision
tokens throughout (which need most), 90 % of the device's memory, process groups as a run keeps them.
A device of 64 GiB is reckoned as an NPU, one of 80 GiB as a GPU: their attention kernels differ in what they take.
Modelled: none of these devices has been measured.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dhp_ray.comm.device import ACCELERATORS
from dhp_ray.data.families import FAMILIES
from dhp_ray.planner.cost.model import SYNCS
from dhp_ray.planner.memory.model import MemoryModel, MemorySettings
from dhp_ray.planner.mode import MEMORY_SHARE
from dhp_ray.schema import Data
from tests.published_configs import TEXT, shape_of

MODELS = {f"Qwen2.5-VL-{name}": name for name in TEXT} | {
    name: name for name in ("Qwen3-VL-4B", "Qwen3-VL-8B", "Qwen3-VL-32B", "InternVL3-8B", "InternVL3-38B")}
DEVICES = {64: "npu", 80: "cuda"}
NUM_DEVICES = (4, 8, 16, 32, 64, 128)


@cache
def tokens_per_rank(name: str, gibibytes: int, num_devices: int, sync: str) -> int:
    """Tokens of a pack on one of so many ranks, each on a device of its own; 0: not even the state fits."""
    device, memory_bytes = ACCELERATORS[DEVICES[gibibytes]], gibibytes * 2**30
    shape, pixels = shape_of(name), Data().max_pixels
    largest = FAMILIES[shape.family].largest_image_tokens(pixels, pixels, shape.token_pixels)
    settings = MemorySettings(sync=sync, world_size=num_devices, precision="bf16", recomputes=True, device=device.name,
                              largest_image=largest, communicators_bytes=device.group_bytes + device.world_bytes)
    memory = MemoryModel(shape, settings).with_image_limit(MEMORY_SHARE * memory_bytes, largest)
    return memory.tokens_that_fit(MEMORY_SHARE * memory_bytes)


def cell(name: str, gibibytes: int, num_devices: int) -> str:
    """Tokens a rank in each mode, to two digits."""
    found = [tokens_per_rank(MODELS[name], gibibytes, num_devices, sync) for sync in SYNCS]
    return " / ".join(f"{float(f'{tokens:.2g}'):,.0f}" if tokens else "no" for tokens in found)


def row(name: str, gibibytes: int) -> str:
    return f"| {name}, {gibibytes} GiB | {' | '.join(cell(name, gibibytes, count) for count in NUM_DEVICES)} |"


def table() -> str:
    """The table of docs/memory.md."""
    head = f"| model, device | {' | '.join(f'{count} devices' for count in NUM_DEVICES)} |"
    rows = [row(name, gibibytes) for name in MODELS for gibibytes in DEVICES]
    return "\n".join([head, "|" + "---|" * (len(NUM_DEVICES) + 1), *rows])


def main(words: Sequence[str]) -> int:
    if {"-h", "--help"} & set(words):
        print(__doc__)
        return 0
    if words:
        print(f"memory.py: {words[0]}: takes nothing", file=sys.stderr)
        return 2
    print(table())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
