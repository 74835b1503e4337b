"""How a worker describes an error."""

from __future__ import annotations

import traceback
from pathlib import Path

from dhp_ray.errors import first_line_of
from dhp_ray.runtime.messages import RunError


def words_of(error: BaseException) -> str:
    """Return one line: the error's own words if they are for the user, else its type, words and place."""
    text = first_line_of(str(error))
    if isinstance(error, (ValueError, OSError, RunError)) and text:
        return text
    ours = [frame for frame in traceback.extract_tb(error.__traceback__) if "/dhp_ray/" in frame.filename]
    place = f" (at {Path(ours[-1].filename).name}:{ours[-1].lineno})" if ours else ""
    return f"{type(error).__name__}: {text}{place}"
