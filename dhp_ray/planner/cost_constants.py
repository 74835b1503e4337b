"""A cost file on disk: constants and, in a measured file, the conditions of the measurement."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from dhp_ray.errors import first_line
from dhp_ray.planner.checks import PlanError

SECTIONS = ("device", "model", "settings", "versions", "measured", "intervals", "errors")
"""Sections of a measured file besides its constants (`cost_origin.py`)."""


def constants_of_file(path: str | Path) -> dict[str, Any]:
    """The content of a cost file, including its sections.

    Raises:
        PlanError: one line that names the file, which is not a mapping or cannot be read.
    """
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"{path}: cannot be read: {error.__class__.__name__}") from None
    return constants_of_text(text, path)


def constants_of_text(text: str | bytes, path: str | Path) -> dict[str, Any]:
    """The same of the text of a file."""
    try:
        tree = yaml.safe_load(text)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise PlanError(f"{path}: not YAML: {first_line(error)}") from None
    if not isinstance(tree, dict):
        raise PlanError(f"{path}: no constants; it is a mapping from names to values")
    return tree
