"""A whole step, forward to update, beside plain transformers with FSDP2 on the same batch and from the same weights;
where Liger is installed also with its fused operators, which a run uses then.

Both recompute activations. The share of the matrix rate counts what the model needs and no recomputation:
6 FLOPs a parameter and token (a parameter of the encoder's blocks: and patch), 12 H D a pair of attention.
"""

from __future__ import annotations

import gc
import math
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from transformers import Qwen2_5_VLConfig

from benchmarks.device_parts.plain import PlainStep
from benchmarks.device_parts.record import CheckError, Record
from benchmarks.device_parts.settings import Settings
from benchmarks.device_parts.timing import matrix_rate, timed
from benchmarks.device_parts.workload import BATCHES, Batch, OwnStep, batch_of, choose_preset, config_of
from dhp_ray.model.families.qwen2_5_vl import Qwen25VL
from dhp_ray.model.fused import operators_of
from tests.engine_values import resident_bytes

NUM_TIMED = {"cuda": 2, "cpu": 1}
LARGEST_LOSS_ERROR = {"fp32": 1e-4, "bf16": 2e-2}
"""Of the first step of each batch, before whose weights both have done the same."""
MISSING = "activations, logits of a chunk, gradients of a layer and what the allocator cannot use"
"""What is in the memory reserved and not in `resident_bytes`: nothing predicts that of one pack yet."""


class Run(NamedTuple):
    """Losses of all steps; the median of the timed ones' seconds; bytes: reserved at most, allocated between steps
    (None on the CPU).
    """

    losses: list[float]
    step_s: float
    reserved_bytes: int | None
    between_bytes: int | None


def run(settings: Settings, record: Record) -> str:
    device = torch.device(settings.device)
    preset = choose_preset(settings.preset, device)
    precision = "fp32" if device.type == "cpu" else "bf16"
    config = config_of(preset)
    rate = matrix_rate(device)
    batches = {f"{name}, {'text and images' if images else 'text'}": batch_of(lengths, device, images)
               for name, lengths in BATCHES[device.type].items() for images in (False, True)}
    ours: dict[str, Run] = {}
    theirs: dict[str, Run] = {}
    kinds: dict[str, tuple[Callable[..., OwnStep | PlainStep], dict[str, Run]]] = {"own": (OwnStep, ours)}
    if fused := operators_of(device.type):
        kinds["own, fused"] = partial(OwnStep, fused=fused), {}
    kinds["plain"] = PlainStep, theirs
    counts = sizes_of(config)
    predicted = resident_bytes(counts.total, 1, precision)
    record.tree |= {"preset": preset, "precision": precision, "num_parameters": counts.total,
                    "matrix_rate_tflops": rate / 1e12, "predicted_resident_bytes": predicted,
                    "missing_from_prediction": MISSING}
    record.table(["batch", "step of", "tokens/s", "share of matrix rate", "loss", "reserved GB", "between steps GB",
                  "resident_bytes GB"])
    for kind, (make, found) in kinds.items():
        step = make(config, device, precision, recomputes=True)
        own_bytes = predicted if kind in ("own", "own, fused") else None
        record.tree[f"{kind}_attention"] = getattr(step, "attention", "dhp_ring")
        for name, batch in batches.items():
            result = measured(step, batch, device)
            if isinstance(result, str):
                record.row(f"{name}, {kind}", {"error": result}, [name, kind, result, *[""] * 5])
                continue
            found[name] = result
            num_tokens = sum(sample.num_tokens for sample, _ in batch)
            share = flops_of(config, counts, batch) / result.step_s / rate
            record.row(f"{name}, {kind}", {
                "tokens": num_tokens, "step_s": result.step_s, "tokens_per_s": num_tokens / result.step_s,
                "share_of_matrix_rate": share, "losses": result.losses, "max_memory_reserved": result.reserved_bytes,
                "memory_between_steps": result.between_bytes, "predicted_resident_bytes": own_bytes},
                [name, kind, f"{num_tokens / result.step_s:,.0f}", f"{share:.2f}", f"{result.losses[0]:.4f}",
                 *(f"{number / 1e9:.2f}" if number else "-" for number in (result.reserved_bytes, result.between_bytes,
                                                                          own_bytes))])
        step.release()
        del step
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    both = [name for name in ours if name in theirs]
    if not ours:
        raise CheckError("no batch ran; see the rows")
    # later batches begin from weights that as many updates on the same batches have made: alike where all have run
    compared = both if set(both) == set(batches) else both[:1]
    errors = {name: abs(ours[name].losses[0] / theirs[name].losses[0] - 1.0) for name in compared}
    record.tree["loss_errors"] = errors
    wrong = [f"{name} {error:.1e}" for name, error in errors.items() if not error < LARGEST_LOSS_ERROR[precision]]
    if wrong:
        raise CheckError(f"loss differs from plain transformers': {', '.join(wrong)}; allowed: below "
                         f"{LARGEST_LOSS_ERROR[precision]}")
    of = f"{preset}, {counts.total / 1e9:.3g} billion parameters, {precision}"
    if not both:
        return f"{of}: plain ran no batch"
    alike = f"losses within {max(errors.values(), default=0.0):.0e} of plain's"
    if device.type == "cpu":
        return f"{of}: {alike}"  # its times tell nothing of a device's
    ratios = [theirs[name].step_s / ours[name].step_s for name in both]
    reserved = max(run.reserved_bytes or 0 for run in ours.values())
    return (f"{of}: {min(ratios):.2f} to {max(ratios):.2f} times plain's tokens/s, {alike}; reserved at most "
            f"{reserved / 1e9:.1f} GB, of them resident_bytes {predicted / 1e9:.1f}; the rest are {MISSING}")


