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
def wheel_of(extra: str, folder: Path) -> Iterator[zipfile.ZipFile]:
    """The wheel of the one package that an extra of pyproject.toml asks for; the test skips where pip has none."""
    [wanted] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"][extra]
    done = subprocess.run([sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(folder), wanted],
                          capture_output=True, text=True, timeout=250, check=False)
    files = list(folder.glob("*.whl"))
    if not files:
        pytest.skip(f"pip cannot download {wanted}: {done.stderr.strip().splitlines()[-1]}")
    with zipfile.ZipFile(files[0]) as opened:
        yield opened
