"""What a run says and does when its driver actor is gone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayTaskError

from dhp_ray.runtime.job import job
from dhp_ray.runtime.messages import Notice, RunError
from dhp_ray.runtime.waits import Waits

told: list[Notice] = []


def driven(monkeypatch: pytest.MonkeyPatch, error: ActorDiedError) -> object:
    def run() -> None:
        raise error

    parts: Any = SimpleNamespace(starting=set, workers={}, grow=dict, show=told.append,
                                 run=SimpleNamespace(remote=run))
    monkeypatch.setattr(job, "start_driver", lambda *arguments: parts)
    monkeypatch.setattr(job.ray, "kill", lambda actor: None)
    return job._drive(parts, parts, parts, ("", 0), parts, Waits(), parts, takes_over=False)


def test_a_driver_that_cannot_be_made_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one would not be made either, for the same reason."""
    cause = RayTaskError("DriverActor.__init__", "Traceback\n  File job.py\nModuleNotFoundError: No module named 'x'",
                         ModuleNotFoundError("x"))
    with pytest.raises(RunError, match=r"^the driver failed: ModuleNotFoundError: No module named 'x'$"):
        driven(monkeypatch, ActorDiedError(cause))


def test_why_a_driver_is_lost_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told.clear()
    assert driven(monkeypatch, ActorDiedError()) is None
    assert told == [Notice("the driver actor died, another one takes over: The actor died unexpectedly before "
                           "finishing this task.")]
