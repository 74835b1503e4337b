"""Measures what a model's steps cost on this machine's devices: `python jobs/measure.py model=tiny`."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dhp_ray.runtime.job.signals import ShutdownSignals
from dhp_ray.streams import run_command  # all other imports come once signals are handled

if TYPE_CHECKING:
    from dhp_ray.config import Config

PURPOSE = """Measure packs, rings, exchanges and the end of a step on this machine, in minutes, and write a cost file
for planner.cost: constants with their errors, and beside it a picture of what the fit predicts against what was
measured. No data is read: packs are random tokens and images.

  name=               name of the cost, and of its file conf/cost/NAME.yaml; empty: the device's kind and the model
  out=                write the file here instead
  ranks=              ranks that measure at a time, one a device; empty: all, cluster.num_workers at most
  max_tokens=         tokens of the largest pack on a rank; empty: 4096 on the CPU, 32768 elsewhere, or what fits"""

OWN = {"name": "", "out": "", "ranks": "", "max_tokens": ""}
KEYS = (r"model\.|cluster\.(num_workers|device|cpus)|planner\.sync|data\.max_p"
        r"|train\.(prec|freeze|lora|act)")


def main(argv: list[str], signals: ShutdownSignals | None = None) -> int:
    from dhp_ray.config import CONF, TRAIN, ConfigError, help_text, load

    command = replace(TRAIN, name="jobs/measure.py", file=CONF / "measure.yaml", keys=KEYS, own=tuple(OWN))
    try:
        if {"-h", "--help"} & set(argv):
            print(help_text(PURPOSE, argv, command))
            return 0
        own, rest = split(argv)
        config = load(["data.format=synthetic", *rest], command)  # a run's file may lack data: none is read
        return measure(config, own, signals)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("error: stopped: Ctrl-C; measure again", file=sys.stderr)
        return 1


def split(argv: list[str]) -> tuple[dict[str, str], list[str]]:
    """This job's own words, checked, and the rest of them."""
    from dhp_ray.config import ConfigError

    own, rest = dict(OWN), []
    for word in argv:
        name, equals, value = word.partition("=")
        if equals and name in OWN:
            own[name] = value
        else:
            rest.append(word)
    for name, least in (("ranks", 1), ("max_tokens", 64)):
        if own[name] and not (own[name].isascii() and own[name].isdigit() and int(own[name]) >= least):
            raise ConfigError(f"{name}: got {own[name]!r}; allowed: a whole number of at least {least}")
    if own["out"] and Path(own["out"]).suffix not in (".yaml", ".yml"):
        raise ConfigError(f"out: got {own['out']!r}; allowed: a file name that ends in .yaml")
    if "/" in own["name"]:
        raise ConfigError(f"name: got {own['name']!r}; allowed: a name without a slash; out= takes a path")
    return own, rest


def measure(config: Config, own: dict[str, str], signals: ShutdownSignals | None) -> int:
    from dhp_ray.config import CONF, ConfigError, local_path
    from dhp_ray.runtime.job.preflight import check_measurement_here
    from dhp_ray.storage import check_writable

    check_measurement_here(config, int(own["ranks"] or 0))
    target = local_path("out", own["out"]) if own["out"] else CONF / "cost" / f"{own['name'] or 'cost'}.yaml"
    try:  # before minutes of measuring, not after them
        check_writable(target)
        check_writable(target.with_suffix(".png"))
    except OSError as error:
        print(f"error: out: {target} cannot be written: {error.strerror}", file=sys.stderr)
        return 1
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    from dhp_ray.comm.device import choose
    from dhp_ray.errors import first_line
    from dhp_ray.measure.fitting import MeasureError
    from dhp_ray.runtime.job.measuring import Request, measure_here
    from dhp_ray.runtime.messages import RunError
    from dhp_ray.runtime.strategy import model_name

    try:
        kind = choose(config.cluster.device).name
    except ValueError as error:
        raise ConfigError(str(error)) from None
    name = own["name"] or f"{kind}_{model_name(config)}"
    target = target if own["out"] else CONF / "cost" / f"{name}.yaml"
    request = Request(name, int(own["ranks"] or 0), int(own["max_tokens"] or 0))
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TextColumn("left"),
               TimeRemainingColumn())
    console = Console(stderr=True)
    try:
        with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
            task, said = bar.add_task("starting the ranks", total=1.0), set()

            def tell(what: str, share: float) -> None:
                bar.update(task, description=what, completed=share)
                if what not in said and not sys.stdout.isatty():
                    print(f"measuring {what} ({100 * share:.0f} % done)", flush=True)
                said.add(what)

            measured = measure_here(config, request, tell, signals)
        measured.write(target)
    except (MeasureError, RunError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"error: out: {target} cannot be written: {error.strerror or first_line(error)}", file=sys.stderr)
        return 1
    print("\n".join(measured.summary()))
    print(f"written: {target}, {target.with_suffix('.png')}")
    return 0


if __name__ == "__main__":
    signals = ShutdownSignals("before the end")
    sys.exit(run_command(lambda argv: signals.run(lambda: main(argv, signals))))
