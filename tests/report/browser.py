"""A real browser without a window, for what only a browser can tell: that a page shows, and that nothing in it runs."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def open_page(
    address: str, profile: Path, screenshot: Path | None = None, patience_ms: int = 4000, height: int = 1200
) -> str:
    """The page's document after its scripts have run; a screenshot too where asked. Skips the test where there is no
    browser.
    """
    browser = next((path for path in map(shutil.which, NAMES) if path), None)
    if browser is None:
        pytest.skip(f"no browser here: none of {', '.join(NAMES)}")
    common = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
              f"--user-data-dir={profile}", f"--window-size=1100,{height}",
              f"--virtual-time-budget={patience_ms}"]
    if screenshot:
        subprocess.run([*common, f"--screenshot={screenshot}", address], capture_output=True, timeout=180, check=True)
    return subprocess.run([*common, "--dump-dom", address], capture_output=True, text=True, timeout=180,
                          check=True).stdout
