"""Measures what a model's steps cost on this machine's devices: `python jobs/measure.py model=tiny`."""

from __future__ import annotations

import sys
from errno import EISDIR
from os import strerror
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dhp_ray.config import CONF, ConfigError, help_text, load
from dhp_ray.streams import run_command

PURPOSE = """Measure packs, rings, exchanges and the end of a step on this machine, in minutes, and write a cost file
for planner.cost: constants with intervals and errors, and beside it a picture of what the fit predicts against what
was measured. No data is read: packs are random tokens and images.

  name=               name of the cost, and of its file conf/cost/NAME.yaml; empty: the device's kind and the model
  out=                write the file here instead
  quick=false         true: fewer packs and repeats, under a minute for a small model
  ranks=              ranks that measure at a time, one a device; empty: all, cluster.num_workers at most
  preempt=false         true: no other process has the ranks' cores while a step runs (on a machine that others use
                      too; needs root). Without it, on Linux, what ranks lose to others is left out of their seconds
  max_tokens=         tokens of the largest pack on a rank; empty: 4096 on the CPU, 32768 elsewhere, or what fits"""

OWN = {"name": "", "out": "", "quick": "false", "preempt": "false", "ranks": "", "max_tokens": ""}
KEYS = (r"model\.|cluster\.(num_workers|device|cpus)|planner\.sync|data\.max_p"
        r"|train\.(prec|freeze|lora|act|shard|fused|bucket)")


def main(argv: list[str]) -> int:
    if {"-h", "--help"} & set(argv):
        print(help_text("python jobs/measure.py", PURPOSE, KEYS))
        return 0
    try:
        own, rest = split(argv)
        config = load(rest)
        return measure(config, own)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("error: stopped: Ctrl-C; measure again", file=sys.stderr)
        return 1


def split(argv: list[str]) -> tuple[dict[str, str], list[str]]:
    """This job's own words, checked, and the rest of them."""
    own, rest = dict(OWN), []
    for word in argv:
        name, equals, value = word.partition("=")
        if equals and name in OWN:
            own[name] = value
        else:
            rest.append(word)
    for name in ("quick", "preempt"):
        if own[name] not in ("true", "false"):
            raise ConfigError(f"{name}: got {own[name]!r}; allowed: true, false")
    for name, least in (("ranks", 1), ("max_tokens", 64)):
        if own[name] and not (own[name].isascii() and own[name].isdigit() and int(own[name]) >= least):
            raise ConfigError(f"{name}: got {own[name]!r}; allowed: a whole number of at least {least}")
    if own["out"] and Path(own["out"]).suffix not in (".yaml", ".yml"):
        raise ConfigError(f"out: got {own['out']!r}; allowed: a file name that ends in .yaml")
    if "/" in own["name"]:
        raise ConfigError(f"name: got {own['name']!r}; allowed: a name without a slash; out= takes a path")
    return own, rest


def measure(config, own: dict[str, str]) -> int:  # type: ignore[no-untyped-def]
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    from dhp_ray.comm.device import choose
    from dhp_ray.data.errors import DataError
    from dhp_ray.errors import first_line
    from dhp_ray.measure.cost_file import write
    from dhp_ray.measure.observations import MeasureError
    from dhp_ray.measure.picture import draw
    from dhp_ray.runtime.job.measuring import Request, measure_here
    from dhp_ray.runtime.messages import RunError
    from dhp_ray.runtime.origins import model_name

    try:
        kind = choose(config.cluster.device).name
    except ValueError as error:
        raise ConfigError(str(error)) from None
    name = own["name"] or f"{kind}_{model_name(config)}"
    target = Path(own["out"] or CONF / "cost" / f"{name}.yaml")
    request = Request(name, int(own["ranks"] or 0), int(own["max_tokens"] or 0), own["quick"] == "true",
                      own["preempt"] == "true")
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TextColumn("left"),
               TimeRemainingColumn())
    console = Console(stderr=True)
    try:
        check_writable(target)
        with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
            task = bar.add_task("starting the ranks", total=1.0)
            measured = measure_here(config, request,
                                    lambda what, share: bar.update(task, description=what, completed=share))
        write(measured, target)
        draw(measured, target.with_suffix(".png"))
    except DataError as error:
        raise ConfigError(str(error)) from None
    except (MeasureError, RunError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"error: {target}: {error.strerror or first_line(error)}", file=sys.stderr)
        return 1
    print(measured.table())
    print(f"written: {target}, {target.with_suffix('.png')}")
    return 0


def check_writable(target: Path) -> None:
    """Raise OSError before minutes of measuring, not after them. (The file is written beside its place, then moved.)"""
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.is_dir():
        raise IsADirectoryError(EISDIR, strerror(EISDIR))
    probe = target.with_name(f".{target.name}.unfinished")
    probe.open("w").close()
    probe.unlink()


if __name__ == "__main__":
    sys.exit(run_command(main))
