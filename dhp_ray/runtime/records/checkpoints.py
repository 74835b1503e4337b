"""The checkpoints under run.dir: which are whole, which one is the newest, and which may be deleted.

A checkpoint is a folder `checkpoints/step_000020/`; its `manifest.json` is written last, and names the generation whose
files count: those of others are not read, and go once it is written.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from dhp_ray.run_folder import CHECKPOINTS_FOLDER, MANIFEST_FILE, checkpoint_folder, step_of, tensors_folder
from dhp_ray.storage import Folder, StorageError


@dataclass(frozen=True)
class Manifest:
    """What a resumed run needs besides the tensors: `cursor` is the position of the data stream after `step`; `cost`
    has the refitted cost terms in force, and the prior terms that they come from (empty: nothing is refitted).
    """

    step: int
    cursor: dict[str, Any]
    num_ranks: int
    sync: str
    generation: int = 0
    cost: dict[str, dict[str, float]] = field(default_factory=dict)

    @property
    def files(self) -> str:
        """The folder of the tensors, in the run folder."""
        return tensors_folder(self.step, self.generation)


class Checkpoints:
    """The folder `checkpoints/` of a run."""

    def __init__(self, folder: Folder, keep: int) -> None:
        self.folder, self.keep = folder, keep

    def complete(self) -> list[int]:
        """Steps of the whole checkpoints, oldest first."""
        return [step for step in self._steps() if self.folder.exists(f"{checkpoint_folder(step)}/{MANIFEST_FILE}")]

    def _steps(self) -> list[int]:
        """Steps that have a folder, oldest first."""
        return sorted(step for name in self.folder.names(CHECKPOINTS_FOLDER) if (step := step_of(name)) is not None)

    def manifest(self, step: int) -> Manifest:
        """Return the manifest of the whole checkpoint of `step`. StorageError: the file is none; one line."""
        name = f"{checkpoint_folder(step)}/{MANIFEST_FILE}"
        try:
            return Manifest(**json.loads(self.folder.read(name)))
        except (ValueError, TypeError):
            raise StorageError(f"{self.folder.uri}/{name}: not the manifest of a checkpoint; allowed: one that a run "
                               "has written, or no such folder") from None

    def newest_step(self) -> int:
        """The step of the newest whole checkpoint; 0 if there is none."""
        return (self.complete() or [0])[-1]

    def seal(self, manifest: Manifest) -> list[str]:
        """Write the manifest, which makes the checkpoint whole; then delete the oldest, and what failed saves have
        left. Returns a line for each thing that could not be deleted.
        """
        here = checkpoint_folder(manifest.step)
        self.folder.write(f"{here}/{MANIFEST_FILE}", json.dumps(asdict(manifest)).encode())
        others = [f"{here}/{name}" for name in self.folder.names(here) if manifest.generation and name != MANIFEST_FILE]
        kept = self.complete()[-self.keep :]
        old = [checkpoint_folder(step) for step in self._steps() if step < manifest.step and step not in kept]
        return self._delete([*(name for name in others if name != manifest.files), *old])

    def discard_after(self, step: int) -> list[str]:
        """Delete half-written checkpoints and those after `step`; a line for each that could not be deleted."""
        whole = self.complete()
        return self._delete([checkpoint_folder(found) for found in self._steps() if found > step or found not in whole])

    def _delete(self, names: Iterable[str]) -> list[str]:
        failures = []
        for name in names:
            # first, so that nothing that is left counts as a whole checkpoint
            self.folder.delete(f"{name}/{MANIFEST_FILE}")
            try:
                self.folder.delete(name)
            except StorageError as error:  # a rank that gave up a save may still write there
                failures.append(str(error))
        return failures
