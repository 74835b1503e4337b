"""What tests of any plans hold ranks against."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.packs import plain_copy, plain_gradients, rough_model, save_model


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Of a preset, the folder of a model with rough weights and of the gradients of every sample by plain transformers;
    made once it is asked for.
    """
    from tests.train.random_plans import SAMPLES  # which needs more than the core: test_clean_environment.py

    @cache
    def folder_of(preset: str) -> Path:
        folder, adapter = tmp_path_factory.mktemp(preset), rough_model(preset=preset)
        plain = plain_copy(adapter)
        save_model(adapter, folder / "model",
                   {name: parameter.detach() for name, parameter in adapter.module.named_parameters()})
        torch.save({sample.id: plain_gradients(plain, [payload]) for sample, payload in SAMPLES[preset]},
                   folder / "gradients")
        return folder

    return folder_of
