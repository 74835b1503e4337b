"""Rules of asynchronous backends: each a test that names its source and runs on the emulation and on NCCL alike.

    python -m tests.async_backend.rules     runs them all, and prints the table
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist

from dhp_ray.comm.device import WATCHDOGS
from tests import async_backend
from tests.async_backend.shared_gpu import share_gpu
from tests.async_backend.watchdog import HANDLING
from tests.ranks import run_processes

SUITE = sorted(map(str, (Path(__file__).parent.parent / "comm").glob("test_conformance*.py")))
Test = TypeVar("Test", bound=Callable[..., None])


@dataclass(frozen=True, slots=True)
class Backend:
    """`name` as torch knows it, on tensors of `device`."""

    name: str
    device: str

    def lacks(self) -> str:
        """What keeps this machine from running it; empty: nothing."""
        return "" if self.device == "cpu" or torch.cuda.is_available() else "no CUDA device on this machine"


EMULATED, STAGED = Backend(async_backend.BACKEND, "cpu"), Backend(async_backend.BACKEND, "cuda")
NCCL = Backend("nccl", "cuda")
COLUMNS = {"emulated": EMULATED, "staged": STAGED, "nccl": NCCL}


def rule(text: str, source: str, hccl_alone: str = "") -> Callable[[Test], Test]:
    """A test of a rule; it is called with a `backend`. `hccl_alone`: why NCCL is not to be asked."""
    backends = [pytest.param(backend, id=name, marks=[pytest.mark.gpu] if backend.device == "cuda" else [])
                for name, backend in COLUMNS.items() if not (hccl_alone and backend is NCCL)]

    def mark(test: Test) -> Test:
        test.rule, test.source, test.hccl_alone = text, source, hccl_alone  # type: ignore[attr-defined]
        marked: Test = pytest.mark.parametrize("backend", backends)(test)
        return marked

    return mark


def run_group(
    function: Callable[..., Any], backend: Backend, num_ranks: int = 2, mortal: Collection[int] = (),
    error_handling: str = "0",
) -> list[Any]:
    """Call `function(rank, device)` on ranks that have exchanged once over `backend`; the results, by rank.

    `error_handling` is the value of torch's variables of that name. Fails as `run_processes` does.
    """
    if lack := backend.lacks():
        pytest.skip(lack)
    return run_processes(_in_group, num_ranks, backend, num_ranks, function, error_handling, mortal=mortal)


def _in_group(
    rank: int, port: int, backend: Backend, num_ranks: int, function: Callable[..., Any], error_handling: str
) -> Any:
    os.environ.update(WATCHDOGS | dict.fromkeys(HANDLING, error_handling))
    async_backend.register()
    device, bound = torch.device(backend.device), {}
    if backend.device == "cuda":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        if torch.cuda.device_count() < num_ranks:
            share_gpu(rank)
        bound = {"device_id": device} if backend is NCCL else {}
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    dist.init_process_group(backend.name, store=store, rank=rank, world_size=num_ranks, timeout=timedelta(seconds=60),
                            **bound)
    total = torch.ones(1, device=device)
    dist.all_reduce(total)
    assert total.item() == num_ranks
    return function(rank, device)


class _Outcomes:
    """Of the suite's tests, by (test, column), as pytest reports them."""

    def __init__(self) -> None:
        self.tests: dict[str, Callable[..., None]] = {}
        self.found: dict[tuple[str, str], str] = {}

    def pytest_itemcollected(self, item: Any) -> None:
        if hasattr(item.function, "rule"):
            self.tests[item.originalname] = item.function

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name, _, column = report.nodeid.rpartition("::")[2].rstrip("]").partition("[")
        if report.skipped:
            reason = str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else ""
            self.found[name, column] = f"not run: {reason.removeprefix('Skipped: ')}"
        elif report.when == "call" or report.failed:
            self.found[name, column] = "holds" if report.passed else "FAILS"


def table(only: str = "") -> str:
    """Run the suite (or what pytest's `-k` calls `only`) and say what came of it, as a table in markdown."""
    outcomes = _Outcomes()
    pytest.main([*SUITE, "-q", "-m", "", "-k", only, "-p", "no:cacheprovider"], plugins=[outcomes])
    lines = [f"| rule | source | {' | '.join(COLUMNS)} |", "|---|---|" + "---|" * len(COLUMNS)]
    for name in dict.fromkeys(name for name, _ in outcomes.found if name in outcomes.tests):
        test = outcomes.tests[name]
        absent = f"not run: {test.hccl_alone}"  # type: ignore[attr-defined]
        cells = [outcomes.found.get((name, column), absent) for column in COLUMNS]
        lines.append(f"| {test.rule} | {test.source} | {' | '.join(cells)} |")  # type: ignore[attr-defined]
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
