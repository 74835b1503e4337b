"""Plans one global batch of sequence lengths, prints the plan as a table and writes it to a file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dhp_ray.errors import about, counted, printable
from dhp_ray.runtime.job.signals import ShutdownSignals
from dhp_ray.streams import run_command  # all other imports come once signals are handled

if TYPE_CHECKING:
    from dhp_ray.planner import Plan

HELP = """usage: python jobs/plan.py lengths=FILE.csv num_ranks=N [key=value ...]
       python jobs/plan.py replay=plan.json

Plans one global batch, prints a table, and writes the plan.

  lengths=FILE.csv       one sequence a row; column num_tokens, and vision_tokens (part of num_tokens) if there is one
  replay=FILE.json       plan again from the inputs of a plan file, with its own settings: only out= and picture= beside
  num_ranks=N            ranks of the cluster
  ranks_per_node=8       ranks of a node
  nodes=                 ranks of each node, comma-separated, where nodes differ: nodes=8,8,4
                         in place of num_ranks= and ranks_per_node=
  tokens_per_rank=8192   most tokens of one pack on one rank
  speeds=                speed of each rank, comma-separated (1.0 = nominal); empty: all 1.0
  sync=step              step: ranks meet at the end of the step; micro_batch: at every layer
  planner=dhp            {planners}
  cost=                  cost file; empty: conf/cost/cuda.yaml
  out=                   write the plan here, as JSON
  picture=               draw the plan here, as PNG

