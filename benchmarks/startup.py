"""How long a user waits for the first step of the demo, by part. `python benchmarks/startup.py [--beside FOLDER]`

    command -> workers    Python, the cluster, the driver, the index of the data
    workers -> training   the workers' imports, the model, the ranks meet
    training -> step 1    the first batch is read, planned and run

Each run is one of `jobs/train.py` on a cluster of its own, into a new folder. With `--beside` the same command of
another checkout takes turns with it. The planner's machine code is there already: the first run, which may compile it,
does not count. Prints the least of each part over the runs, in seconds, and that of the whole.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from time import perf_counter

ROOT = Path(__file__).resolve().parent.parent
MARKS = ("starting ", "new run in ", "step 1/")
"""With which the lines begin that end the parts."""


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--beside", type=Path, help="another checkout")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args(argv)
    checkouts = [ROOT, *([arguments.beside.resolve()] if arguments.beside else [])]
    found: dict[Path, list[list[float]]] = {checkout: [] for checkout in checkouts}
    with tempfile.TemporaryDirectory(prefix="dhp_ray_startup_") as folder:
        data = Path(folder) / "set.parquet"
        subprocess.run([sys.executable, "jobs/prepare_data.py", f"data.path={data}"], cwd=ROOT, check=True,
                       stdout=subprocess.DEVNULL, env=environment(ROOT))
        for number in range(arguments.repeats + 1):
            for checkout in checkouts:
                moments = start(checkout, data, Path(folder) / f"{number}_{checkouts.index(checkout)}")
                if number:
                    found[checkout].append([later - earlier for earlier, later in pairwise(moments)])
    print("| least of the runs, s | command -> workers | workers -> training | training -> step 1 | in all |")
    print("|---|---|---|---|---|")
    for checkout, runs in found.items():
        parts = [min(seconds) for seconds in zip(*runs)]
        print("| " + " | ".join([checkout.name, *(f"{seconds:.1f}" for seconds in (*parts, min(map(sum, runs))))])
              + " |")
    return 0


def start(checkout: Path, data: Path, run_dir: Path) -> list[float]:
    """Train one step; return when the command was given, and when each line of MARKS was printed."""
    moments, left = [perf_counter()], list(MARKS)
    with subprocess.Popen([sys.executable, "jobs/train.py", f"run.dir={run_dir}", f"data.path={data}", "run.steps=1"],
                          cwd=checkout, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          env=environment(checkout)) as process:
        assert process.stdout is not None
        said = []
        for line in process.stdout:
            said.append(line)
            if left and line.lstrip().startswith(left[0]):
                moments.append(perf_counter())
                left.pop(0)
    if process.returncode or left:
        raise SystemExit("".join(said))
    return moments


def environment(checkout: Path) -> dict[str, str]:
    """What a user has who has run it before: also Python's compiled files."""
    own = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**own, "PYTHONPATH": str(checkout), "RAY_ADDRESS": "local", "PYTHONUNBUFFERED": "1"}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
