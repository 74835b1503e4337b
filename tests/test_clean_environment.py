"""The core where there is what images for devices often have: torch 2.11 and transformers 5.17, and neither Ray nor
OmegaConf nor PyAV.
"""

from __future__ import annotations

import ast
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkout import ROOT

TORCH, TRANSFORMERS = "2.11.0", "5.17.0"
PACKAGES = [f"transformers=={TRANSFORMERS}", "numpy", "numba", "msgspec", "pyarrow", "safetensors", "pyyaml"]
FOR_TESTS = ["pytest>=9", "pytest-timeout", "hypothesis", "peft>=0.19"]
NEEDED_GB = 8
"""With CUDA's libraries, which the registry's torch brings along: 2.7 GB to fetch, and 5 GB installed."""
INSTALL_S, COMMAND_S, TEST_S = 1500, 1800, 1900
"""A test ends before the process that runs it does: faulthandler_timeout in pyproject.toml."""
NEED_MORE = ["tests/train/test_placeholders.py", "tests/train/test_random_plans.py",
             "tests/train/test_random_plans_apart.py", "tests/train/test_greedy.py", "tests/train/test_lora_plans.py",
             "tests/train/test_balance_losses.py", "tests/train/test_expert_parallel.py",
             "tests/train/state/test_failed_saves.py", "tests/train/test_unused_parts.py",
             "tests/train/test_activation_offload_plans.py", "tests/train/test_layer_recomputation.py",
             "tests/model/test_merge.py", "tests/model/test_build.py", "tests/planner/test_figures.py",
             "tests/planner/test_plan_job.py"]
"""They configure a run, by OmegaConf, evaluate a model, which reads images, or draw, by matplotlib."""
HIDDEN = ("ray", "omegaconf", "av", "matplotlib", "PIL")
PYTEST = ["-m", "pytest", "-q", "-p", "no:cacheprovider", *(f"--ignore={path}" for path in NEED_MORE)]
COMMANDS = {
    "planner": [*PYTEST, "tests/planner"],
    "comm": [*PYTEST, "tests/comm", "tests/contracts", "tests/test_compatibility.py"],
    "model": [*PYTEST, "tests/model"],
    "train": [*PYTEST, "tests/train", "--ignore=tests/train/state"],
    "state": [*PYTEST, "tests/train/state"],
    "device": [*PYTEST, "tests/test_device_benchmark.py"],
}
"""What the environment's interpreter runs at the root of the repository; each command must end with 0."""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The interpreter of such an environment, which is removed afterwards: pytest keeps its folders."""
    folder = tmp_path_factory.mktemp("clean")
    free = shutil.disk_usage(folder).free
    if free < NEEDED_GB * 10**9:
        pytest.skip(f"{free / 10**9:.1f} GB are free in {folder}; the environment needs {NEEDED_GB}")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    interpreter = str(folder / "bin" / "python")
    try:
        if missing := install(interpreter):
            pytest.skip(f"torch {TORCH} and transformers {TRANSFORMERS} cannot be installed: {missing}")
        yield interpreter
    finally:
        shutil.rmtree(folder)


def install(python: str) -> str:
    """Install torch, without CUDA where pip is set up to find it so, and the rest; what pip says where it cannot."""
    command = [python, "-m", "pip", "install", "--quiet", "--no-cache-dir", "--no-compile", *PACKAGES, *FOR_TESTS]
    said = ""
    for torch in (f"torch=={TORCH}+cpu", f"torch=={TORCH}"):
        try:
            subprocess.run([*command, torch], capture_output=True, text=True, timeout=INSTALL_S, check=True)
            return ""
        except subprocess.TimeoutExpired:
            return f"pip is not done after {INSTALL_S} s"
        except subprocess.CalledProcessError as error:
            said = error.stderr.strip().rpartition("\n")[2]
    return said


def failure(python: str, arguments: list[str]) -> str:
    """Run a command in the environment; empty where it ends with 0, otherwise what it is and the end of its output."""
    command = [python, *arguments]
    try:
        done = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True, timeout=COMMAND_S, check=False)
    except subprocess.TimeoutExpired as error:
        end, output = f"is not done after {COMMAND_S} s", (error.stdout or b"").decode(errors="replace")
    else:
        if done.returncode == 0:
            return ""
        end, output = f"ended with {done.returncode}", done.stdout
    return (f"beside torch {TORCH} and transformers {TRANSFORMERS}, without Ray, OmegaConf and PyAV:\n"
            f"{shlex.join(command)} {end}\n{output[-6000:]}")


@pytest.mark.slow
@pytest.mark.timeout(TEST_S)
def test_the_environment_has_the_old_versions_and_nothing_else(python: str) -> None:
    program = """
