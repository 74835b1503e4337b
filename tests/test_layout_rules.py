"""Rules of the repository that no single package can test."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
JOBS = sorted((ROOT / "jobs").glob("*.py"))
COVERED_BY = {
    "constraints.py": "test_config.py",
    "schema.py": "test_config.py",
    "measure/communication.py": "measure/test_fitting.py",
    "measure/links.py": "measure/test_member.py",
    "measure/memory.py": "measure/test_member.py",
    "measure/payloads.py": "measure/test_member.py",
    "measure/picture.py": "measure/test_cost_file.py",
    "measure/timings.py": "measure/test_member.py",
    "runtime/driver/measuring.py": "runtime/driver/test_kept_costs.py",
    "runtime/origins.py": "runtime/driver/test_modes.py",
    "runtime/worker/measuring.py": "measure/test_member.py",
    "simulate/batches.py": "simulate/test_simulated_run.py",
    "simulate/faults.py": "simulate/test_fault_times.py",
    "simulate/machine.py": "simulate/test_simulated_run.py",
    "simulate/pack_work.py": "simulate/test_step.py",
    "simulate/planning.py": "simulate/test_simulated_run.py",
    "simulate/records.py": "simulate/test_simulated_run.py",
    "simulate/results_page.py": "simulate/test_simulate_job.py",
    "simulate/run.py": "simulate/test_simulated_run.py",
    "simulate/simulation.py": "simulate/test_simulate_job.py",
    "simulate/table.py": "simulate/test_simulate_job.py",
    "simulate/workload_settings.py": "simulate/test_workload.py",
    "data/clip.py": "data/test_video.py",
    "data/conversation.py": "data/test_processor.py",
    "data/errors.py": "data/test_untrusted.py",
    "data/families/base.py": "data/families/test_qwen3_vl_processor.py",
    "data/families/internvl.py": "data/families/test_internvl_processor.py",
    "data/families/qwen2_5_vl.py": "data/test_processor.py",
    "data/families/qwen3_vl.py": "data/families/test_qwen3_vl_processor.py",
    "data/formats/json_text.py": "data/test_index.py",
    "data/grids.py": "data/test_processor.py",
    "data/model_folder.py": "data/test_processor.py",
    "model/adapter.py": "model/families/test_qwen2_5_vl.py",
    "model/export.py": "runtime/worker/test_export.py",
    "model/families/base.py": "model/families/test_qwen2_5_vl.py",
    "model/files.py": "model/test_build.py",
    "model/kernels/cpu.py": "model/test_kernels.py",
    "model/kernels/cuda.py": "model/test_kernels.py",
    "model/kernels/liger.py": "model/test_fused.py",
    "model/kernels/npu.py": "model/test_npu_kernel.py",
    "model/kernels/segments.py": "model/test_kernels.py",
    "model/presets.py": "model/test_build.py",
    "model/weights.py": "train/test_loading.py",
    "report/figures.py": "report/test_page.py",
    "report/plan_picture.py": "report/test_step_picture.py",
    "runtime/messages.py": "runtime/job/test_console.py",
    "runtime/evaluate/answer.py": "runtime/evaluate/test_predictions.py",
    "runtime/evaluate/evaluation.py": "integration/test_evaluate_job.py",
    "runtime/driver/batch_reader.py": "runtime/driver/test_dispatch.py",
    "runtime/driver/calls.py": "runtime/driver/test_relay.py",
    "runtime/driver/evaluation.py": "integration/test_evaluation.py",
    "runtime/driver/nodes.py": "integration/test_drain.py",
    "train/state/double_buffer.py": "train/state/test_mirror.py",
    "runtime/driver/ending.py": "runtime/driver/test_driver.py",
    "runtime/driver/recovery.py": "integration/test_faults.py",
    "runtime/driver/stages.py": "runtime/driver/test_large_groups.py",
    "runtime/driver/takeover.py": "integration/test_faults.py",
    "runtime/job/export.py": "runtime/job/test_export_job.py",
    "runtime/job/head.py": "runtime/job/test_connect.py",
    "runtime/job/job.py": "runtime/job/test_connect.py",
    "runtime/job/roster.py": "integration/test_capacity.py",
    "runtime/worker/answering.py": "integration/test_generation.py",
    "runtime/worker/failures.py": "integration/test_error_lines.py",
    "runtime/worker/folders.py": "runtime/driver/test_room.py",
    "runtime/worker/heap.py": "runtime/worker/test_loading_memory.py",
    "runtime/worker/held_shards.py": "integration/test_faults.py",
    "runtime/worker/rank.py": "train/test_random_plans.py",
    "runtime/job/fit.py": "integration/test_fit.py",
    "runtime/worker/run_model.py": "train/test_lora_plans.py",
    "runtime/worker/worker.py": "integration/test_faults.py",
    "train/export.py": "runtime/worker/test_export.py",
    "train/collectives.py": "train/test_sharded_engine.py",
    "train/micro_batch_model.py": "train/test_sharded_engine.py",
    "train/micro_batch_step.py": "train/test_sharded_engine.py",
    "train/rank_step.py": "train/test_lifecycle.py",
    "train/payload.py": "train/test_collate.py",
    "train/results.py": "runtime/driver/test_measures.py",
    "train/state/intervals.py": "train/state/test_checkpoint.py",
    "train/state/stored_values.py": "runtime/job/test_export_job.py",
    "train/state/optimizer.py": "train/test_flat_engine.py",
}
"""Modules without a test file of their own, and the file that covers each. The planner's are tested together, mode by
mode.
"""

SOURCES = sorted(path for folder in ("dhp_ray", "jobs", "benchmarks", "tests")
                 for path in (ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.stem)
def test_no_job_has_the_name_of_a_module(job: Path) -> None:
    """jobs/ is on sys.path while a job runs: a `profile.py` there breaks torch."""
    taken = set(sys.stdlib_module_names) | set(importlib.metadata.packages_distributions())
    assert job.stem not in taken


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.stem)
def test_help_comes_at_once(job: Path) -> None:
    """Process time, so that a busy machine does not fail it; the best of three, so that cold file caches do not."""
    times = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        finished = subprocess.run([sys.executable, str(job), "--help"], capture_output=True, text=True, timeout=60,
                                  check=False)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert finished.returncode == 0, finished.stderr
        assert finished.stdout.startswith("usage: ")
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        if times[-1] < 1.0:
            return
    raise AssertionError(f"--help took {min(times):.2f} s of process time")


def test_imports_go_one_way() -> None:
    finished = subprocess.run([str(Path(sys.executable).with_name("lint-imports")), "--no-cache"], cwd=ROOT,
                              capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stdout


def test_files_are_named_for_what_they_hold() -> None:
    vague = re.compile(r"utils?|helpers?|managers?|handlers?|common|misc")
    found = [str(path.relative_to(ROOT))
             for path in SOURCES if any(vague.fullmatch(word) for word in path.stem.split("_"))]
    assert found == []


def test_no_file_outgrows_itself() -> None:
    """Past 600 lines a file holds more than one idea."""
    found = {str(path.relative_to(ROOT)): lines
             for path in SOURCES if (lines := len(path.read_text().splitlines())) > 600}
    assert found == {}


def test_every_module_and_job_says_what_it_is() -> None:
    found = []
    for path in SOURCES:
        if (
            path.name != "__init__.py"
            and not path.is_relative_to(ROOT / "tests")
            and ast.get_docstring(ast.parse(path.read_text())) is None
        ):
            found.append(str(path.relative_to(ROOT)))
    assert found == []


def test_tests_mirror_the_package() -> None:
    """Every module has its test file, or is named above with the one that covers it."""
    modules = {path.relative_to(ROOT / "dhp_ray") for path in SOURCES if path.is_relative_to(ROOT / "dhp_ray")
               and path.name != "__init__.py"}
    own = {str(module) for module in modules if (ROOT / "tests" / module.with_name(f"test_{module.name}")).is_file()}
    others = {str(module) for module in modules if module.parts[0] != "planner"} - own
    assert sorted(others) == sorted(COVERED_BY)
    assert [test for test in COVERED_BY.values() if not (ROOT / "tests" / test).is_file()] == []


def test_no_two_tests_have_one_name() -> None:
    """pytest imports test files by their name alone."""
    names = [path.name for path in SOURCES if path.is_relative_to(ROOT / "tests") and path.name.startswith("test_")]
    assert sorted(names) == sorted(set(names))
