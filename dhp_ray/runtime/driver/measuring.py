"""`planner.cost=measure`: before a run's first step its workers measure what packs cost there, and the run keeps the
result.

    first start   join a generation of their own | part after part | leave      run.dir/cost.yaml, cost.png
    later starts  run.dir/cost.yaml, if it is of the same model, devices and settings; else measured again

The workers' state is useless afterwards: they join the run's first generation as if they had just started.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from io import BytesIO

import yaml

from dhp_ray.config import Config
from dhp_ray.measure.cost_file import Session, measured_cost
from dhp_ray.measure.observations import MeasureError
from dhp_ray.measure.picture import draw
from dhp_ray.measure.rounds import PARTS, Spec
from dhp_ray.measure.timings import PartResult
from dhp_ray.planner.checks import PlanError
from dhp_ray.planner.cost_constants import constants_of_text
from dhp_ray.planner.cost_origin import CostFile
from dhp_ray.planner.mode import Mode
from dhp_ray.run_folder import COST_FILE, COST_PICTURE
from dhp_ray.runtime.driver.group import WorkerGroup
from dhp_ray.runtime.driver.modes import cost_of, difference_from, has_fused_operators, memory_of
from dhp_ray.runtime.messages import FromCheckpoint, Notice, RunError, Tell
from dhp_ray.runtime.origins import model_name, origin_of
from dhp_ray.storage import Folder


def kept_cost(config: Config, folder: Folder, group: WorkerGroup, mode: Mode) -> tuple[CostFile | None, str]:
    """Return the costs that an earlier start left in the run folder, if they are of this run; else the reason why they
    are not used (empty: there are none).
    """
    if not folder.exists(COST_FILE):
        return None, ""
    try:
        file = CostFile.parsed(constants_of_text(folder.read(COST_FILE), COST_FILE), COST_FILE)
    except PlanError as error:
        return None, str(error).removeprefix(f"{COST_FILE}: ")
    if file.origin is None:
        return None, "it does not say what it was measured on"
    other = difference_from(file.origin, config, group, memory_of(config, group, mode))
    return (None, other) if other else (file, "")


def measure_costs(
    config: Config, folder: Folder, group: WorkerGroup, mode: Mode, generation: int, store: tuple[str, int],
    pool_groups: int, tell: Tell,
) -> CostFile:
    """Measure costs on the workers, in a generation of their own, and write them to the run folder.

    Raises:
        RunError: too little could be measured, or a worker failed.
    """
    memory = memory_of(config, group, mode)
    tell(Notice(f"measuring costs on {group.size} workers, for {COST_FILE} (planner.cost=measure)"))
    with group.waits.on("the workers to load the model and to meet"):
        group.collect(group.join(generation, store, (), pool_groups, mode, [FromCheckpoint()] * group.size, 0))
    results: dict[str, Sequence[PartResult]] = {}
    spec: Spec
    for number, part in enumerate(PARTS, 1):
        with group.waits.on(f"costs to be measured ({part}, {number} of {len(PARTS)})"):
            found = group.call("measure", part, int(config.planner.tokens_per_rank))
        spec = found[0][0]
        if found[0][1] is not None:
            results[part] = [result for _, result in found]
    group.call("leave")
    described = group.members[0].described
    origin = origin_of(config, memory, described["device"], described["device_name"], group.size,
                       has_fused_operators(group))
    try:
        known = cost_of(replace(config, planner=replace(config.planner, cost="")), group, mode)
        measured = measured_cost([Session(spec, results)], origin, memory, known, model_name(config))
    except MeasureError as error:
        raise RunError(f"planner.cost: got measure; {error}") from None
    text = measured.text()
    folder.write(COST_FILE, text.encode())
    picture = BytesIO()
    draw(measured, picture)
    folder.write(COST_PICTURE, picture.getvalue())
    errors = measured.sections["errors"]["packs"]
    tell(Notice(f"costs measured: packs are off by {100 * errors['median']:.1f} % in the median; kept in {COST_FILE}"))
    return CostFile.parsed(yaml.safe_load(text), COST_FILE)  # rounded as later starts read it
