"""When checkpoints are begun, waited for and sealed."""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dhp_ray.config import CONF
from dhp_ray.planner import ClusterSpec, CostModel, Sample, plan_batch
from dhp_ray.planner.memory.model_shape import ModelShape
from dhp_ray.planner.mode import Mode
from dhp_ray.runtime.driver.commit import Commits
from dhp_ray.runtime.driver.dispatch import FinishedStep
from dhp_ray.runtime.driver.feedback import TimeScale
from dhp_ray.runtime.messages import Message, Notice
from dhp_ray.runtime.records.checkpoints import Manifest
from dhp_ray.runtime.records.run_records import RunRecords
from dhp_ray.storage import STORAGE_TIMEOUT_S, Folder
from dhp_ray.train.results import PackTime, StepResult

COST = CostModel(4e-8, 5e-5, 4608, 0.01, {2: 1e9}, communication="ring", latency_s=2e-3, pack_s=5e-3)

EXPERTS = ModelShape.load(CONF / "model_shape" / "qwen3_30b_a3b.yaml")


class Saves:
    """A session of two ranks that is asked to save; rank 1 fails where `errors` says so."""

    def __init__(self, every_steps: int = 2) -> None:
        self.said: list[str] = []
        self.told: list[Message] = []
        self.tell = self.told.append
        self.errors: dict[int, str] = {}
        self.begun: list[int] = []
        self.group = self
        self.size = 2
        self.config = SimpleNamespace(checkpoint=SimpleNamespace(every_steps=every_steps),
                                      planner=SimpleNamespace(sync="step"),
                                      comm=SimpleNamespace(timeout_s=2.0))
        self.waited_s: list[float] = []
        self.current = SimpleNamespace(number=1)
        self.history = SimpleNamespace(refits=SimpleNamespace(to_json=dict))
        self.waits = SimpleNamespace(on=lambda what: nullcontext())
        self.records = SimpleNamespace(  # it reads no plan file
            event=lambda kind, **values: self.said.append(f"{kind} {values.get('step', values.get('error'))}"))
        self.sealed: list[Manifest] = []
        self.checkpoints = SimpleNamespace(seal=lambda manifest: self.sealed.append(manifest) or [])

    def flush(self) -> None:
        self.said.append("flush")

    def note_not_deleted(self, failures: list[str]) -> None:
        assert not failures

    def start(self, method: str, *arguments: int) -> list[Any]:
        self.said.append(" ".join(map(str, (method, *arguments))))
        self.begun += arguments
        return []

    def call(self, method: str) -> None:
        self.said.append(method)

    def collect(self, calls: list[Any], behind_s: float = math.inf) -> list[tuple[list[int], str]]:
        """What ranks say at the end of a save."""
        if behind_s == math.inf:
            return []
        self.waited_s.append(behind_s)
        steps, self.begun = self.begun, []
        error = next((self.errors[step] for step in steps if step in self.errors), "")
        whole = [step for step in steps if step not in self.errors]
        return [(whole, ""), (whole, error)]

    def results(self, *saved: tuple[list[int], str]) -> list[Any]:
        """Those of a step, with what ranks say of saves."""
        return [SimpleNamespace(rank=rank, saved_steps=steps, save_error=error)
                for rank, (steps, error) in enumerate(saved)]


def commits_of(session: Any) -> Commits:
    return Commits(session)


def test_a_save_waits_for_the_one_before_it() -> None:
    """Not on the ranks, where the next step would wait behind it and its ranks seem to be stuck."""
    session = Saves()
    commits = commits_of(session)
    for step in range(1, 6):
        commits.save_when_due(step, [], {"row": step}, last=step == 5)
    assert session.said == ["save 2", "finish_save", "flush", "checkpoint 2", "save 4", "finish_save", "flush",
                            "checkpoint 4", "save 5"]
    assert session.told == []
    assert [(manifest.step, manifest.cursor) for manifest in session.sealed] == [(2, {"row": 2}), (4, {"row": 4})]


def test_after_a_save_that_failed_the_next_one_is_tried() -> None:
    session = Saves()
    session.errors[2] = "step 2: no room"
    commits = commits_of(session)
    for step in (2, 4):
        commits.save_when_due(step, [], {"row": step}, last=False)
    commits.finish_saves()
    assert session.said == ["save 2", "finish_save", "save_failed step 2: no room", "renew_state_group", "save 4",
                            "finish_save", "flush", "checkpoint 4"], "one rank may have left the others in a collective"
    assert session.waited_s == [STORAGE_TIMEOUT_S] * 2, "comm.timeout_s is about networks"
    assert session.told == [Notice("checkpoint not saved (rank 1): step 2: no room; the run goes on, the next save is "
                                   "tried")]