Exit status: 0 on success, 2 on a bad argument or batch, 1 on failure."""

DEFAULTS = {"lengths": "", "replay": "", "num_ranks": "", "ranks_per_node": "8", "nodes": "", "tokens_per_rank": "8192",
            "speeds": "", "sync": "step",
            "planner": "dhp", "cost": "", "out": "", "picture": ""}
DEFAULT_COST = Path(__file__).resolve().parent.parent / "conf" / "cost" / "cuda.yaml"


MOST = 10**9
"""The largest number that counts as a length, or as tokens."""
MOST_RANKS = 100_000


class ArgumentError(ValueError):
    """One line for the user: the argument, what is wrong with it, what is allowed."""


def main(argv: list[str]) -> int:
    import json
    import os

    from dhp_ray.config import local_path
    from dhp_ray.schema import PLANNERS

    if not argv or {"-h", "--help"} & set(argv):
        print(HELP.format(planners=", ".join(PLANNERS)))
        return 0 if argv else 2
    try:
        arguments = read_arguments(argv)
        targets = {name: local_path(name, arguments[name]) for name in ("out", "picture") if arguments[name]}
        files = {name: local_path(name, arguments[name]) for name in ("lengths", "replay", "cost") if arguments[name]}
        files = {"cost": DEFAULT_COST} | files | targets
        for into, other in ((into, other) for into in targets for other in files if into != other):
            if os.path.realpath(files[into]) == os.path.realpath(files[other]):
                raise ArgumentError(f"{into}: got {arguments[into]!r}, the file of {other}=; allowed: another file")
    except ValueError as error:
        return failed(error, 2)
    try:
        check_outputs(targets)
        plan, compile_s = planned(recorded(arguments) if arguments["replay"] else given(arguments))
    except OSError as error:
        return failed(error, 1)
    except ValueError as error:  # PlanError, ConfigError and ArgumentError: one line each
        return failed(error, 2)
    from dhp_ray.storage import storage_errors

    try:
        for name, target in targets.items():
            with storage_errors(f"{name}: {target}", "cannot be written"):
                target.parent.mkdir(parents=True, exist_ok=True)
                if name == "out":
                    target.write_text(json.dumps(plan.to_json()))
                else:
                    from dhp_ray.report.step_picture import draw_plan

                    draw_plan(plan, target)
    except OSError as error:
        return failed(error, 1)
    print_table(plan)
    print(
        f"compiling:       {compile_s:.1f} s before it, once a process: compiled code is read from its cache, or made"
    )
    return 0


def failed(error: Exception, status: int) -> int:
    print(f"error: {printable(str(error))}", file=sys.stderr)
    return status


def check_outputs(targets: dict[str, Path]) -> None:
    """Refuse what cannot be written, before the work."""
    from dhp_ray.storage import check_writable

    for name, target in targets.items():
        try:
            check_writable(target)
        except OSError as error:
            raise OSError(f"{name}: {target} cannot be written: {error.strerror}") from None
    if "picture" in targets:
        from matplotlib.figure import Figure

        kinds, kind = Figure().canvas.get_supported_filetypes(), targets["picture"].suffix[1:].lower()
        if kind and kind not in kinds:
            raise ArgumentError(f"picture: got {str(targets['picture'])!r}; allowed: a name ending in "
                                f"{', '.join(f'.{name}' for name in sorted(kinds))}")


def read_arguments(argv: list[str]) -> dict[str, str]:
    """The values by name."""
    arguments, given = dict(DEFAULTS), []
    for word in argv:
        name, equals, value = word.partition("=")
        if not equals or name not in DEFAULTS:
            raise ArgumentError(f"{word}: no such argument; allowed: {', '.join(f'{name}=' for name in DEFAULTS)}")
        arguments[name] = value
        given.append(name)
    if bool(arguments["lengths"]) == bool(arguments["replay"]):
        raise ArgumentError("lengths: give lengths=FILE.csv or replay=FILE.json, one of the two")
    if arguments["replay"] and (others := [name for name in given if name not in ("replay", "out", "picture")]):
        raise ArgumentError(f"{others[0]}: got {arguments[others[0]]!r} with replay={arguments['replay']}; allowed: "
                            "replay= with out= and picture= alone (the file has all other settings)")
    return arguments


def planned(inputs: dict[str, Any]) -> tuple[Plan, float]:
    """The plan, and the seconds that compiled code took to be there. Those are no part of the planning time, and a
    wrong argument does not wait for them.
    """
    from dhp_ray.planner import checked_problem, plan_batch, warm_up

    checked_problem(**inputs)
    compile_s = warm_up()
    return plan_batch(**inputs), compile_s


def given(arguments: dict[str, str]) -> dict[str, Any]:
    """The inputs of `plan_batch` that the arguments name."""
    from dhp_ray.config import local_path
    from dhp_ray.planner import ClusterSpec, CostModel

    tokens_per_rank, speeds = count(arguments["tokens_per_rank"], "tokens_per_rank"), numbers(arguments["speeds"])
    if arguments["nodes"]:
        cluster = ClusterSpec.of_nodes(nodes_of(arguments), tokens_per_rank, speeds)
    else:
        cluster = ClusterSpec(count(arguments["num_ranks"], "num_ranks", most=MOST_RANKS),
                              count(arguments["ranks_per_node"], "ranks_per_node", most=MOST_RANKS), tokens_per_rank,
                              speeds)
    cost = CostModel.load(local_path("cost", arguments["cost"]) if arguments["cost"] else DEFAULT_COST)
    return {"samples": read_lengths(local_path("lengths", arguments["lengths"])), "cluster": cluster, "cost": cost,
            "planner": arguments["planner"], "sync": arguments["sync"]}


def recorded(arguments: dict[str, str]) -> dict[str, Any]:
    """The inputs of `plan_batch` that a plan file holds."""
    import json

    from dhp_ray.config import local_path
    from dhp_ray.planner import PlanError, recorded_inputs

    path = local_path("replay", arguments["replay"])
    try:
        tree = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ArgumentError(f"replay: {path} cannot be read: {error}") from None
    with about(PlanError, f"replay: {path}"):
        return recorded_inputs(tree)


def read_lengths(path: Path) -> list[Any]:
    """A CSV's sequences; `sequences` of the plan are its row numbers, from 0 after the header."""
    import csv

    from dhp_ray.planner import Sample

    samples = []
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            rows = csv.DictReader(file, skipinitialspace=True)
            if "num_tokens" not in (rows.fieldnames or ()):
                raise ArgumentError(
                    f"lengths: {path} has columns {', '.join(rows.fieldnames or ()) or '(none)'}; a column num_tokens "
                    "is needed"
                )
            for index, row in enumerate(rows):
                where = f"lengths: {path} line {rows.line_num}"
                if None in row:  # of a number with commas, say
                    raise ArgumentError(f"{where} has {len(row) - 1 + len(row[None])} cells; allowed: "
                                        f"{len(row) - 1}, as in its first line")
                tokens = count(row["num_tokens"], f"{where}: num_tokens")
                vision = count(row["vision_tokens"], f"{where}: vision_tokens", 0) if "vision_tokens" in row else 0
                if vision > tokens:
                    raise ArgumentError(f"{where}: vision_tokens: got {vision}; allowed: at most num_tokens ({tokens})")
                samples.append(Sample(str(index), tokens - vision, vision))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ArgumentError(f"lengths: {path} cannot be read: {error}") from None
    return samples


