"""Fits the constants of conf/cost/cpu.yaml to measured packs: `python benchmarks/cost.py [out=FILE]`.

One rank runs forward and backward of packs of the tiny preset, of known lengths and images; the constants are the
non-negative least squares of relative error. Two gloo ranks then pass messages of several sizes around (latency and
bandwidth) and make process groups. Prints measured against predicted, and writes the cost file where `out=` says so.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

USAGE = "usage: python benchmarks/cost.py [out=FILE]"
TEXT = [(64,), (256,), (1024,), (2048,), (4096,), (64,) * 8, (128,) * 16, (512,) * 4, (1500, 300, 64, 64)]
IMAGES = [(1, (1, 8, 28)), (8, (1, 8, 28)), (2, (1, 16, 16)), (1, (1, 32, 32)), (4, (1, 32, 32)), (1, (1, 64, 64))]
MESSAGE_BYTES = [2**12, 2**16, 2**20, 2**22]
REPEATS = 7


def pack_seconds(parts: list[list[Any]]) -> float:
    """Median seconds of forward and backward of one pack on one rank."""
    from dhp_ray.comm.pack_communicator import PackCommunicator
    from dhp_ray.train.collate import collate
    from dhp_ray.train.pack import pack_loss
    from tests.packs import make_pack, make_sample

    made = [make_sample(f"s{number}", sample) for number, sample in enumerate(parts)]
    pack, payloads = make_pack(0, [0], [sample for sample, _ in made]), {sample.id: payload for sample, payload in made}
    times = []
    for _ in range(REPEATS):
        begin = perf_counter()
        loss = pack_loss(adapter(), collate(pack, payloads, 0, adapter()), PackCommunicator([0], 0, None))
        loss.backward()  # type: ignore[no-untyped-call]
        times.append(perf_counter() - begin)
    return median(times[1:])


_ADAPTER: list[Any] = []


def adapter() -> Any:
    from tests.packs import rough_model

    if not _ADAPTER:
        _ADAPTER.append(rough_model())
    return _ADAPTER[0]


def features(parts: list[list[Any]]) -> list[float]:
    """quadratic, linear, vision quadratic, vision linear, pack: what multiplies each constant."""
    lengths = [sum(part if isinstance(part, int) else part[1] * part[2] // 4 + 2 for part in sample)
               for sample in parts]
    patches = [part[1] * part[2] for sample in parts for part in sample if not isinstance(part, int)]
    return [sum(n * n for n in lengths), sum(lengths), sum(p * p for p in patches), sum(patches), 1.0]


def non_negative_fit(rows: list[list[float]], times: list[float]) -> list[float]:
    """Least squares of relative error; a constant that would be negative is left out."""
    import numpy as np

    matrix, kept = np.array(rows) / np.array(times)[:, None], list(range(len(rows[0])))
    while True:
        found = np.linalg.lstsq(matrix[:, kept], np.ones(len(times)), rcond=None)[0]
        if (found >= 0).all():
            values = np.zeros(len(rows[0]))
            values[kept] = found
            return [float(value) for value in values]
        del kept[int(found.argmin())]


def message_seconds(rank: int) -> list[float]:
    """Median seconds to pass a message to the right and take one from the left, by size."""
    import torch
    import torch.distributed as dist

    from dhp_ray.comm.pack_communicator import PackCommunicator

    link, found = PackCommunicator([0, 1], rank, dist.group.WORLD), []
    for size in MESSAGE_BYTES:
        here, there, times = torch.zeros(size // 4), torch.empty(size // 4), []
        for _ in range(40):
            begin = perf_counter()
            link.exchange([(here, 1 - rank)], [(there, 1 - rank)]).wait()
            times.append(perf_counter() - begin)
        found.append(median(times[5:]))
    return found


def group_seconds(rank: int) -> float:
    """Median seconds to make a process group of two ranks, with its first exchange."""
    from datetime import timedelta

    from dhp_ray.comm.transport import GroupPool

    times = []
    for _ in range(REPEATS):
        pool = GroupPool(1, timedelta(seconds=30))
        begin = perf_counter()
        pool.prepare([(0, 1)])
        times.append(perf_counter() - begin)
        pool.clear()
    return median(times)


def update_seconds() -> float:
    """Median seconds of the optimizer's update of one rank."""
    from dhp_ray.train.flat_engine import FlatEngine
    from dhp_ray.train.state.optimizer import OptimizerSettings

    settings = OptimizerSettings(lambda name: 1e-3, adapter().decays, 0.01, (0.9, 0.95), 1e-8, 1.0)
    engine = FlatEngine(adapter().module, settings, None, 1, 0)
    times = []
    for _ in range(REPEATS):
        begin = perf_counter()
        engine.zero_gradients()
        engine.update(1)
        times.append(perf_counter() - begin)
    return median(times[1:])


