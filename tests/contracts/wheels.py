"""Wheels of packages that cannot be imported here: they need a device, or its libraries."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.checkout import ROOT


@contextmanager
def wheel_of(package: str, folder: Path) -> Iterator[zipfile.ZipFile]:
    """The wheel of a package that an extra of pyproject.toml asks for; the test skips where pip has none."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    [wanted] = [each for extra in extras.values() for each in extra if each.startswith(f"{package}>")]
    done = subprocess.run([sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(folder), wanted],
                          capture_output=True, text=True, timeout=250, check=False)
    files = list(folder.glob("*.whl"))
    if not files:
        pytest.skip(f"pip cannot download {wanted}: {done.stderr.strip().splitlines()[-1]}")
    with zipfile.ZipFile(files[0]) as opened:
        yield opened
