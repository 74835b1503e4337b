"""The core runs where there is little beside torch: what it imports, seen from its source."""

from __future__ import annotations

import sys

import grimp
import pytest

CORE = ("planner", "comm", "model", "train", "compatibility")
ALLOWED = {"torch", "transformers", "numpy", "numba", "msgspec", "pyarrow", "safetensors", "yaml"}
DEVICES = {"torch_npu", "liger_kernel", "fla", "triton", "cuda"}
"""Imported only on the device that it is for."""


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    return grimp.build_graph("dhp_ray", include_external_packages=True, cache_dir=None)


@pytest.mark.parametrize("part", CORE)
def test_the_core_imports_little(graph: grimp.ImportGraph, part: str) -> None:
    """Directly or by way of other modules of dhp_ray, at the top of a module or in a function."""
    module = f"dhp_ray.{part}"
    imported = graph.find_upstream_modules(module, as_package=True)
    packages = {name for name in imported if name.partition(".")[0] != "dhp_ray"}
    beyond = packages - ALLOWED - DEVICES - set(sys.stdlib_module_names)
    chains = {name: graph.find_shortest_chain(module, name, as_packages=True) for name in sorted(beyond)}
    assert chains == {}


def test_an_import_beyond_is_seen(graph: grimp.ImportGraph) -> None:
    with_config = graph.find_upstream_modules("dhp_ray.config")
    assert "omegaconf" in with_config
