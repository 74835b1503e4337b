"""Reads of the device between a step's start and its totals: each makes the host wait for what it has given the device
so far, so that it cannot run ahead.

The model is the preset tiny, on one rank, over text and images; with recomputation, which runs each layer twice.
"""

from __future__ import annotations

from collections import Counter

import torch

from benchmarks.device_parts.reads import Place, counted
from benchmarks.device_parts.record import Record
from benchmarks.device_parts.settings import Settings
from benchmarks.device_parts.workload import BATCHES, Batch, OwnStep, batch_of, config_of


def run(settings: Settings, record: Record) -> str:
    device = torch.device(settings.device)
    lengths = next(iter(BATCHES[device.type].values()))
    record.table(["batch", "reads", "what", "source line", "called from"])
    totals = {}
    step = OwnStep(config_of("tiny"), device, "fp32" if device.type == "cpu" else "bf16", recomputes=True)
    for name, with_images in (("text", False), ("text and images", True)):
        batch = batch_of(lengths, device, with_images)
        step.run(batch)  # what happens once does not count
        found = reads_of(step, batch, device)
        totals[name] = found.total()
        record.row(f"{name}, all", {"reads": found.total()}, [name, str(found.total()), "all", "", ""])
        for place, count in found.most_common():
            record.row(f"{name}, {place.what} at {place.line} from {place.led_there}",
                       {"reads": count, **place._asdict()},
                       ["", str(count), place.what, place.line, place.led_there])
    step.release()
    return ", ".join(f"{count} reads ({name})" for name, count in totals.items())


def reads_of(step: OwnStep, batch: Batch, device: torch.device) -> Counter[Place]:
    """Of one step, up to where its totals are read."""
    before_totals: Counter[Place] = Counter()
    inputs = step.inputs_of(batch)
    with counted(device) as found:
        step.step.before_update = lambda: before_totals.update(found)  # called after the last pack
        step.run_inputs(inputs)
    step.step.before_update = lambda: None
    return before_totals
