"""A cost file as it lies on disk: constants, and in a measured one what they are of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from dhp_ray.errors import first_line
from dhp_ray.planner.checks import PlanError

SECTIONS = ("device", "model", "settings", "versions", "measured", "intervals", "errors")
"""What a measured file has beside its constants (`cost_origin.py`)."""


def constants_of_file(path: str | Path) -> dict[str, Any]:
    """What a cost file holds, its sections too.

    Raises:
        PlanError: one line that names the file, which is no mapping or cannot be read.
    """
    try:
        tree = yaml.safe_load(Path(path).read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"{path}: cannot be read: {error.__class__.__name__}") from None
    except yaml.YAMLError as error:
        raise PlanError(f"{path}: not YAML: {first_line(error)}") from None
    if not isinstance(tree, dict):
        raise PlanError(f"{path}: no constants; a cost file is a mapping from names to numbers")
    return tree
