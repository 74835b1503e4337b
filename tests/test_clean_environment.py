"""The core's tests where there is what images for devices often have: torch 2.11 and transformers 5.17, and neither Ray
nor OmegaConf nor PyAV.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TORCH = "2.11.0"
PACKAGES = ["transformers==5.17.0", "numpy", "numba", "pyarrow", "safetensors", "pyyaml"]
FOR_TESTS = ["pytest>=9", "pytest-timeout", "hypothesis"]
NEEDED_GB = 8
"""The registry's torch brings the libraries of CUDA along: 2.7 GB to fetch and 5 GB installed."""
WHOLE_RUNS = ("tests/train/test_placeholders.py", "tests/train/test_random_plans.py", "tests/planner/test_figures.py")
"""They configure a run, by OmegaConf."""
PARTS = {
    "planner": ["tests/planner"],
    "comm": ["tests/comm", "tests/contracts", "tests/test_compatibility.py"],
    "model": ["tests/model"],
    "train": ["tests/train"],
}


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The interpreter of such an environment, which is removed afterwards: pytest keeps its folders."""
    folder = tmp_path_factory.mktemp("image")
    free = shutil.disk_usage(folder).free
    if free < NEEDED_GB * 10**9:
        pytest.skip(f"{free / 10**9:.1f} GB are free in {folder}; the environment needs {NEEDED_GB}")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    interpreter = str(folder / "bin" / "python")
    try:
        if missing := install(interpreter):
            pytest.skip(f"torch {TORCH} and transformers cannot be installed: {missing}")
        yield interpreter
    finally:
        shutil.rmtree(folder)


def install(python: str) -> str:
    """Install torch, without CUDA where pip is set up to find it so, and the rest; what pip says where it cannot."""
    command = [python, "-m", "pip", "install", "--quiet", "--no-cache-dir", "--no-compile", *PACKAGES, *FOR_TESTS]
    for torch in (f"torch=={TORCH}+cpu", f"torch=={TORCH}"):
        done = subprocess.run([*command, torch], capture_output=True, text=True, timeout=1500, check=False)
        if done.returncode == 0:
            return ""
    return done.stderr.strip().splitlines()[-1]


def run_tests(python: str, paths: Sequence[str]) -> subprocess.CompletedProcess[str]:
    ignored = [argument for path in WHOLE_RUNS for argument in ("--ignore", path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run([python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *ignored, *paths], cwd=ROOT,
                          env=environment, capture_output=True, text=True, timeout=1800, check=False)


@pytest.mark.slow
@pytest.mark.timeout(1900)
def test_the_environment_is_bare(python: str) -> None:
    program = """
import importlib.util, torch, transformers
print(torch.__version__.partition("+")[0], transformers.__version__,
      [name for name in ("ray", "omegaconf", "av", "matplotlib") if importlib.util.find_spec(name)])
"""
    done = subprocess.run([python, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == f"{TORCH} 5.17.0 []\n"


@pytest.mark.slow
@pytest.mark.timeout(1900)
@pytest.mark.parametrize("part", PARTS)
def test_the_core_passes_its_tests(python: str, part: str) -> None:
    done = run_tests(python, PARTS[part])
    assert done.returncode == 0, done.stdout[-4000:]