def count(text: str | None, name: str, minimum: int = 1, most: int = MOST) -> int:
    try:
        value = int(text or "")
    except ValueError:
        value = minimum - 1
    if value < minimum:
        raise ArgumentError(f"{name}: got {text!r}; allowed: a whole number of at least {minimum}")
    if value > most:
        raise ArgumentError(f"{name}: got {text}; allowed: at most {most}")
    return value


def nodes_of(arguments: dict[str, str]) -> list[int]:
    """The node of each rank, from the sizes of the nodes."""
    sizes = [count(size, "nodes", most=MOST_RANKS) for size in arguments["nodes"].split(",")]
    if sum(sizes) > MOST_RANKS:
        raise ArgumentError(f"nodes: got {sum(sizes)} ranks; allowed: at most {MOST_RANKS}")
    nodes = [node for node, size in enumerate(sizes) for _ in range(size)]
    if arguments["num_ranks"] and count(arguments["num_ranks"], "num_ranks") != len(nodes):
        raise ArgumentError(
            f"num_ranks: got {arguments['num_ranks']}; nodes={arguments['nodes']} has {len(nodes)} ranks"
        )
    return nodes


def numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(word) for word in text.split(",")) if text else ()
    except ValueError:
        raise ArgumentError(f"speeds: got {text!r}; allowed: numbers above 0, comma-separated") from None


def print_table(plan: Plan) -> None:
    """Packs by degree, then the figures of the whole plan."""
    from dhp_ray.planner.timeline import apart_timeline, fixed_starts, idle_fraction

    print(f"{'degree':>6} {'packs':>7} {'sequences':>10} {'tokens':>11} {'longest':>8} {'mean_s':>9} {'max_s':>9}")
    for degree, packs in plan.degrees().items():
        groups = [group for group in plan.groups if group.degree == degree]
        tokens = [plan.samples[row].num_tokens for group in groups for row in group.sequences]
        times = [group.predicted_time_s for group in groups]
        print(
            f"{degree:>6} {packs:>7} {len(tokens):>10} {sum(tokens):>11} {max(tokens):>8} {sum(times) / packs:>9.4f} "
            f"{max(times):>9.4f}"
        )
    gap = plan.predicted_time_s / plan.lower_bound_s - 1 if plan.lower_bound_s else 0.0
    print(f"planner:         {plan.planner}, sync={plan.sync}")
    print(
        f"batch:           {counted(len(plan.samples), 'sequence')}, "
        f"{sum(sample.num_tokens for sample in plan.samples)} tokens, {counted(plan.cluster.num_ranks, 'rank')}"
    )
    print(f"micro-batches:   {len({group.micro_batch for group in plan.groups})}")
    print(f"process groups:  {len(plan.process_groups())}")
    num_images = sum(len(sample.vision_grids) for sample in plan.samples)
    if apart := apart_timeline(plan):
        kept = "kept" if plan.vision.keeps else "computed again"
        passes = f", {plan.vision.num_passes} passes on every rank" if plan.vision.num_passes else ""
        num_split = sum(len(group.splits) for group in plan.groups)
        passes += f", {num_split} of them by several ranks each" if num_split else ""
        print(f"images:          {num_images}, apart from the packs: {apart.encoded_s.max():.4f} s before them, "
              f"{(apart.end_s - apart.backward_s).max():.4f} s after, activations {kept}{passes}")
    elif num_images:
        print(f"images:          {num_images}, encoded in the packs")
    if shares := [group.offload for group in plan.groups if group.offload]:
        print(f"offload:         {len(shares)} packs, up to {100 * max(shares):.0f} % of activations in host memory")
    if shares := [group.recomputed for group in plan.groups if group.recomputed]:
        print(f"recomputation:   {len(shares)} packs, up to {100 * max(shares):.0f} % of layers")
    print(f"predicted time:  {plan.predicted_time_s:.4f} s")
    print(f"lower bound:     {plan.lower_bound_s:.4f} s (the plan is {100 * gap:.1f} % above)")
    rounds = len(fixed_starts(plan))
    print(f"fixed costs:     {plan.fixed_s * rounds:.4f} s of it on every rank, {rounds} x {plan.fixed_s:.4f} s")
    print(f"idle:            {100 * idle_fraction(plan):.1f} % of rank time: neither packs nor fixed costs")
    print(f"planning time:   {1e3 * plan.planning_time_s:.1f} ms")


if __name__ == "__main__":
    sys.exit(run_command(lambda argv: ShutdownSignals("before the end").run(lambda: main(argv))))
