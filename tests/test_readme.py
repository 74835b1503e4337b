"""What README.md and docs/ show, tried: their commands are read by the code that they go to, their examples are data
and programs that work, their errors are ours.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from dhp_ray.config import CONF, EVALUATE, load, walk
from dhp_ray.data.index import image_root, index_fragments
from dhp_ray.data.processor import ProcessorSpec
from dhp_ray.data.reader import ReadFragments
from dhp_ray.schema import Config, Model
from dhp_ray.simulate.settings import load_simulation
from tests.checkout import copy_checkout, job_of
from tests.data.samples import picture, read_all
from tests.ranks import run_processes
from tests.readme import COMMANDS, DOCUMENTS, PAGES, ROOT, SHELL, jobs, rows_of, section, the_block
from tests.report.runs import write_run

OWN_DATA = jobs("train.py", [line for line in section("Train on your data").splitlines() if line.startswith("python")])
DEMO_TOKENS = int(load([]).planner.tokens_per_rank)
AUTO_TOKENS = 2**32 // 111_000
"""What `auto` gives a rank with 4 GiB: a token of the tiny preset, with its four patches, takes 111 kB."""


@pytest.fixture
def user_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder `my` with the one picture of the examples, below the working directory, which has `conf` as the
    checkout does.
    """
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf").symlink_to(CONF)
    (tmp_path / "my" / "images").mkdir(parents=True)
    (tmp_path / "my" / "images" / "cat.png").write_bytes(picture(120, 90))
    return tmp_path


def training_on(path: str) -> Config:
    """What the section's one command for this data asks for."""
    [config] = [config for config in map(load, OWN_DATA) if config.data.path == path]
    return config


def rows_read(config: Config, tokens_per_rank: int = AUTO_TOKENS) -> tuple[list[str], list[str]]:
    """Ids and errors of the rows of a data set, each read, tokenized and with its pictures looked at, as a run does it.
    """
    data = config.data
    read = ReadFragments(ProcessorSpec.of(Model(preset="tiny"), data), image_root(data), 0,
                         tokens_per_rank * config.cluster.num_workers, tokens_per_rank)
    block = read_all(read, index_fragments(data))
    return block["id"].to_pylist(), [error for error in block["error"].to_pylist() if error]


def usable(config: Config) -> list[str]:
    """Ids of the rows; none of them may be left out."""
    ids, errors = rows_read(config)
    assert errors == []
    return ids


