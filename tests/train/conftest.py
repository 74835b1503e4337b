"""What tests of any plans hold ranks against."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.packs import plain_copy, plain_gradients, rough_model, save_model


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of each family with rough weights, and the gradients of every sample by plain transformers."""
    from tests.train.random_plans import SAMPLES  # which needs more than the core: test_clean_environment.py

    folder = tmp_path_factory.mktemp("reference")
    for preset, samples in SAMPLES.items():
        adapter = rough_model(preset=preset)
        plain = plain_copy(adapter)
        save_model(adapter, folder / preset / "model",
                   {name: parameter.detach() for name, parameter in adapter.module.named_parameters()})
        torch.save({sample.id: plain_gradients(plain, [payload]) for sample, payload in samples},
                   folder / preset / "gradients")
    return folder
