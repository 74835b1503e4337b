"""How a run ends: with its model, early with a checkpoint of its last step, or with an error."""

from __future__ import annotations

from dhp_ray.errors import first_line
from dhp_ray.run_folder import MODEL_FOLDER
from dhp_ray.runtime.driver.commit import Commits
from dhp_ray.runtime.driver.session import Session
from dhp_ray.runtime.messages import RunFinished
from dhp_ray.storage import Folder

PICTURE_S = 0.5
"""Seconds that a run that ends early waits for the picture of a step."""


def save_last(session: Session, commits: Commits) -> None:
    """Save the state after the last step if no checkpoint has it: the group broke, or the run was asked to end, after
    that save was due; or it was not due, and data ends the run.
    """
    commits.finish_saves()
    last_step = session.records.last_step
    if last_step and session.checkpoints.newest_step() < last_step:
        commits.save(last_step)
        commits.finish_saves()


def export(session: Session) -> None:
    """Write the model of a complete run."""
    with session.group.waits.on("the model to be written"):
        session.group.call("export", MODEL_FOLDER)
    session.group.call("leave")


def finish(session: Session, stopping: str) -> RunFinished:
    """Close what the run writes; `stopping`: why it ends early."""
    session.current.dispatcher.stop()
    if not stopping:
        session.stream.close()
    session.watch.close(PICTURE_S if stopping else None)
    session.scalars.close()
    session.records.close()
    if stopping:
        return RunFinished("", f"stopped after step {session.records.last_step}: {stopping}{_way_back(session)}",
                           status=1)
    return RunFinished(f"done: model in {Folder(session.config.run.dir).child(MODEL_FOLDER).uri}")


def untrained(session: Session) -> RunFinished:
    """End a run whose steps have all been made, and have trained nothing. There is no way back to it."""
    session.records.flush()
    if last_step := session.records.last_step:
        return RunFinished("", f"no step of {last_step} has trained anything: none of their samples can be used (see "
                           "skipped.jsonl); allowed: other data, and another run.dir", status=1)
    return RunFinished("", f"batch.global_samples: got {session.config.batch.global_samples}; no epoch has so many "
                       "usable samples, and batch.drop_last=true leaves a smaller batch out", status=1)


def failed(session: Session | None, error: str) -> RunFinished:
    """End the run with an error, after bringing the logs up to date if they can still be written."""
    try:
        if session:
            session.records.flush()
        return RunFinished("", f"{error}{_way_back(session)}", status=1)
    except Exception as failure:  # most likely the storage, which also caused the error
        besides = "" if first_line(failure) == error else f"; besides: {first_line(failure)}"
        return RunFinished("", f"{error}{besides}", status=1)


def _way_back(session: Session | None) -> str:
    """Say how to continue a run that ended early."""
    newest = session.checkpoints.newest_step() if session else 0
    return f"; the newest checkpoint is step {newest}: start the same command again to go on from it" if newest else ""
