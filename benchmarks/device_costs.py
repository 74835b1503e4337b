"""What the planner predicts of the steps that device.py measures: its derived costs, and its memory model.

    python benchmarks/device_costs.py             on an H200
    python benchmarks/device_costs.py a100        on another device of conf/device

One rank, bf16, every layer recomputed; no device is needed. A step is one pack and the update; norms, rotations and
SwiGLU are those of transformers, or fused (Liger).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks.device_parts.workload import BATCHES, batch_of, config_of
from dhp_ray.model.build import meta_model
from dhp_ray.planner.cost.derived import Device, derived_cost
from dhp_ray.planner.memory.model import MemoryModel, MemorySettings, PackLoad

DEVICES = Path(__file__).resolve().parent.parent / "conf" / "device"


def main(words: Sequence[str]) -> int:
    known = sorted(path.stem for path in DEVICES.glob("*.yaml"))
    if {"-h", "--help"} & set(words):
        print(__doc__)
        return 0
    if len(words) > 1 or not set(words) <= set(known):
        print(f"device_costs.py: {' '.join(words)}: takes one of {', '.join(known)}", file=sys.stderr)
        return 2
    memory = MemoryModel(meta_model(config_of("3b")).shape,
                         MemorySettings(world_size=1, precision="bf16", sync="step", recomputes=True))
    device = Device.load(DEVICES / f"{(*words, 'h200')[0]}.yaml")
    print("| batch | operators | s | of them attention | the rest of the language model | encoder | pack, GB |\n|"
          + "---|" * 7)
    for name, lengths in BATCHES["cuda"].items():
        for contents, with_images in (("text", False), ("text and images", True)):
            samples = [sample for sample, _ in batch_of(lengths, torch.device("cuda"), with_images)]
            grids = [grid for sample in samples for grid in sample.vision_grids]
            tokens, patches = sum(sample.num_tokens for sample in samples), sum(map(math.prod, grids))
            pack = memory.memory(PackLoad(tokens, patches=patches, sequences=len(samples))).pack
            for operators in ("own", "fused"):
                cost = derived_cost(memory, device, 1, operators == "fused")
                attention = cost.quadratic_s * sum(sample.num_tokens**2 for sample in samples)
                language = cost.linear_s * tokens
                encoder = (cost.vision_linear_s * patches
                           + cost.vision_quadratic_s * sum(time * (rows * width)**2 for time, rows, width in grids))
                print(f"| {name}, {contents} | {operators} | "
                      f"{attention + language + encoder + cost.pack_s + cost.fixed_s:.2f} | {attention:.2f} | "
                      f"{language:.2f} | {encoder:.2f} | {sum(pack.values()) / 1e9:.1f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
