"""Checks that refuse a run before Ray starts: all that this machine alone can tell, within a second, without Ray, torch
or transformers.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from dhp_ray.comm.device import ACCELERATORS, CPU, Accelerator, cores
from dhp_ray.config import Config, ConfigError, check_device, check_place, in_upload, places, refuse_relative_run
from dhp_ray.data.errors import DataError
from dhp_ray.data.families import PRESETS
from dhp_ray.data.families.base import Family
from dhp_ray.data.index import (
    KEPT_FROM_BYTES,
    Progress,
    check_answers,
    check_form,
    data_files,
    data_sources,
    held_out,
    index_fragments,
)
from dhp_ray.data.media import MediaLimits
from dhp_ray.data.model_folder import check_processor_files, family_in
from dhp_ray.model.files import EXPERT_TYPES, ModelError, check_model_folder
from dhp_ray.runtime.job.head import check_address, named_head
from dhp_ray.runtime.records.checkpoints import Checkpoints
from dhp_ray.runtime.records.run_records import check_run, last_committed
from dhp_ray.schema import MEASURE, Data, Evaluation
from dhp_ray.storage import Folder, StorageError, check_writable

STORES = ("s3", "gs", "gcs", "abfs", "abfss", "hdfs", "viewfs")  # only the driver looks there: it may take seconds


def check_here(config: Config, joined: bool = False) -> None:
    """Refuse a run that cannot start. `joined`: this process is in a cluster, which says itself what it has room for.
    """
    if not joined:
        check_address()
    if in_upload(Path.cwd()):
        refuse_relative_run(config)
    if not joined and named_head()[0] in ("", "local"):
        check_workers(config, resources_here())
    for name, section, item in places(config):
        check_place(name, getattr(section, item.name), item.metadata["path"])
    _check_model(config.model.path)
    family = _family(config)
    for source in data_sources(config.data):
        if source.format == "synthetic" and not family.marks:
            raise ConfigError("data.format: got synthetic, whose samples have images, and the model is text-only; "
                              "allowed: text in another format")
        with _refusing("data.path"):
            check_form(source)
    if config.eval.path:
        with _refusing("eval.path"):
            check_form(held_out(config.data, config.eval.path))
    if config.planner.cost not in ("", MEASURE):
        from dhp_ray.planner.cost.origin import CostFile  # numpy and more take a while to import
        from dhp_ray.planner.errors import PlanError

        try:
            CostFile.load(config.planner.cost)
        except PlanError as error:
            raise ConfigError(f"planner.cost: {error}") from None
    if config.run.dir.partition("://")[0] not in STORES:
        _check_run_folder(config)


def check_evaluation_here(config: Evaluation) -> None:
    """Refuse an evaluation as `check_here` does; also if no sample has an answer, or it would overwrite the samples."""
    check_address()
    for name, section, item in places(config):
        if name in ("model.path", "data.image_root", "eval.path", "eval.output"):
            check_place(name, getattr(section, item.name), item.metadata["path"])
    _check_output(config.eval.output, config.eval.path)
    if named_head()[0] in ("", "local"):
        check_room(config, resources_here())
    _check_model(config.model.path)
    with _refusing("eval.path"):
        samples = held_out(config.data, config.eval.path)
        check_form(samples)
        with progress_bar(samples) as progress:
            check_answers(index_fragments(samples, progress), MediaLimits.of(samples).max_file_bytes)


def check_measurement_here(config: Config, ranks: int) -> None:
    """Refuse a measurement (jobs/measure.py) that this machine cannot make, on so many ranks; 0: on any number."""
    if config.train.activation_checkpointing == "auto":
        raise ConfigError("train.activation_checkpointing: got auto; allowed here: the value that is to be measured")
    _check_model(config.model.path)
    _family(config)
    here = {str(kind.resource): float(kind.num_devices()) for kind in ACCELERATORS.values()}
    kind = device_of(config.cluster.device, here)
    there = devices_here(kind)
    if not there:
        raise ConfigError(f"cluster.device: got '{kind.name}', but this machine has no {kind.name} device; auto takes "
                          "what there is")
    if ranks > there:
        raise ConfigError(f"ranks: got {ranks}; this machine has {there} {kind.name} "
                          f"{'cores' if kind is CPU else 'devices'}; allowed: at most {there}")


def devices_here(kind: Accelerator) -> int:
    """Return how many ranks of a measurement this machine has room for."""
    return len(cores()) if kind is CPU else kind.num_devices()


def choose_step(checkpoints: Checkpoints, step: str) -> int:
    """Return the step of the whole checkpoint that is asked for, or of the newest one, `latest`."""
    kept = checkpoints.complete()
    if not kept:
        raise ConfigError(f"checkpoint: {checkpoints.folder.uri} holds no whole checkpoint; allowed: a run that has "
                          "saved one (checkpoint.every_steps)")
    if step == "latest":
        return kept[-1]
    if int(step) not in kept:
        raise ConfigError(f"checkpoint: got {step}; allowed, of those kept: {', '.join(map(str, kept))}, or latest")
    return int(step)


def refuse_export(config: Config, out: Path) -> None:
    """Refuse an export that would write over anything, cannot be written (OSError), or whose model is not here."""
    if out.is_symlink() or (out.exists() and (not out.is_dir() or next(out.iterdir(), None) is not None)):
        raise ConfigError(f"out: {out} exists and is not an empty folder; allowed: one that is empty or new")
    check_writable(out.with_name(f".{out.name}.unfinished") / "config.json")
    _check_model(config.model.path)


@contextmanager
def _refusing(key: str) -> Iterator[None]:
    """Turn errors of a model or of data into errors of a configuration key."""
    try:
        yield
    except (ModelError, DataError) as error:
        raise ConfigError(re.sub(r"^data\.path", key, str(error))) from None
    except OSError as error:  # a name that is too long, a folder that may not be listed
        raise ConfigError(f"{key}: {error.filename}: {error.strerror}") from None


def resources_here() -> dict[str, float]:
    """Return the most that a cluster that Ray starts on this machine would have, by Ray's resource names."""
    here: dict[str, float] = {kind.resource or "CPU": kind.num_devices() for kind in ACCELERATORS.values()}
    try:
        given = json.loads(os.environ.get("RAY_OVERRIDE_RESOURCES", "{}"))
    except ValueError:
        given = {}  # Ray reports what is wrong with it
    given = given if isinstance(given, dict) else {}
    return here | {name: amount for name, amount in given.items() if isinstance(amount, (int, float))}


