"""Writes the model of a kept checkpoint: `python jobs/export.py run.dir=FOLDER [checkpoint=STEP] [out=FOLDER]`."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dhp_ray.config import Config, ConfigError, load
from dhp_ray.streams import run_command

if TYPE_CHECKING:
    from dhp_ray.storage import Folder

HELP = """usage: python jobs/export.py run.dir=FOLDER [checkpoint=STEP] [out=FOLDER] [model.path=FOLDER]

Writes the model of a checkpoint with its tokenizer and processor as a folder in the Hugging Face form, as a run writes
its model at its end. Needs no Ray; holds one file of the model in memory. Works while the run is going.

  run.dir=FOLDER     the run's folder, a local one or a URI (s3://, gs://)
  checkpoint=STEP    the step of a checkpoint that is kept; without it, the newest
  out=FOLDER         where to write: a local folder, empty or new; without it, FOLDER/exports/step_000020 of the run
  model.path=FOLDER  where the folder lies now that the run began with; without it, where it lay then

Exit status: 0 on success, 2 on a bad argument or where no run or checkpoint is, 1 on failure."""
OWN = ("run.dir", "checkpoint", "out", "model.path")


def main(argv: list[str]) -> int:
    if {"-h", "--help"} & set(argv):
        print(HELP)
        return 0
    from dhp_ray.storage import StorageError

    try:
        given = arguments(argv)
        folder, config = run_of(given)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except StorageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return export(folder, config, given)


def arguments(argv: list[str]) -> dict[str, str]:
    """What is given, by key.

    Raises:
        ConfigError: a word is not one of these keys with a value, or run.dir is missing.
    """
    given: dict[str, str] = {}
    for word in argv:
        key, mark, value = word.partition("=")
        if not mark or key not in OWN or not value:
            raise ConfigError(f"{word}: not understood; allowed: --help, {', '.join(f'{name}=...' for name in OWN)}")
        given[key] = value
    if "run.dir" not in given:
        raise ConfigError("run.dir: not given; allowed: the folder of a run")
    if not given.get("checkpoint", "0").isdecimal():
        raise ConfigError(f"checkpoint: got {given['checkpoint']!r}; allowed: the step of a checkpoint that is kept")
    return given


def run_of(given: dict[str, str]) -> tuple[Folder, Config]:
    """The folder of a run, and its configuration.

    Raises:
        ConfigError: there is no run, or its configuration is none of this program.
    """
    from dhp_ray.run_folder import CONFIG_FILE
    from dhp_ray.storage import Folder

    folder = Folder(given["run.dir"])
    if not folder.exists(CONFIG_FILE):
        raise ConfigError(f"run.dir: no run in {folder.uri} (it has no {CONFIG_FILE}); allowed: a folder that "
                          "jobs/train.py has written")
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / CONFIG_FILE
        file.write_bytes(folder.read(CONFIG_FILE))
        overrides = [f"run.dir={given['run.dir']}"]
        if "model.path" in given:
            overrides.append(f"model.path={given['model.path']}")
        return folder, load(["--config", str(file), *overrides])


def export(folder: Folder, config: Config, given: dict[str, str]) -> int:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from dhp_ray.run_folder import EXPORTS_FOLDER, step_folder

    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"
    from dhp_ray.runtime.job.export import ExportRefusedError, check_out, choose_step, export_checkpoint
    from dhp_ray.runtime.records.checkpoints import Checkpoints

    try:
        step = choose_step(Checkpoints(folder, config.checkpoint.keep),
                           int(given["checkpoint"]) if "checkpoint" in given else None)
        local = folder.local_path()
        if "out" not in given and local is None:
            raise ExportRefusedError(f"out: not given; allowed, as run.dir is {folder.uri}: a folder on this machine")
        out = Path(given["out"]).expanduser().absolute() if "out" in given else Path(
            f"{local}/{EXPORTS_FOLDER}/{step_folder(step)}")
        check_out(out)
    except ExportRefusedError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    try:
        with Progress(*columns, transient=True, disable=not sys.stdout.isatty()) as progress:
            task = progress.add_task("writing files", total=None)
            num_bytes = export_checkpoint(
                folder, config, step, out, lambda done, total: progress.update(task, completed=done, total=total))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"error: stopped before {out} was whole: Ctrl-C; nothing of it is left", file=sys.stderr)
        return 1
    print(f"{out}: the model of step {step}, {num_bytes / 1e9:.3g} GB")
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
