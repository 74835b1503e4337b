"""What one device shows of the whole: seven parts, each in a process of its own, in ten minutes at most.

    python benchmarks/device.py                            a CUDA device where there is one, else the CPU
    python benchmarks/device.py device=cpu preset=tiny     all that a CPU can show; figures say nothing about speed
    python benchmarks/device.py parts=attention,step out=runs/device-2

A bare checkout is enough: torch, transformers, numpy, and what the core needs (numba, pyarrow, safetensors, PyYAML);
pytest for tests and conformance. Nothing needs to be installed.

    tests              the gpu-marked tests
    attention          ring attention at degree 1 beside plain flash attention, and its share of the matrix rate
    step               a bf16 step of Qwen2.5-VL with random weights beside plain transformers with FSDP2
    synchronisations   reads of the device between a step's start and its totals, by source line
    parity             degrees 2 to 4 on ranks that share the device, against one rank in fp32
    abort              a blocked read beside a control thread; a wait whose peer never comes, ended
    nccl               pool, ring, kill and every engine's step over real NCCL, by ranks that share a device

    torchrun --nproc-per-node 8 benchmarks/device.py world      several devices, in ten minutes as well; a CPU with
                                                                 preset=tiny groups=20

    degrees            a pack at degrees 1 to 8, against one rank in fp32
    engines            steps with `sync=step` and with FSDP2 (`sync=micro_batch`), against one rank
    messages           latency and bandwidth of a gather of all ranks, and of a ring
    ring               ring attention with its exchange, without it, and the exchange alone: the share that is hidden
    groups             process groups of all ranks made and dropped: seconds, files, threads and memory left
    killed, stopped    the last rank is; the others' waits end by the abort
    speed              tokens/s of a real shape, planned by `dhp` in both modes, and in a static layout

A part that fails or hangs does not keep the others from running. Each writes OUT/NAME.json (command, device, versions,
figures, or its error in one line), OUT/NAME.md (its table) and OUT/NAME.log (all that it printed). Exit status 1 when
a part failed.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.device_parts.settings import DEFAULTS, WORLD_LIMITS_S, Settings, SettingsError  # noqa: E402


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", metavar="[world] key=value",
                        help="; ".join(f"{key}={default}: {meaning}" for key, (default, meaning) in DEFAULTS.items()))
    given = parser.parse_args(argv).settings
    in_world = given[:1] == ["world"]
    try:
        if in_world and "RANK" not in os.environ:
            raise SettingsError("world: needs torchrun; allowed: python -m torch.distributed.run --nproc-per-node 8 "
                                "benchmarks/device.py world")
        settings = Settings.of(given[1:], WORLD_LIMITS_S) if in_world else Settings.of(given)
        if lack := settings.lack():
            raise SettingsError(f"device: got cuda, but {lack}; allowed here: cpu, auto")
        if in_world:
            from benchmarks.device_parts.torchrun import Together

            together = Together(settings)
    except SettingsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2

    from benchmarks.device_parts.processes import run_parts, summary

    tells = not in_world or os.environ["RANK"] == "0"  # alone: torchrun would end it as soon as another rank failed
    if not tells:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    command = ["torchrun" if in_world else "python", "benchmarks/device.py", *argv]
    records = run_parts(settings, command, together.run_part if in_world else None)
    print(summary(settings, records))
    return 1 if tells and any(record["status"] == "failed" for record in records) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
