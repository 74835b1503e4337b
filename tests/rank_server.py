"""What the server that ranks are forked from imports, once for all of them (`tests/ranks.py`)."""

from __future__ import annotations

import gc
from contextlib import suppress
from importlib import import_module

MODULES = ("torch", "torch.distributed", "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl", "peft",
           "dhp_ray.model.build", "dhp_ray.model.kernels.cpu", "dhp_ray.planner.mode", "dhp_ray.runtime.worker.rank",
           "dhp_ray.runtime.worker.export", "benchmarks.worlds", "tests.async_backend", "pytest",
           "tests.train.random_plans")

gc.disable()  # collections would take a fifth of the time
for module in MODULES:
    with suppress(ImportError):  # the core's tests also run where some are missing: test_clean_environment.py
        import_module(module)
# compiles the patterns of all model types
import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("")
gc.freeze()  # what is imported lives as long as a rank: its collections need not walk through it
gc.enable()
