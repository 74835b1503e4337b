"""Whether training computes the same on any number of ranks, under any planner, mode and transport.

    python benchmarks/parity.py                 the full matrix
    python benchmarks/parity.py bf16 frozen     only the cases whose line holds one of these words
    python benchmarks/parity.py --steps 5
    python benchmarks/parity.py jobs/train.py   only the loss series of whole runs whose images are encoded apart

Each case trains the tiny model on real conversations (`DHP_RAY_TEST_DATA`; without it, on the synthetic set) on ranks
that are processes over gloo, and is held against one rank in fp32: the loss of every step, and the parameters at the
end. Behind them come ten steps of `jobs/train.py` on three workers, in both modes, with images encoded apart from their
packs, beside one worker. Exit status 1 when a case or a series fails.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

if TYPE_CHECKING:
    from benchmarks.cases import Case


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="run only the cases whose line holds one of these")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps of each case")
    parser.add_argument("--batch", type=int, default=6, help="samples of each step")
    arguments = parser.parse_args(argv)

    from benchmarks.cases import full_matrix
    from benchmarks.job_series import LINES, series_on_a_cluster
    from benchmarks.worlds import data_overrides

    def wanted(line: str) -> bool:
        return not arguments.words or any(word in line for word in arguments.words)

    cases = [case for case in full_matrix() if wanted(str(case))]
    syncs = [sync for sync in LINES if wanted(LINES[sync])]
    degrees, failed = set[int](), 0
    with tempfile.TemporaryDirectory(prefix="dhp_ray_parity_") as folder:
        overrides = data_overrides(os.environ.get("DHP_RAY_TEST_DATA", ""), Path(folder))
        if cases:
            degrees, failed = run_cases(cases, overrides, arguments.steps, arguments.batch)
        for series in series_on_a_cluster(overrides, Path(folder), syncs) if syncs else ():
            failed += bool(series.faults)
            print(series, flush=True)
    missing = {2, 3, 5} - degrees if not arguments.words else set()
    if missing:
        print(f"error: no pack of degree {', '.join(map(str, sorted(missing)))}", file=sys.stderr)
    print(f"{len(cases) + len(syncs) - failed} of {len(cases) + len(syncs)} cases hold")
    return 1 if failed or missing else 0


def run_cases(
    cases: Sequence[Case], overrides: Sequence[str], num_steps: int, batch_size: int
) -> tuple[set[int], int]:
    """Print a line for each; (the degrees that occurred, how many cases have failed)"""
    from benchmarks.cases import Matrix
    from benchmarks.worlds import corpus_of
    from dhp_ray.config import load

    corpus = corpus_of(load(overrides), num_steps * batch_size)
    matrix = Matrix(overrides, corpus, num_steps, batch_size)
    lengths = [sample.num_tokens for sample in corpus.samples]
    print(f"{num_steps} steps of {batch_size} samples, {min(lengths)} to {max(lengths)} tokens each; "
          f"{len(cases)} cases", flush=True)
    print(f"{'case':>4} {'ranks':>5} {'planner':<7} {'sync':<11} {'transport':<9} {'situation':<24} {'loss':>8} "
          f"{'params':>8} {'s':>6}  degrees")
    degrees, failed = set[int](), 0
    for number, case in enumerate(cases, 1):
        row = matrix.run(case)
        degrees |= set(row.degrees)
        failed += bool(row.faults)
        print(f"{number:>4} {case.num_ranks:>5} {case.planner:<7} {case.sync:<11} {case.transport:<9} "
              f"{case.situation:<24} {row.loss_error:>8.1e} {row.parameter_error:>8.1e} {row.seconds:>6.1f}  "
              f"{' '.join(map(str, row.degrees))}{''.join(f'  FAILED: {fault}' for fault in row.faults)}", flush=True)
    return degrees, failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
