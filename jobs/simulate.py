"""Simulates training on a described cluster, planner beside planner: `python jobs/simulate.py key=value ...`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dhp_ray.runtime.job.signals import ShutdownSignals
from dhp_ray.streams import run_command  # all other imports come once signals are handled

if TYPE_CHECKING:
    from dhp_ray.simulate.run import Simulated
    from dhp_ray.simulate.settings import Simulation

PURPOSE = (
    "Simulate many batches on a described cluster, with each planner's own plans: throughput, idle time,\n"
    "communication, memory, and what faults and slow ranks cost. All of it is modelled; the same settings give the\n"
    "same result."
)


def main(argv: list[str]) -> int:
    """Exit status: 0 on success, 2 on a bad configuration, 1 on failure."""
    from dhp_ray.config import ConfigError, help_text
    from dhp_ray.simulate.settings import SIMULATE, load_simulation

    try:
        if {"--help", "-h"} & set(argv):
            print(help_text(PURPOSE, argv, SIMULATE))
            return 0
        settings = load_simulation(argv)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        return simulate(settings)
    except KeyboardInterrupt:
        print("error: stopped: Ctrl-C; simulate again, or fewer planners or batches", file=sys.stderr)
        return 1


def simulate(settings: Simulation) -> int:
    from dhp_ray.config import ConfigError
    from dhp_ray.planner import PlanError, warm_up  # takes half a second to import
    from dhp_ray.simulate.run import prepared
    from dhp_ray.storage import check_writable

    try:  # before the work, not after it
        if settings.out:
            check_writable(Path(settings.out) / "results.json")
    except OSError as error:
        print(f"error: out: {settings.out} cannot be written: {error.strerror}", file=sys.stderr)
        return 1
    try:
        simulation = prepared(settings)
    except (ConfigError, PlanError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    warm_up()
    try:
        run(simulation, settings)
        return report(simulation, settings)
    except (PlanError, ConfigError) as error:
        print(f"error: {error}", file=sys.stderr)
    except OSError as error:
        print(f"error: out: {settings.out} cannot be written: {error.strerror or error}", file=sys.stderr)
    return 1


def run(simulation: Simulated, settings: Simulation) -> None:
    """Run all planners, with a bar on a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from dhp_ray.simulate.run import simulated

    total, console = settings.duration_s or settings.num_batches, Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[words]}"),
               TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        tasks = {planner: progress.add_task(planner, total=total, words="", start=False)
                 for planner in settings.planners}

        def tell(planner: str, step: int, now_s: float) -> None:
            progress.start_task(tasks[planner])
            progress.update(tasks[planner], completed=now_s if settings.duration_s else step,
                            words=f"step {step}, {now_s:,.0f} s")

        for record in simulated(simulation, tell):
            progress.update(tasks[record.planner], completed=total)


def report(simulation: Simulated, settings: Simulation) -> int:
    """Print the table and write the files."""
    from dhp_ray.simulate.run import text_of, write_results

    machine, cluster = simulation.machine, settings.cluster
    limits = machine.first.limits
    how = "activations in host memory" if limits.offload.share else "recomputed layers"
    beyond = f", up to {limits.most_tokens:,} with {how}" if limits.beyond.share else ""
    print(f"{settings.model} on {cluster.num_ranks} {machine.device.name}, {cluster.ranks_per_node} a node: "
          f"{machine.first.mode}, {limits.tokens:,} tokens a rank"
          f"{beyond}; longest sequence "
          f"{simulation.batches.longest_tokens:,} tokens. All modelled, nothing measured.")
    if machine.notice:
        print(machine.notice)
    summaries = simulation.summaries()
    print(text_of(summaries))
    if left_out := len(simulation.batches.left_out):
        print(f"{left_out} samples of later batches are longer than that, and were left out")
    if settings.out:
        for file in write_results(simulation, Path(settings.out)):
            print(file)
    return 1 if all(summary["error"] for summary in summaries) else 0


if __name__ == "__main__":
    sys.exit(run_command(lambda argv: ShutdownSignals("before the end").run(lambda: main(argv))))
