"""A file that holds one JSON object."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dhp_ray.errors import first_line


def json_object(file: Path, key: str, error: type[ValueError]) -> dict[str, Any]:
    """What the file holds. `error` is raised, with the `key` that led to it, if it is unreadable or no JSON object."""
    try:
        tree = json.loads(file.read_text(encoding="utf-8"))
    except OSError as raised:
        raise error(f"{key}: {file} cannot be read: {first_line(raised)}") from None
    except (ValueError, RecursionError) as raised:
        raise error(f"{key}: {file} is not JSON: {first_line(raised)}") from None
    if not isinstance(tree, dict):
        raise error(f"{key}: {file} holds {type(tree).__name__}; allowed: an object")
    return tree
