"""The actor of the driver: tests/integration has it at work."""

from __future__ import annotations

import subprocess
import sys


def test_the_jobs_process_imports_nothing_that_takes_long_for_the_driver() -> None:
    """It would delay the workers and the driver, which import it themselves."""
    code = ("import sys; import dhp_ray.runtime.job.job, dhp_ray.runtime.driver.actor, dhp_ray.runtime.worker.worker; "
            "print([name for name in ('torch', 'numba', 'ray.data', 'transformers') if name in sys.modules])")
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "[]\n"
