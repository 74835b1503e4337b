"""Real NCCL with several ranks on one GPU: the pool and the ring, the abort after a kill, the conformance suite, and
steps of every engine.
"""

from __future__ import annotations

from benchmarks.device_parts.outcomes import ROOT, run_tests
from benchmarks.device_parts.record import CheckError, NotRun, Record
from benchmarks.device_parts.settings import Settings

NUM_RANKS = 3


def run(settings: Settings, record: Record) -> str:
    if settings.device != "cuda":
        raise NotRun("no CUDA device")
    from benchmarks.device_parts.aborts import HEAD, lost_peer
    from benchmarks.device_parts.parity import compare

    wrong, said = [], []
    try:
        said.append(compare(record, "cuda", "nccl", NUM_RANKS, "bf16", timeout_s=40.0))
    except (AssertionError, CheckError) as error:
        wrong.append(f"ring: {str(error).strip().splitlines()[-1]}")
    record.table(HEAD)
    for deed in ("never joins", "is killed"):
        try:
            wrong += lost_peer(record, "cuda", "nccl", deed)
        except AssertionError as error:
            wrong.append(f"peer {deed}: {str(error).strip().splitlines()[-1]}")
    try:
        suite = [*map(str, sorted((ROOT / "tests/comm").glob("test_conformance*.py"))),
                 str(ROOT / "tests/train/test_engines_on_a_device.py")]
        said.append(run_tests(record, ["-m", "gpu", "-k", "nccl", *suite]))
    except NotRun as reason:
        said.append(f"tests not run: {reason}")
    except CheckError as error:
        wrong.append(str(error))
    if wrong:
        raise CheckError("; ".join(wrong))
    return "; ".join(said)