def check_workers(config: Config, here: dict[str, float]) -> None:
    """Refuse workers for which these resources do not suffice, or whose device cannot do what is asked for."""
    check_room(config, here)
    check_device(replace(config, cluster=replace(config.cluster, device=device_of(config.cluster.device, here).name)))


def check_room(config: Config, here: dict[str, float]) -> None:
    """Refuse workers that a cluster with these resources has no room for."""
    cluster, kind = config.cluster, device_of(config.cluster.device, here)
    resource = kind.resource
    if resource and not here[resource]:
        lack = (f"{kind.visible}={os.environ[kind.visible]!r} shows none" if kind.visible in os.environ
                else f"this machine has no {kind.files}")
        raise ConfigError(f"cluster.device: got {cluster.device!r}; {lack}; allowed: cpu, auto, or a Ray cluster with "
                          "such devices (its head in RAY_ADDRESS)")
    needs = {"CPU": cluster.cpus_per_worker * cluster.num_workers}
    if resource:
        needs[resource] = 1.0 * cluster.num_workers
    for name, amount in needs.items():
        if amount > here[name] + 1e-6:
            fit = int(here[name] / (cluster.cpus_per_worker if name == "CPU" else 1) + 1e-6)
            fewer = f"at most {fit}, or " if fit else ""
            raise ConfigError(f"cluster.num_workers: got {cluster.num_workers}; they need {amount:g} {name}, this "
                              f"machine has {here[name]:g}; allowed: {fewer}a Ray cluster with more nodes (its head in "
                              "RAY_ADDRESS)")


