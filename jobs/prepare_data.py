"""Writes the synthetic training set to data.path: `python jobs/prepare_data.py [--config FILE] [key=value ...]`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dhp_ray.runtime.job.signals import ShutdownSignals
from dhp_ray.streams import run_command  # all other imports come once signals are handled

if TYPE_CHECKING:
    from dhp_ray.schema import Preparation

PURPOSE = (
    "Write the synthetic training set (data.synthetic.*) to data.path. Does nothing when the same set is there already."
)


def main(arguments: list[str]) -> int:
    """Exit status: 0 when the set is in place, 2 on a bad configuration, 1 on failure."""
    from dhp_ray.config import PREPARE_DATA, ConfigError, help_text, load

    try:
        if {"--help", "-h"} & set(arguments):
            print(help_text(PURPOSE, arguments, PREPARE_DATA))
            return 0
        config = load(arguments, PREPARE_DATA)
        path = target(config)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        prepare(path, config)
    except OSError as error:
        print(f"error: data.path: {path} cannot be written: {error.strerror}", file=sys.stderr)
        return 1
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def target(config: Preparation) -> Path:
    """The file to write."""
    from dhp_ray.config import ConfigError

    data = config.data
    if data.format != "synthetic":
        raise ConfigError(f"data.format: got {data.format}; allowed here: synthetic (other data is read as it is)")
    if not data.path.endswith(".parquet"):
        raise ConfigError(f"data.path: got {data.path!r}; allowed here: a file name ending in .parquet")
    if Path(data.path).is_dir():
        raise ConfigError(f"data.path: {data.path} is a folder; allowed here: a file name ending in .parquet")
    return Path(data.path)


def prepare(path: Path, config: Preparation) -> None:
    """Write the set, or say that it is there."""
    import time

    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from dhp_ray.data.synthetic import parameters, stored_parameters, write
    from dhp_ray.storage import check_writable

    wanted = parameters(config.data, config.seed)
    if path.exists():
        stored = stored_parameters(path)
        if stored is None:
            raise ValueError(
                f"data.path: {path} holds other data; allowed: a name that is free, or a set written by this program"
            )
        if stored == wanted:
            print(f"{path}: {wanted['num_samples']} samples are there already")
            return
        changed = next(key for key in wanted | stored if stored.get(key) != wanted.get(key))
        print(
            f"{path}: replacing a set with {changed}={stored.get(changed)} by one with {changed}={wanted.get(changed)}"
        )
    check_writable(path)
    started = time.monotonic()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, transient=True, disable=not sys.stdout.isatty()) as progress:
        task = progress.add_task("rendering samples", total=wanted["num_samples"])
        write(path, config.data, config.seed, lambda done: progress.update(task, completed=done))
    print(
        f"{path}: {wanted['num_samples']} samples, {path.stat().st_size / 1e6:.1f} MB, written in "
        f"{time.monotonic() - started:.1f} s"
    )


if __name__ == "__main__":
    sys.exit(run_command(lambda argv: ShutdownSignals("before the end").run(lambda: main(argv))))
