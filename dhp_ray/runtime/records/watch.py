"""What a user can look at while a run goes on: pictures of plans for TensorBoard and traces for Perfetto, made in a
background thread.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from io import BytesIO

from dhp_ray.planner.plan.types import Plan
from dhp_ray.report.trace import trace_of
from dhp_ray.run_folder import trace_file
from dhp_ray.runtime.records.tensorboard import ScalarLog
from dhp_ray.spooled_log import json_text
from dhp_ray.storage import Folder
from dhp_ray.train.results import StepResult

PICTURE = "plan/planned_and_measured"


class Watch:
    """Shows step 1 and every `every_steps`-th step: the plan next to what the ranks measured, as a picture in
    TensorBoard and as `trace/step_*.json`.

    `every_steps` 0 shows none. No step waits for this: a step that is due while an earlier one is still being drawn is
    left out.
    """

    def __init__(self, folder: Folder, every_steps: int) -> None:
        self._folder, self._every_steps = folder, every_steps
        self._thread: threading.Thread | None = None

    def step(self, step: int, plan: Plan, results: Sequence[StepResult], scalars: ScalarLog) -> bool:
        """Start to show a committed step if it is due; returns whether it was started."""
        due = self._every_steps and (step == 1 or step % self._every_steps == 0)
        if not due or (self._thread is not None and self._thread.is_alive()):
            return False
        self._thread = threading.Thread(target=self._show, args=(step, plan, tuple(results), scalars), name="watch",
                                        daemon=True)
        self._thread.start()
        return True

    def close(self, timeout_s: float | None = None) -> None:
        """Wait at most `timeout_s` until everything started is written; call it before the ScalarLog is closed."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _show(self, step: int, plan: Plan, results: Sequence[StepResult], scalars: ScalarLog) -> None:
        from dhp_ray.report.step_picture import draw_step  # matplotlib takes a second to import

        try:
            self._folder.write(trace_file(step), (json_text(trace_of(plan, results)) + "\n").encode())
            picture = BytesIO()
            draw_step(plan, results, picture)
            scalars.image(PICTURE, picture.getvalue(), step)
        except Exception as error:  # a failure to show a step must not end the run; the ledger does not depend on it
            print(f"step {step} is not shown: {type(error).__name__}: {error}", file=sys.stderr)
