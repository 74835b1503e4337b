"""The names of the files in a run's folder: all code that writes or reads one takes its name from here."""

from __future__ import annotations

import re

CONFIG_FILE, CLUSTER_FILE = "config.yaml", "cluster.json"
METRICS_FILE, LEDGER_FILE, SKIPPED_FILE, EVENTS_FILE = "metrics.jsonl", "ledger.jsonl", "skipped.jsonl", "events.jsonl"
COST_FILE, COST_PICTURE = "cost.yaml", "cost.png"  # what planner.cost=measure has found
PLANS_FOLDER, TRACES_FOLDER, CHECKPOINTS_FOLDER = "plans", "trace", "checkpoints"
TENSORBOARD_FOLDER, MODEL_FOLDER, EXPORTS_FOLDER = "tensorboard", "model", "exports"
LEASE_FOLDER = "lease"  # which process writes into the folder
MANIFEST_FILE = "manifest.json"  # a file in the folder of a checkpoint, which is whole once it has one

WRITTEN = (CONFIG_FILE, CLUSTER_FILE, METRICS_FILE, LEDGER_FILE, SKIPPED_FILE, EVENTS_FILE, COST_FILE, COST_PICTURE,
           PLANS_FOLDER, TRACES_FOLDER, CHECKPOINTS_FOLDER, TENSORBOARD_FOLDER, MODEL_FOLDER, EXPORTS_FOLDER,
           LEASE_FOLDER)
"""All that a run, or an export of it, writes into its folder."""


def plan_file(step: int) -> str:
    return f"{PLANS_FOLDER}/step_{step:06d}.json"


def trace_file(step: int) -> str:
    """What the ranks did in a step, for Perfetto."""
    return f"{TRACES_FOLDER}/step_{step:06d}.json"


def step_folder(step: int) -> str:
    return f"step_{step:06d}"


def checkpoint_folder(step: int) -> str:
    return f"{CHECKPOINTS_FOLDER}/{step_folder(step)}"


def tensors_folder(step: int, generation: int) -> str:
    """The tensors of a checkpoint; generation 0 stands for files from before each generation had its own folder."""
    return checkpoint_folder(step) + (f"/generation_{generation}" if generation else "")


def step_of(name: str, ending: str = "") -> int | None:
    """The step that a file or folder of one step belongs to, by its name alone; None if it belongs to no step."""
    match = re.fullmatch(rf"step_(\d+){re.escape(ending)}", name)
    return int(match[1]) if match else None