def main(argv: list[str]) -> int:
    if "--help" in argv or "-h" in argv:
        print(f"{__doc__}\n{USAGE}")
        return 0
    options = dict(word.partition("=")[::2] for word in argv)
    if set(options) - {"out"}:
        print(f"error: {sorted(set(options) - {'out'})[0]}: not understood; {USAGE}", file=sys.stderr)
        return 2

    import numpy as np
    import torch

    from tests.ranks import run_ranks

    torch.set_num_threads(1)
    packs: list[list[list[Any]]] = [[[length] for length in lengths] for lengths in TEXT]
    packs += [[[20, *[grid] * count, 20]] for count, grid in IMAGES]
    times = []
    for number, parts in enumerate(packs, 1):
        times.append(pack_seconds(parts))
        print(
            f"pack {number}/{len(packs)}: {features(parts)[1]:.0f} tokens, {features(parts)[3]:.0f} patches, "
            f"{1e3 * times[-1]:.1f} ms",
            flush=True,
        )
    names = ["quadratic_s", "linear_s", "vision_quadratic_s", "vision_linear_s", "pack_s"]
    constants = dict(zip(names, non_negative_fit([features(parts) for parts in packs], times)))
    errors = [abs(sum(value * feature for value, feature in zip(constants.values(), features(parts))) / time - 1)
              for parts, time in zip(packs, times)]

    text = adapter().module.config.text_config
    # of a ring step: keys and values forward, again backward, and their gradients
    exchanges = 3 * text.num_hidden_layers
    key_value_bytes = 2 * 4 * text.num_key_value_heads * text.hidden_size // text.num_attention_heads
    seconds = run_ranks(message_seconds, 2)[0]
    bandwidth, latency = np.polyfit(MESSAGE_BYTES, seconds, 1)
    constants |= {"comm_bytes_per_token": float(exchanges * key_value_bytes),
                  "latency_s": exchanges * max(float(latency), min(seconds)),
                  "group_s": run_ranks(group_seconds, 2)[0], "fixed_s": update_seconds()}
    lines = [f"{name}: {value:.4g}" for name, value in constants.items()]
    rate = 1 / float(bandwidth)
    lines += [f"bandwidth_bytes_per_s: {{intra: {rate:.4g}, inter: {rate:.4g}}}"]
    print("\n".join(lines))
    print(f"relative error of the fit: median {100 * median(errors):.0f} %, worst {100 * max(errors):.0f} %")
    if out := options.get("out"):
        head = [
            "# The tiny preset on one core a rank, gloo on one machine, forward and backward in fp32. Fitted by "
            "benchmarks/cost.py to measured packs.",
            "name: cpu_tiny",
            "communication: ring",
            "overlap: 0.0           # gloo's threads share the cores with the kernels",
            "memory_bytes_per_token: 40000   # rough",
            "resident_bytes: 8.0e+6",
        ]
        Path(out).write_text("\n".join([*head, *lines]) + "\n")
        print(f"written: {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
