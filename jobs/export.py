"""Writes the model of a kept checkpoint: `python jobs/export.py run.dir=FOLDER [checkpoint=STEP] [out=FOLDER]`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dhp_ray.runtime.job.signals import ShutdownSignals
from dhp_ray.streams import run_command  # all other imports come once signals are handled

if TYPE_CHECKING:
    from dhp_ray.config import Config
    from dhp_ray.storage import Folder

HELP = """usage: python jobs/export.py run.dir=FOLDER [checkpoint=STEP|latest] [out=FOLDER] [model.path=FOLDER]

Writes the model of a checkpoint with its tokenizer and processor as a folder in the Hugging Face form, as a run writes
its model at its end. Needs no Ray; holds one file of the model in memory. Works while the run is going.

  run.dir=FOLDER     the run's folder, a local one or a URI (s3://, gs://)
  checkpoint=STEP    the step of a checkpoint that is kept; latest, or without it: the newest
  out=FOLDER         where to write: a local folder, empty or new; without it, FOLDER/exports/step_000020 of the run
  model.path=FOLDER  where the folder lies now that the run began with; without it, where it lay then

Exit status: 0 on success, 2 on a bad argument or where no run or checkpoint is, 1 on failure."""
OWN = ("run.dir", "checkpoint", "out", "model.path")


def main(argv: list[str]) -> int:
    if {"-h", "--help"} & set(argv):
        print(HELP)
        return 0
    from dhp_ray.config import ConfigError
    from dhp_ray.runtime.job.preflight import choose_step, refuse_export
    from dhp_ray.runtime.records.checkpoints import Checkpoints
    from dhp_ray.storage import StorageError

    try:
        given = arguments(argv)
        folder, config = run_of(given)
        step = choose_step(Checkpoints(folder, config.checkpoint.keep), given.get("checkpoint", "latest"))
        out = target(given, folder, step)
        refuse_export(config, out)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except StorageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"error: out: {out} cannot be written: {error.strerror}", file=sys.stderr)
        return 1
    return export(folder, config, step, out)


def arguments(argv: list[str]) -> dict[str, str]:
    """What is given, by key."""
    from dhp_ray.config import ConfigError

    given: dict[str, str] = {}
    for word in argv:
        key, mark, value = word.partition("=")
        if not mark or key not in OWN or not value:
            raise ConfigError(f"{word}: not understood; allowed: --help, {', '.join(f'{name}=...' for name in OWN)}")
        given[key] = value
    if "run.dir" not in given:
        raise ConfigError("run.dir: not given; allowed: the folder of a run")
    step = given.get("checkpoint", "latest")
    if step != "latest" and not (step.isdecimal() and step.isascii() and len(step) < 19):
        raise ConfigError(f"checkpoint: got {step!r}; allowed: latest, or the step of a checkpoint that is kept")
    return given


def run_of(given: dict[str, str]) -> tuple[Folder, Config]:
    """The folder of a run, and its configuration."""
    import re
    import tempfile

    from dhp_ray.config import ConfigError, check_place, load
    from dhp_ray.run_folder import CONFIG_FILE
    from dhp_ray.storage import Folder

    folder = Folder(given["run.dir"])
    if local := folder.local_path():
        check_place("run.dir", str(local), "folder or URI")
    if not folder.exists(CONFIG_FILE):
        raise ConfigError(f"run.dir: no run in {folder.uri} (it has no {CONFIG_FILE}); allowed: a folder that "
                          "jobs/train.py has written")
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / CONFIG_FILE
        file.write_bytes(folder.read(CONFIG_FILE))
        overrides = [f"run.dir={given['run.dir']}"]
        if "model.path" in given:
            overrides.append(f"model.path={given['model.path']}")
        try:
            return folder, load(["--config", str(file), *overrides])
        except ConfigError as error:  # of the run's own file
            told = str(error).replace(str(file), f"{folder.uri}/{CONFIG_FILE}")
            raise ConfigError(re.sub("^--config:", "run.dir:", told)) from None


def target(given: dict[str, str], folder: Folder, step: int) -> Path:
    """The folder to write."""
    from dhp_ray.config import ConfigError, local_path
    from dhp_ray.run_folder import EXPORTS_FOLDER, step_folder

    if "out" in given:
        return local_path("out", given["out"]).absolute()
    local = folder.local_path()
    if local is None:
        raise ConfigError(f"out: not given; allowed, as run.dir is {folder.uri}: a folder on this machine")
    return local / EXPORTS_FOLDER / step_folder(step)


def export(folder: Folder, config: Config, step: int, out: Path) -> int:
    import os

    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    try:
        from dhp_ray.runtime.worker.export import export_checkpoint  # torch takes seconds to import

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
    print(f"{out}: the model of step {step}, {num_bytes / 1e6:,.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(run_command(lambda argv: ShutdownSignals("before the end").run(lambda: main(argv))))
