"""docs/planner.md: its example prints what it shows, its figures are the costs, it names every file."""

from __future__ import annotations

import contextlib
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

import dhp_ray.planner
from dhp_ray.planner import ClusterSpec, plan_batch

FOLDER = Path(dhp_ray.planner.__file__).parent
PAGE = (Path(__file__).parents[2] / "docs" / "planner.md").read_text()
EXAMPLE, QUESTIONS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def run(code: str) -> tuple[dict[str, Any], str]:
    """The names that a block of the page makes, and what it prints."""
    names: dict[str, Any] = {"__name__": "page"}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "planner.md", "exec", dont_inherit=True), names)
    return names, printed.getvalue()


@pytest.mark.slow
def test_the_example_prints_what_the_page_shows() -> None:
    [shown] = re.findall(r"prints\n\n```text\n(.*?)```", PAGE, re.DOTALL)
    assert run(EXAMPLE)[1] == shown


def test_the_seconds_of_the_page_are_the_cost_model_s() -> None:
    names, _ = run(EXAMPLE)
    cluster = ClusterSpec(3, 8, 4000)
    for sample in names["samples"]:
        seconds = [names["cost"].pack_time_s([sample.num_tokens], range(degree), cluster) for degree in (1, 2, 3)]
        cells = " | ".join(f"{second:.2f}" for second in seconds)
        least = -(-sample.num_tokens // cluster.tokens_per_rank)
        assert f"| {sample.id}, {sample.num_tokens:,} tokens | {cells} | {least} |" in PAGE


def test_questions_are_asked_of_a_plan_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names, _ = run(EXAMPLE)
    plan = plan_batch(names["samples"], ClusterSpec(3, 8, 4000), names["cost"])
    monkeypatch.chdir(tmp_path)
    Path("plan.json").write_text(json.dumps(plan.to_json()))
    asked, _ = run(QUESTIONS)
    assert asked["plan"].groups == plan.groups
    assert (plan.predicted_time_s, asked["other"].predicted_time_s) == pytest.approx((4.9, 3.8))
    assert asked["seconds"] == pytest.approx([6.0, 3.3, 2.4])
    assert asked["baseline"].planner == "dhp_paper"


@pytest.mark.parametrize("path", sorted(FOLDER.rglob("*.py")), ids=lambda path: str(path.relative_to(FOLDER)))
def test_every_file_is_named(path: Path) -> None:
    """By its name in the tables; a folder's `__init__.py` by the folder's."""
    name = path.name if path.name != "__init__.py" or path.parent == FOLDER else path.parent.name
    assert f"`{name}" in PAGE