import importlib.util, torch, transformers
print(torch.__version__.partition("+")[0], transformers.__version__,
      [name for name in ("ray", "omegaconf", "av", "matplotlib", "PIL") if importlib.util.find_spec(name)])
"""
    done = subprocess.run([python, "-I", "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == f"{TORCH} {TRANSFORMERS} []\n"


@pytest.mark.slow
@pytest.mark.timeout(TEST_S)
@pytest.mark.parametrize("name", COMMANDS)
def test_the_core_passes_there(python: str, name: str) -> None:
    if told := failure(python, COMMANDS[name]):
        pytest.fail(told, pytrace=False)


def imported(path: Path) -> set[str]:
    """The modules that a file imports as soon as it is imported itself."""
    found, statements = set[str](), list(ast.parse(path.read_text()).body)
    for statement in statements:
        if isinstance(statement, ast.Import):
            found |= {alias.name for alias in statement.names}
        elif isinstance(statement, ast.ImportFrom) and statement.module:
            found |= {statement.module, *(f"{statement.module}.{alias.name}" for alias in statement.names)}
        elif not isinstance(statement, ast.FunctionDef) and "TYPE_CHECKING" not in ast.dump(statement):
            statements += [child for child in ast.iter_child_nodes(statement) if isinstance(child, ast.stmt)]
    return found


def test_the_cores_tests_import_nothing_else() -> None:
    """As far as the imports of this repository's files say it."""
    named = [ROOT / part for command in COMMANDS.values() for part in command if part.startswith("tests/")]
    files = [file for path in named for file in (path.rglob("test_*.py") if path.is_dir() else [path])
             if file not in {ROOT / path for path in NEED_MORE}]
    importers = {file: file for file in files}  # each file's importer
    assert len(files) > 100
    for file in files:
        for name in imported(file):
            assert name.partition(".")[0] not in HIDDEN, f"{importers[file]} imports {file}, which imports {name}"
            parts = name.split(".")
            for path in (ROOT.joinpath(*parts[:end], *last) for end in range(1, len(parts) + 1)
                         for last in (["__init__.py"], [])):
                module = path if path.name == "__init__.py" else path.with_suffix(".py")
                if module.is_file() and module not in importers:
                    importers[module] = file
                    files.append(module)


@pytest.mark.slow
def test_the_cores_tests_are_collected_without_it() -> None:
    """Without waiting for the environment: here, with those packages hidden."""
    hidden = f"import sys; sys.modules.update(dict.fromkeys({HIDDEN}))"
    paths = sorted({part for command in COMMANDS.values() for part in command if part.startswith("tests/")})
    arguments = [*PYTEST[2:], "--collect-only", "--noconftest", "--assert=plain", *paths]
    program = f"{hidden}; import pytest; raise SystemExit(pytest.main({arguments!r}))"
    assert failure(sys.executable, ["-c", program]) == ""


def test_a_command_that_fails_is_told_with_its_output() -> None:
    assert failure(sys.executable, ["-c", "print(1)"]) == ""
    told = failure(sys.executable, ["-c", "print('why'); raise SystemExit(3)"]).splitlines()
    assert told[0].startswith(f"beside torch {TORCH}")
    assert told[1].endswith(" ended with 3")
    assert told[2:] == ["why"]


def test_what_pip_cannot_find_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    assert install(sys.executable).startswith("ERROR: No matching distribution found for ")


def test_the_named_files_are_there() -> None:
    named = {part for command in COMMANDS.values() for part in command if part.startswith("tests/")}
    assert [path for path in [*NEED_MORE, *sorted(named)] if not (ROOT / path).exists()] == []
