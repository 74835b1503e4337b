"""Writes a report of a run, one HTML page: `python jobs/report.py run.dir=FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dhp_ray.runtime.job.signals import ShutdownSignals
from dhp_ray.streams import run_command  # all other imports come once signals are handled

HELP = """usage: python jobs/report.py [--config FILE] run.dir=FOLDER

Writes FOLDER/report.html: one page without anything to fetch, with loss, throughput, what planning gained over
static layouts, degrees, data and events.
Works while the run is going, on a folder or a URI (s3://, gs://).

  run.dir=FOLDER  the run's folder; without it, the one of conf/train.yaml or of --config FILE
                  (a run's config.yaml, for example)

Exit status: 0 on success, 2 on a bad argument or where no run is, 1 on failure (also where a run has not finished a
step)."""


def main(argv: list[str]) -> int:
    if {"-h", "--help"} & set(argv):
        print(HELP)
        return 0
    from dhp_ray.config import ConfigError, check_place, load, split_arguments

    try:
        for word in split_arguments(argv, Path())[1]:
            if not word.startswith("run.dir="):
                raise ConfigError(f"{word}: not understood; allowed: --config FILE, --help, run.dir=...")
        folder_name = load(argv).run.dir
        check_place("run.dir", folder_name, "folder or URI")
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    from dhp_ray.errors import counted
    from dhp_ray.planner import PlanError
    from dhp_ray.report.page import page
    from dhp_ray.report.run_files import read_run
    from dhp_ray.storage import Folder, StorageError

    try:
        run = read_run(Folder(folder_name))
        if not run.metrics:
            raise StorageError(f"{run.folder.uri}: the run has not finished a step yet; there is nothing to report")
        run.folder.probe()
        run.folder.write("report.html", page(run).encode())
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (StorageError, PlanError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{run.folder.uri.partition('?')[0]}/report.html: {counted(len(run.metrics), 'step')}")
    return 0


if __name__ == "__main__":
    sys.exit(run_command(lambda argv: ShutdownSignals("before the end").run(lambda: main(argv))))
