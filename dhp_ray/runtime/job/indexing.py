"""Shows the progress of indexing a large data set. The job's process makes the index, so that the user sees the
progress; the driver finds it stored.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from dhp_ray.data.errors import DataError
from dhp_ray.data.index import KEPT_FROM_BYTES, Progress, data_files, index_fragments, sources_of
from dhp_ray.schema import Data

LINE_EVERY_S = 10.0


def index_ahead(data: Data) -> None:
    """Make the index of large data sets that have none yet. Errors in the data are left to the driver to report."""
    for source in sources_of(data):
        try:
            if sum(os.path.getsize(path) for path in data_files(source)) >= KEPT_FROM_BYTES:
                with progress_bar(source) as progress:
                    index_fragments(source, progress)
        except (DataError, OSError):
            return


@contextmanager
def progress_bar(data: Data) -> Iterator[Progress]:
    """Show progress on standard error: a bar on a terminal, else a line now and then; nothing for an index that exists.
    """
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Bar(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(f"indexing {data.path}", total=None, visible=False)
        said = time.monotonic()

        def show(done: int, total: int) -> None:
            nonlocal said
            bar.update(task, completed=done, total=total, visible=True)
            if not console.is_terminal and time.monotonic() - said >= LINE_EVERY_S:
                said = time.monotonic()
                print(f"indexing {data.path}: {100 * done // total} %", file=sys.stderr, flush=True)

        yield show
