"""Whether training computes the same on any number of ranks, under any planner, mode and transport.

    python benchmarks/parity.py                 the full matrix
    python benchmarks/parity.py bf16 frozen     only the cases whose line holds one of these words
    python benchmarks/parity.py --steps 5

Each case trains the tiny model on real conversations (`DHP_RAY_TEST_DATA`; without it, on the synthetic set) on ranks
that are processes over gloo, and is held against one rank in fp32: the loss of every step, and the parameters at the
end. Exit status 1 when a case fails.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="run only the cases whose line holds one of these")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps of each case")
    parser.add_argument("--batch", type=int, default=6, help="samples of each step")
    arguments = parser.parse_args(argv)

    from benchmarks.cases import Matrix, full_matrix
    from benchmarks.worlds import corpus_of, data_overrides
    from dhp_ray.config import load

    cases = [case for case in full_matrix() if not arguments.words
             or any(word in str(case) for word in arguments.words)]
    with tempfile.TemporaryDirectory(prefix="dhp_ray_parity_") as folder:
        overrides = data_overrides(os.environ.get("DHP_RAY_TEST_DATA", ""), Path(folder))
        corpus = corpus_of(load(overrides), arguments.steps * arguments.batch)
        matrix = Matrix(overrides, corpus, arguments.steps, arguments.batch)
        lengths = [sample.num_tokens for sample in corpus.samples]
        print(
            f"{arguments.steps} steps of {arguments.batch} samples, {min(lengths)} to {max(lengths)} tokens each; "
            f"{len(cases)} cases",
            flush=True,
        )
        print(
            f"{'case':>4} {'ranks':>5} {'planner':<7} {'sync':<11} {'transport':<9} {'situation':<24} {'loss':>8} "
            f"{'params':>8} {'s':>6}  degrees"
        )
        degrees, failed = set(), 0
        for number, case in enumerate(cases, 1):
            row = matrix.run(case)
            degrees |= set(row.degrees)
            failed += bool(row.faults)
            print(
                f"{number:>4} {case.num_ranks:>5} {case.planner:<7} {case.sync:<11} {case.transport:<9} "
                f"{case.situation:<24} {row.loss_error:>8.1e} "
                f"{row.parameter_error:>8.1e} {row.seconds:>6.1f}  "
                f"{' '.join(map(str, row.degrees))}{''.join(f'  FAILED: {fault}' for fault in row.faults)}",
                flush=True,
            )
    missing = {2, 3, 5} - degrees if not arguments.words else set()
    if missing:
        print(f"error: no pack of degree {', '.join(map(str, sorted(missing)))}", file=sys.stderr)
    print(f"{len(cases) - failed} of {len(cases)} cases hold")
    return 1 if failed or missing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
