from __future__ import annotations

import base64
import json
import re
from html.parser import HTMLParser
from io import BytesIO
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

from dhp_ray.report.gains import compare
from dhp_ray.report.page import curves, page, planning, summary, text
from dhp_ray.report.run_files import read_run
from dhp_ray.storage import Folder
from tests.report.browser import open_page
from tests.report.runs import write_run

EVIL = "</td><img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>'\"&"


class Elements(HTMLParser):
    def __init__(self, content: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(content)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose ids, reasons and events are as hostile as data can be."""
    folder = tmp_path_factory.mktemp("run")
    records = write_run(folder, 7, prefix=EVIL)
    records.skip(EVIL, EVIL, 3)
    records.event("worker_lost", rank=1, error=EVIL, uri="s3://KEY:TOPSECRET@bucket/run")
    return folder


@pytest.fixture(scope="module")
def content(run_folder: Path) -> str:
    return page(read_run(Folder(str(run_folder))))


def test_every_section_and_figure_is_there(content: str) -> None:
    assert re.findall(r"<h2>(.*?)</h2>", content) == ["Loss", "Throughput", "What planning gained", "Degrees", "Data",
                                                      "Events", "Configuration"]
    for words in ("7 of 7 batches", "static_best", "dhp_paper", "with video", "worker_lost", "num_workers: 4"):
        assert words in content
    assert re.search(r"<dt>last loss</dt><dd>0\.2857</dd>", content)
    assert re.search(r"<dt>samples left out</dt><dd>2</dd>", content)


def test_scores_of_answers_are_shown(tmp_path: Path) -> None:
    write_run(tmp_path, 2)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    lines[0] |= {"eval_loss": 1.5, "eval_exact_match": 0.5, "eval_anls": 0.625, "eval_f1": 0.75}
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = read_run(Folder(str(tmp_path)))
    shown = summary(run, compare([], run.plan))
    assert "<dt>last answers</dt><dd>exact match 0.500, ANLS 0.625, F1 0.750</dd>" in shown


def test_modelled_and_measured_are_told_apart(tmp_path: Path) -> None:
    """Late steps stand in both: in the run's own row of what is modelled, and in a row of their own of what is
    measured.
    """
    write_run(tmp_path, 3)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    lines = [line | {"planner": "quick" if line["step"] == 2 else "dhp", "late": line["step"] == 2} for line in lines]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = read_run(Folder(str(tmp_path)))
    shown = re.sub(r"<[^>]+>", " ", planning(run, compare(run.plan_steps, run.plan)))
    gained = " ".join(shown.partition("Modelled: 3 of 3 batches")[2].split())
    assert "in the same mode (sync=step), with the same memory (480 tokens a rank)" in gained
    modelled, _, clock = gained.partition("Measured:")
    assert re.search(r"this run 3 by dhp [\d.]+ 1\.00", modelled)
    assert all(name in modelled for name in ("static", "static_best", "pow2", "dhp_paper"))
    late, in_time = (sum(line["step_time_s"] for line in lines if line["late"] is kind) for kind in (True, False))
    assert f"dhp in time 2 {in_time:.4g}" in clock
    assert f"quick late 1 {late:.4g}" in clock


def test_pictures_are_in_the_page_and_whole(content: str) -> None:
    pictures = [attributes["src"] or "" for tag, attributes in Elements(content).found if tag == "img"]
    assert len(pictures) == 6
    for source in pictures:
        kind, _, code = source.partition(";base64,")
        body = base64.b64decode(code)
        if kind == "data:image/png":
            assert len(np.unique(np.asarray(Image.open(BytesIO(body)).convert("RGB")).reshape(-1, 3), axis=0)) > 20
        else:
            assert kind == "data:image/svg+xml"
            assert sum(1 for _ in ElementTree.fromstring(body).iter("{http://www.w3.org/2000/svg}path")) > 10


def test_nothing_is_fetched_and_nothing_runs(content: str) -> None:
    for tag, attributes in Elements(content).found:
        assert tag not in ("script", "iframe", "link", "object", "embed", "base", "form", "a")
        for name, value in attributes.items():
            assert not name.startswith("on")
            if name in ("src", "href"):
                assert (value or "").startswith("data:image/")
    assert "default-src 'none'" in content
    assert "@import" not in content
    assert "url(" not in content


def test_samples_text_is_escaped_and_secrets_are_not_shown(content: str) -> None:
    assert EVIL not in content
    assert content.count("&lt;script&gt;document.title=&#x27;owned&#x27;&lt;/script&gt;") == 3
    assert "TOPSECRET" not in content
    assert text("a\u202eb\x00<") == "a\ufffdb\ufffd&lt;"


def test_one_step_is_enough_and_plans_are_not_needed(tmp_path: Path) -> None:
    write_run(tmp_path, 1)
    assert "1 of 1 batches" in page(read_run(Folder(str(tmp_path))))
    (tmp_path / "plans" / "step_000001.json").unlink()
    assert "holds no plans" in page(read_run(Folder(str(tmp_path))))


def test_losses_that_are_none(tmp_path: Path) -> None:
    write_run(tmp_path, 2)
    metrics = (tmp_path / "metrics.jsonl").read_text()
    (tmp_path / "metrics.jsonl").write_text(re.sub(r'"loss": [\d.]+', '"loss": null', metrics))
    run = read_run(Folder(str(tmp_path)))
    assert "<dt>last loss</dt><dd>none</dd>" in summary(run, compare([], run.plan))
    assert "<img" in curves(run)


def test_in_a_browser_the_page_shows_and_the_samples_text_does_not_run(
    run_folder: Path, content: str, tmp_path: Path
) -> None:
    (tmp_path / "unescaped.html").write_text(f"<title>quiet</title><table><tr><td>{EVIL}</table>")
    assert "<title>owned</title>" in open_page((tmp_path / "unescaped.html").as_uri(),
                                               tmp_path / "profile"), "this browser would run it"
    (run_folder / "report.html").write_text(content)
    document = open_page((run_folder / "report.html").as_uri(), tmp_path / "profile", tmp_path / "report.png",
                         height=4000)
    assert f"<title>Run {run_folder}</title>" in document
    assert "owned</title>" not in document
    assert not [tag for tag, _ in Elements(document).found if tag == "script"]
    picture = np.asarray(Image.open(tmp_path / "report.png").convert("RGB"))
    assert picture.shape[:2] == (4000, 1100)
    coloured = (picture.max(axis=2).astype(int) - picture.min(axis=2)) > 60
    assert coloured[200:1500].mean() > 0.001, "curves are drawn"
    assert coloured.mean() > 0.02, "plan and histograms are drawn"