def device_of(name: str, resources: dict[str, float]) -> Accelerator:
    """Return the device that workers get in a cluster with these resources; for `auto`, the best kind."""
    if name != "auto":
        return ACCELERATORS[name]
    return next((kind for kind in (ACCELERATORS["npu"], ACCELERATORS["cuda"]) if resources.get(str(kind.resource))),
                CPU)


def _check_model(path: str) -> None:
    """Refuse a folder that holds no model, or no processor; empty: the model is a preset."""
    if not path:
        return
    check_place("model.path", path, "folder")
    with _refusing("model.path"):
        check_model_folder(path)
        check_processor_files(Path(path))


def _family(config: Config) -> type[Family]:
    """Return the model's family; refuse an unknown preset, and parts and experts that it does not have."""
    if config.model.preset and config.model.preset not in PRESETS:
        raise ConfigError(f"model.preset: got {config.model.preset!r}; allowed: {', '.join(sorted(PRESETS))}")
    family = family_in(Path(config.model.path)) if config.model.path else PRESETS[config.model.preset]
    if config.train.freeze and not family.marks:
        raise ConfigError(f"train.freeze: got {', '.join(config.train.freeze)}, and the model is text-only; "
                          "allowed: nothing")
    lora = config.train.lora
    if lora.dropout and family.marks and "vision" not in config.train.freeze and "all-linear" in lora.targets:
        raise ConfigError(f"train.lora.dropout: got {lora.dropout} with train.lora.targets=all-linear, which adapts "
                          "the vision encoder too; allowed: 0, or train.freeze=vision")
    for name, *allowed in (("balance_loss", 0), ("router_z_loss", 0), ("expert_parallel", "auto", "1")):
        if (value := getattr(config.train, name)) not in allowed and family.name not in EXPERT_TYPES:
            raise ConfigError(f"train.{name}: got {value}, and the model ({family.name}) has no experts; allowed: "
                              f"{', '.join(map(str, allowed))}")
    return family


def _check_output(output: str, samples: str) -> None:
    """Refuse an output that is the file of samples, lies in their folder, or cannot be written."""
    written, read = os.path.realpath(output), os.path.realpath(samples)
    if written == read or (os.path.exists(written) and os.path.exists(read) and os.path.samefile(written, read)):
        raise ConfigError(f"eval.output: got {output!r}, the file of eval.path; allowed: another file")
    if os.path.commonpath([written, read]) == read:
        raise ConfigError(f"eval.output: got {output!r}, inside eval.path ({samples}); allowed: a file outside of it")
    try:
        check_writable(Path(output))
    except OSError as error:
        raise ConfigError(f"eval.output: {output} cannot be written: {error.strerror}") from None


def _check_run_folder(config: Config) -> None:
    try:
        folder = Folder(config.run.dir)
        if local := folder.local_path():
            check_place("run.dir", str(local), "folder or URI")
            check_run(folder, config, last_committed(folder))
        folder.probe()
    except StorageError as error:
        raise ConfigError(f"run.dir: {error}") from None


LINE_EVERY_S = 10.0


def index_ahead(data: Data) -> None:
    """Make the index of large data sets that have none yet. Errors in the data are left to the driver to report."""
    for source in data_sources(data):
        try:
            if sum(os.path.getsize(path) for path in data_files(source)) >= KEPT_FROM_BYTES:
                with progress_bar(source) as progress:
                    index_fragments(source, progress)
        except (DataError, OSError):
            return


@contextmanager
def progress_bar(data: Data) -> Iterator[Progress]:
    """Show progress on standard error: a bar on a terminal, else a line now and then; nothing if nothing is done."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Bar(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(f"indexing {data.path}", total=None, visible=False)
        said = time.monotonic()

        def show(done: int, total: int) -> None:
            nonlocal said
            bar.update(task, completed=done, total=total, visible=True)
            if not console.is_terminal and time.monotonic() - said >= LINE_EVERY_S:
                said = time.monotonic()
                print(f"indexing {data.path}: {100 * done // total} %", file=sys.stderr, flush=True)

        yield show