def measured(step: OwnStep | PlainStep, batch: Batch, device: torch.device) -> Run | str:
    """One step to get ready, then those that count; what was too large for the device, in words."""
    losses: list[float] = []
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        losses.append(step.run(batch))
        step_s = statistics.median(timed(lambda: losses.append(step.run(batch)), device)
                                   for _ in range(NUM_TIMED[device.type]))
    except torch.OutOfMemoryError:
        gc.collect()
        return "out of memory"
    if device.type == "cpu":
        return Run(losses, step_s, None, None)
    return Run(losses, step_s, torch.cuda.max_memory_reserved(), torch.cuda.memory_allocated())


class Sizes(NamedTuple):
    """Parameters: all; of matrices that work on every token, every patch, every vision token."""

    total: int
    language: int
    vision: int
    merger: int


def sizes_of(config: Qwen2_5_VLConfig) -> Sizes:
    with torch.device("meta"):
        module: Any = Qwen25VL.model_class(config)

    def matrices(part: Any) -> int:
        return sum(parameter.numel() for parameter in part.parameters() if parameter.ndim > 1)

    visual = module.model.visual
    merger = matrices(visual.merger)
    return Sizes(sum(parameter.numel() for parameter in module.parameters()),
                 matrices(module.model.language_model.layers) + module.lm_head.weight.numel(),
                 matrices(visual) - merger, merger)


def flops_of(config: Qwen2_5_VLConfig, sizes: Sizes, batch: Batch) -> float:
    """Of forward and backward."""
    text: Any = config.text_config
    vision: Any = config.vision_config
    full = len(vision.fullatt_block_indexes)
    window = (vision.window_size // vision.patch_size) ** 2
    total = 0.0
    for sample, _ in batch:
        tokens, patches = sample.num_tokens, sum(math.prod(grid) for grid in sample.vision_grids)
        total += 6.0 * (sizes.language * tokens + sizes.vision * patches + sizes.merger * sample.vision_tokens)
        total += 12.0 * text.num_hidden_layers * text.hidden_size * tokens * (tokens + 1) / 2
        for time, height, width in sample.vision_grids:
            image = height * width
            seen = full * image + (vision.depth - full) * min(window, image)  # by a patch, over all layers
            total += 12.0 * vision.hidden_size * time * image * seen
    return total
