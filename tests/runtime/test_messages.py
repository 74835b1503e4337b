"""What is told of the death of an actor."""

from __future__ import annotations

import pytest
from ray.core.generated.common_pb2 import ActorDiedErrorContext
from ray.exceptions import ActorDiedError, RayError

from dhp_ray.runtime.messages import death_of

GONE = ("The actor is dead because its worker process has died. Worker exit type: NODE_OUT_OF_MEMORY "
        "Worker exit detail: ")
MEMORY = ("Task was killed due to the node running low on memory.\nMemory on the node (IP: 10.0.0.1) was 61GB / 64GB "
          "(0.95)\nTop 10 memory users:\nPID\tMEM(GB)\tCOMMAND\n 7\t30\tray::Worker")


def died(reason: str) -> ActorDiedError:
    return ActorDiedError(ActorDiedErrorContext(actor_id=b"0" * 16, class_name="Worker", pid=7, error_message=reason))


@pytest.mark.parametrize(("error", "words"), [
    (died(GONE + MEMORY), "Task was killed due to the node running low on memory."),
    (died("The actor is dead because it was killed by `ray.kill`."),
     "The actor is dead because it was killed by `ray.kill`."),
    (ActorDiedError(), "The actor died unexpectedly before finishing this task."),
    (RayError(), "RayError")])
def test_a_death_is_told_in_one_line_that_names_its_cause(error: RayError, words: str) -> None:
    assert death_of(error) == words


def test_what_ray_says_at_length_is_cut() -> None:
    assert len(death_of(died(GONE + "why " * 500))) == 200