@pytest.mark.parametrize("arguments", jobs("train.py"), ids=" ".join)
def test_a_training_command_is_one(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    if "--help" not in arguments:
        load(arguments)


def test_the_shell_can_read_every_block() -> None:
    for block in SHELL:
        assert not re.search(r"<[^(]", block), f"a redirection, and no word to replace: {block}"
        done = subprocess.run(["bash", "-n", "-c", block], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, ""), block


def test_no_word_is_a_pattern_to_zsh() -> None:
    """It refuses brackets without quotes if no file has such a name."""
    assert re.findall(r"(?<!['\w.])[\w.]+=\[[^\]]*\]|install .*(?<!['\w])\.\[", DOCUMENTS) == []


def test_every_run_has_a_folder_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo's holds a run of other data after `make train`: there, a run of one's own is refused."""
    monkeypatch.chdir(ROOT)
    folders = [load(arguments).run.dir for arguments in OWN_DATA]
    assert len(folders) == 6
    assert len({*folders, load([]).run.dir,
                load(["--config", "conf/finetune.yaml", "model.path=m", "data.path=d"]).run.dir}) == len(folders) + 2


def test_the_other_commands_are_ones() -> None:
    readers = {"plan.py": job_of("plan").read_arguments, "simulate.py": load_simulation, "report.py": load,
               "evaluate.py": lambda arguments: load(arguments, EVALUATE)}
    for name, read in readers.items():
        for arguments in jobs(name):
            read(arguments)


def test_targets_files_and_links_are_there() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in {match[1] for line in COMMANDS for match in re.finditer(r"^make ([a-z-]+)", line)}:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    for name in {*re.findall(r"ray up (\S+\.yaml)", DOCUMENTS), *re.findall(r"apply -f (\S+\.yaml)", DOCUMENTS),
                 *re.findall(r"`((?!\S*NAME)(?:benchmarks|conf|dhp_ray|jobs|tests)/[\w/.]+\.(?:md|py|yaml))`",
                             DOCUMENTS)}:
        assert (ROOT / name).exists(), name
    for cell in [row[0] for row in rows_of("Layout")[1:]]:
        paths = re.findall(r"`([^`]+)`", cell)
        folder = Path(paths[0]).parent if not paths[0].endswith("/") else Path(paths[0])
        for path in paths:
            assert (ROOT / path).exists() or (ROOT / folder / path).exists(), path


def test_the_tour_names_files_that_are_there() -> None:
    """CONTRIBUTING.md gives paths from the checkout or from dhp_ray/, and draws every package."""
    tour = (ROOT / "CONTRIBUTING.md").read_text()
    names = re.findall(r"`([\w/.]+(?:\.(?:md|py|toml|yaml)|/))`", tour)
    assert len(names) > 40
    assert [name for name in names if not ((ROOT / name).exists() or (ROOT / "dhp_ray" / name).exists()
                                           or "NAME" in name)] == []
    drawn = tour.partition("\njobs/ ")[2].partition("\n```")[0]
    packages = {path.parent.name for path in (ROOT / "dhp_ray").glob("*/__init__.py")}
    assert packages <= set(re.findall(r"(\w+)/", drawn))
    assert len(tour.splitlines()) <= 110


def anchor_of(heading: str) -> str:
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def test_links_lead_to_files_and_headings() -> None:
    """Those of a page of docs/ also stay in docs/, since the site holds nothing else."""
    for page, text in PAGES.items():
        for link in re.findall(r"\]\((?!https?:)([^)]+)\)", text):
            name, _, anchor = link.partition("#")
            target = (page.parent / name).resolve() if name else page
            assert target.is_file(), f"{page.name}: {link}"
            assert page.parent == ROOT or target.parent == ROOT / "docs", f"{page.name}: {link}"
            assert not anchor or anchor in map(anchor_of, re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)), (
                f"{page.name}: {link}")


def test_readme_is_short_and_leads_to_every_page() -> None:
    readme = (ROOT / "README.md").read_text()
    assert len(readme.encode()) <= 12_000
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    pages = sorted(path.name for path in PAGES if path.parent.name == "docs")
    assert sorted(site) == pages
    assert [name for name in pages if name != "index.md" and f"(docs/{name})" not in readme] == []


def test_conversations_as_shown_are_read(user_folder: Path) -> None:
    (user_folder / "my" / "chat.json").write_text(the_block("json", "conversations"))
    (user_folder / "my" / "messages.jsonl").write_text(json.dumps(json.loads(the_block("json", "messages"))))
    assert usable(training_on("my/chat.json")) == ["cat-1"]
    assert usable(training_on("my/messages.jsonl")) == ["cat-2"]
    (user_folder / "my" / "chat.json").write_text(json.dumps([json.loads(the_block("json", "function_call"))]))
    assert usable(training_on("my/chat.json")) == ["cat-5"]


def test_ordinary_photos_are_used(user_folder: Path) -> None:
    """By every command of the section. Troubleshoot has the words that one is left out with for which a rank has no
    room.
    """
    rows = json.loads(the_block("json", "conversations"))
    sizes = ((800, 600), (1600, 1200), (4000, 3000))
    for width, height in sizes:
        (user_folder / "my" / "images" / f"{width}.jpg").write_bytes(picture(width, height, "JPEG"))
    (user_folder / "my" / "chat.json").write_text(
        json.dumps([rows[0] | {"id": str(width), "image": f"images/{width}.jpg"} for width, _ in sizes])
    )
    config = training_on("my/chat.json")
    assert sorted(usable(config)) == sorted(str(width) for width, _ in sizes)
    demo = load([])
    [line] = [cell.strip("`") for cell, _ in rows_of("Troubleshoot") if "a rank holds at most" in cell]
    assert [line in error for error in rows_read(replace(config, cluster=demo.cluster), DEMO_TOKENS)[1]] == [True] * 3
    assert {load(arguments).planner.tokens_per_rank for arguments in OWN_DATA} == {"auto"}


def test_parquet_as_shown_is_read(user_folder: Path) -> None:
    exec(the_block("python", "pyarrow"), {})
    assert usable(training_on("my/rows.parquet")) == ["cat-3"]


def test_shards_as_shown_are_read(user_folder: Path) -> None:
    """Also where a folder's own order would part the members of a key."""
    pairs = user_folder / "my" / "pairs"
    pairs.mkdir()
    for key in ("cat", "cat-4-b", "cat-5"):
        (pairs / f"{key}.txt").write_text("A cat.")
        shutil.copy(user_folder / "my" / "images" / "cat.png", pairs / f"{key}.png")
    subprocess.run(["bash", "-e", "-c", the_block("", "tar -cf").replace("python jobs/train.py", ": ")], check=True)
    assert sorted(usable(training_on("my/shards"))) == ["cat", "cat-4", "cat-4-b", "cat-5"]


@pytest.mark.skipif(importlib.util.find_spec("datasets") is None, reason="the library datasets is not installed")
def test_saved_sets_as_shown_are_read(user_folder: Path) -> None:
    exec(the_block("python", "save_to_disk"), {})
    assert usable(training_on("my/saved")) == ["colour-1"]


def test_planning_as_shown_works() -> None:
    program = the_block("python", "plan_batch") + "import sys\nassert not {'torch', 'ray'} & set(sys.modules)\n"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)},
                          capture_output=True, text=True, check=True)
    assert re.search(r"\(\d+, \d+.*\) \['clip'", done.stdout), "the long one has several ranks"


