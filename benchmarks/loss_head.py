"""The head with its loss, forward and backward, by how many chunks of logits share a product (`model/loss.py`).

    OMP_NUM_THREADS=1 python benchmarks/loss_head.py
    python benchmarks/loss_head.py --device cuda --precision bf16 --vocabulary 151936 --width 3584

All in turns on the same tensors, beside torch's cross entropy over all logits at once. Prints the median time of each
as a ratio of that with one chunk a product, and what it holds in addition to its inputs and gradients.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter, process_time

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.nn.functional as F
from torch import Tensor

from dhp_ray.model.loss import CHUNK_ELEMENTS, CHUNKS_PER_PRODUCT, cross_entropy_sum, valid_tokens

CHUNKS = (1, 2, 4, 8, 16)
TOKENS_OF_A_CHUNK = CHUNK_ELEMENTS // 151_936  # as many as with the vocabulary of Qwen2.5-VL


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="torch device")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--vocabulary", type=int, default=8192, help="rows of the head")
    parser.add_argument("--width", type=int, default=1024, help="columns of the head")
    parser.add_argument("--tokens", type=int, default=16 * TOKENS_OF_A_CHUNK, help="tokens with a label")
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count; a first one does not")
    options = parser.parse_args(words)
    dtype, device = {"fp32": torch.float32, "bf16": torch.bfloat16}[options.precision], torch.device(options.device)
    torch.manual_seed(0)
    hidden = torch.randn(options.tokens, options.width, device=device, dtype=dtype, requires_grad=True)
    weight = torch.randn(options.vocabulary, options.width, device=device, dtype=dtype).mul_(0.02).requires_grad_()
    labels = torch.randint(0, options.vocabulary, (options.tokens,), device=device)
    valid, chunk_elements = valid_tokens(labels), TOKENS_OF_A_CHUNK * options.vocabulary

    def in_chunks(count: int) -> Callable[[], Tensor]:
        return lambda: cross_entropy_sum(hidden, weight, labels, valid, chunk_elements, chunks_per_product=count)

    ways = {str(count): in_chunks(count) for count in CHUNKS}
    ways["all logits, torch"] = lambda: F.cross_entropy((hidden @ weight.T).float(), labels, reduction="sum")
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(options.rounds + 1):
        for name, loss in ways.items():
            hidden.grad = weight.grad = None
            start = time_of(device)
            loss().backward()
            if turn:
                seconds[name].append(time_of(device) - start)
    print(f"{options.precision} on {device}: {options.vocabulary} x {options.width}, {options.tokens} tokens in chunks "
          f"of {TOKENS_OF_A_CHUNK}; {CHUNKS_PER_PRODUCT} chunks a product is the default")
    print("| chunks a product | time | least and most | gradients of logits, MB |\n|---|---|---|---|")
    for name, found in seconds.items():
        ratios = [one / first for one, first in zip(found, seconds["1"])]
        rows = min(options.tokens, int(name) * TOKENS_OF_A_CHUNK if name.isdecimal() else options.tokens)
        print(f"| {name} | {statistics.median(ratios):.3f} | {min(ratios):.3f} to {max(ratios):.3f} | "
              f"{rows * options.vocabulary * dtype.itemsize / 1e6:.0f} |")
    return 0


def time_of(device: torch.device) -> float:
    """Seconds: on a CPU those that this process computed, which other processes change less."""
    if device.type == "cpu":
        return process_time()
    torch.accelerator.synchronize(device)
    return perf_counter()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
