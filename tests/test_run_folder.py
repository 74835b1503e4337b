"""The names of a run folder's files: those of the contract, and the step that a name belongs to."""

from __future__ import annotations

from dhp_ray.run_folder import checkpoint_folder, plan_file, step_of, tensors_folder, trace_file


def test_names_of_a_step() -> None:
    assert plan_file(1) == "plans/step_000001.json"
    assert trace_file(20) == "trace/step_000020.json"
    assert checkpoint_folder(20) == "checkpoints/step_000020"
    assert tensors_folder(20, 3) == "checkpoints/step_000020/generation_3"
    assert tensors_folder(20, 0) == "checkpoints/step_000020"  # written before each generation had its own folder


def test_the_step_of_a_name() -> None:
    assert step_of("step_000020.json", ".json") == 20
    assert step_of("step_1234567") == 1234567
    assert [step_of(name) for name in ("step_", "step_20.json", "notes", "")] == [None] * 4
    assert step_of("step_000020", ".json") is None