def test_a_batch_is_planned_as_shown(tmp_path: Path) -> None:
    """The job as a user at the checkout starts it; what it writes lies elsewhere."""
    (tmp_path / "jobs").symlink_to(ROOT / "jobs")
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-e", "-c", the_block("", "jobs/plan.py")], cwd=tmp_path, env=environment,
                          capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "512 sequences" in done.stdout
    assert json.loads((tmp_path / "plan.json").read_text())["num_ranks"] == 64
    assert (tmp_path / "plan.png").read_bytes()[:4] == b"\x89PNG"


def attention_as_shown(rank: int, port: int, code: str, num_ranks: int) -> tuple[int, bool]:
    """Run it with the environment that torchrun gives it; the tokens of this rank, and whether gradients are finite."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(num_ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
                      TORCHELASTIC_USE_AGENT_STORE="True")
    names: dict[str, Any] = {}
    exec(code, names)
    return names["out"].shape[1], bool(names["q"].grad.isfinite().all())


def test_attention_as_shown_works_on_ranks() -> None:
    found = run_processes(attention_as_shown, 2, the_block("python", "ring_attention"), 2)
    assert sum(tokens for tokens, _ in found) == 2001
    assert {finite for _, finite in found} == {True}


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_attention_as_shown_works(num_ranks: int, tmp_path: Path) -> None:
    said = f"open({str(tmp_path)!r} + f'/rank{{rank}}', 'w')"
    said += ".write(f'{out.shape[1]} {bool(q.grad.isfinite().all())}')\n"
    (tmp_path / "example.py").write_text(the_block("python", "ring_attention") + said)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks),
               str(tmp_path / "example.py")]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
                          capture_output=True, text=True, timeout=240,
                          check=False)
    assert done.returncode == 0, done.stderr
    found = [path.read_text().split() for path in tmp_path.glob("rank*")]
    assert len(found) == num_ranks
    assert sum(int(tokens) for tokens, _ in found) == 2001
    assert {finite for _, finite in found} == {"True"}


def test_keys_to_tune_are_keys_with_these_values() -> None:
    """A value in words stands for an empty one, but `auto`, which is one."""
    config = load(["--config", str(CONF / "finetune.yaml"), "model.path=m", "data.path=d"])
    defaults = {name: value for name, value, _ in walk(config)}
    for names, default, _ in rows_of("Tune")[1:]:
        for name, shown in zip(re.findall(r"`([\w.]+)`", names), default.split(", "), strict=True):
            assert name in defaults, name
            value = "" if shown in ("of the device", "the system's") else shown.strip("`").removesuffix(".0")
            assert str(defaults[name]).lower().removesuffix(".0") == value, name


def literals() -> str:
    """Every text of the code but docstrings, one a line; what an f-string fills in is {}. Python joins neighbouring
    ones when it parses.
    """
    found: list[str] = []
    for tree in (ast.parse(path.read_text()) for folder in ("dhp_ray", "jobs")
                 for path in (ROOT / folder).rglob("*.py")):
        documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
                found.append(node.value)
    return "\n".join(found)


def test_errors_are_ones_that_the_code_prints() -> None:
    printed = literals()
    lines = [row[0].strip("`") for row in rows_of("Troubleshoot")[1:]]
    assert len(lines) > 10
    for line in lines:
        assert line in printed, line
    assert "no such error of ours" not in printed


def test_what_a_run_leaves_is_listed(tmp_path: Path) -> None:
    write_run(tmp_path, 1)
    listed = section("Read the dashboards")
    for path in tmp_path.iterdir():
        assert path.name in listed, path.name


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_from_a_clone_to_a_model_of_ones_own(tmp_path: Path) -> None:
    """The five commands of docs/fine-tuning.md on a folder of twenty pictures, from a repository with the files of this
    checkout.

    Between the first and the second the clone gets the pictures, and this environment in place of the one that `make
    train` would install for minutes.
    """
    commands = the_block("", "python jobs/report.py").splitlines()
    assert len(commands) == 5
    repository, beside = publish(tmp_path / "published"), tmp_path / "beside"
    (beside / "my" / "images").mkdir(parents=True)
    rows = json.loads(the_block("json", "conversations"))
    for number, (width, height) in enumerate([*((100 + 10 * number, 120) for number in range(18)), (1600, 1200),
                                              (4000, 3000)]):
        (beside / "my" / "images" / f"{number}.png").write_bytes(picture(width, height))
    chat = [rows[0] | {"id": f"cat-{number}", "image": f"images/{number}.png"} for number in range(20)]
    (beside / "my" / "chat.json").write_text(json.dumps(chat))
    (beside / ".venv").mkdir()
    for name in ("bin", "lib", "pyvenv.cfg"):
        (beside / ".venv" / name).symlink_to(Path(sys.prefix) / name)
    program = "\n".join([commands[0].replace("REPOSITORY", str(repository)),
                         f"cp -a {beside}/. . && touch .venv/installed", *commands[1:]])
    checkout = tmp_path / "dhp_ray"
    environment = {name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", "VIRTUAL_ENV")}
    # else a head that runs on this machine would be joined
    environment |= {"PYTHONPATH": str(checkout), "RAY_TMPDIR": tempfile.mkdtemp(prefix="ray_")}
    done = subprocess.run(["bash", "-e", "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True,
                          timeout=1500, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    shutil.rmtree(environment["RAY_TMPDIR"], ignore_errors=True)
    assert all((checkout / "runs" / "mine" / name).exists() for name in ("report.html", "trace/step_000001.json"))
    ledger = [json.loads(line) for line in (checkout / "runs" / "mine" / "ledger.jsonl").read_text().splitlines()]
    assert sorted(name for line in ledger for name in line["sample_ids"]) == sorted(row["id"] for row in chat)
    program = the_block("python", "AutoModelForImageTextToText") + "print(sum(p.numel() for p in model.parameters()))"
    loaded = subprocess.run([sys.executable, "-c", program], cwd=checkout, capture_output=True, text=True, check=True)
    assert int(loaded.stdout.split()[-1]) > 100_000


def publish(folder: Path) -> Path:
    """A bare repository with the files of this checkout as they are now."""
    copy_checkout(folder / "files")
    git = ["git", "-c", "user.name=a stranger", "-c", "user.email=stranger@example.com", "-c", "commit.gpgsign=false"]
    for command in ("init --quiet", "add --all", "commit --quiet --message copy",
                    "clone --quiet --bare . ../repository.git"):
        subprocess.run([*git, *command.split()], cwd=folder / "files", check=True)
    return folder / "repository.git"