def test_a_checkpoint_that_all_have_written_is_sealed_before_the_next_one_begins() -> None:
    """Reported with the results of step 4; the group may break before that step is committed."""
    session = Saves()
    commits = commits_of(session)
    results = session.results(([2], ""), ([2], ""))
    commits.save_when_due(2, [], {"row": 2}, last=False)
    session.begun.clear()
    commits.save_when_due(4, results, {"row": 4}, last=False)
    assert session.said == ["save 2", "flush", "checkpoint 2", "save 4"]
    assert session.told == []


def test_what_a_step_reports_of_saves_is_told_once() -> None:
    session = Saves()
    commits = commits_of(session)
    commits.save_when_due(2, [], {"row": 2}, last=False)
    session.begun.clear()
    results = session.results(([], "step 2: no room"), ([], ""))
    commits.save_when_due(4, results, {"row": 4}, last=False)
    commits._note_results(4, results)
    assert [type(message) for message in session.told] == [Notice]


PLAN = plan_batch([Sample("a", 30), Sample("b", 20)], ClusterSpec(2, 2, 64), COST)


def committing(monkeypatch: pytest.MonkeyPatch, records: Any) -> Commits:
    """Commits of a session of two ranks in generation 2, which learns nothing from their times."""
    nothing = SimpleNamespace(step=lambda *arguments: None)
    session: Any = SimpleNamespace(
        tell=nothing.step, group=SimpleNamespace(size=2, ranks=SimpleNamespace(shape=EXPERTS)),
        history=SimpleNamespace(scale=TimeScale(), step_times_s=[], refits=SimpleNamespace(on=False)),
        records=records, scalars=nothing,
        reader=SimpleNamespace(batches={}),
        watch=nothing, current=SimpleNamespace(number=2, choice=SimpleNamespace(mode=Mode("micro_batch")),
                                               meter=SimpleNamespace(planned=lambda: (1.0, 1.0))))
    commits = commits_of(session)
    monkeypatch.setattr(commits, "_observe_speeds", lambda finished, work: None)
    monkeypatch.setattr(commits, "_refit", lambda finished, work: None)
    monkeypatch.setattr(commits, "_note_results", lambda step, results: None)
    return commits


def finished_step(step: int, plan_id: str, **changes: Any) -> FinishedStep:
    """A step of PLAN, with these `changes` of what ranks report."""
    result = StepResult(step, 0, 1.0, 1, 1.0, 1e-3, True, step, 1.0, 0.0, (), {}, plan_id=plan_id)._replace(**changes)
    results = [result._replace(rank=rank, pack_times=(PackTime(rank, 0.0, 1.0, 0.0),)) for rank in range(2)]
    return FinishedStep(step, PLAN, plan_id, False, 1, {}, {}, results, 1.0)


def test_what_an_earlier_generation_ran_says_nothing_of_the_ranks_of_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """There may be as many of them, in another order. Nor do steps in which ranks compute for the packs of others."""
    commits, observed = committing(monkeypatch, SimpleNamespace(commit=lambda *arguments: None)), list[str]()
    monkeypatch.setattr(commits, "_observe_speeds", lambda finished, work: observed.append(finished.plan_id))
    for plan_id, sharing in (("1.3.3", 1), ("2.3.1", 1), ("2.3.2", 2)):
        commits.session.current.choice.mode = Mode("micro_batch", "false", sharing)
        commits.commit(finished_step(3, plan_id))
    assert observed == ["2.3.1"]


def test_a_step_whose_update_was_skipped_has_trained_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its metrics tell what it has computed; a run of such steps has no model to write."""
    records = RunRecords(Folder(str(tmp_path)))
    commits = committing(monkeypatch, records)
    commits.commit(finished_step(1, "2.1.1", gradient_norm=math.inf, applied=False, state_version=0))
    assert not records.has_trained
    commits.commit(finished_step(2, "2.2.1"))
    assert records.has_trained
    records.close()
    ledger, metrics = ([json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
                       for name in ("ledger.jsonl", "metrics.jsonl"))
    assert [sorted(line["sample_ids"]) for line in ledger] == [[], ["a", "b"]]
    assert [(line["loss"], line["num_samples"]) for line in metrics] == [(1.0, 2)] * 2
