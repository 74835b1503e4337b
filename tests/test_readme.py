"""What README.md shows, tried: its commands are read by the code that they go to, its examples are data and programs that work, its errors are ours."""

from __future__ import annotations

import importlib.util
import json
import os
import pickle
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pyarrow as pa
import pytest

from dhp_ray.config import CONF, load
from dhp_ray.constraints import walk
from dhp_ray.data.index import image_root, index_fragments
from dhp_ray.data.processor import ProcessorSpec
from dhp_ray.data.reader import ReadFragments
from dhp_ray.schema import Config, Data, Model
from tests.data.samples import picture
from tests.report.runs import write_run
from tests.test_jobs import entry

ROOT = CONF.parent
README = (ROOT / "README.md").read_text()
CUT = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = [(match[1], match[2]) for match in CUT.finditer(README)]
COMMANDS = [line for language, block in BLOCKS if not language for line in block.splitlines()]
COMMANDS += re.findall(r"`((?:python|ray|tensorboard|make|hf) [^`]+)`", README)


def section(title: str) -> str:
    return README.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def rows_of(table_in: str) -> list[list[str]]:
    """The cells of a section's tables, without heads."""
    lines = [line for line in section(table_in).splitlines() if line.startswith("|") and not line.startswith("|---")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def jobs(name: str) -> list[list[str]]:
    """The arguments of every `python jobs/NAME` that is shown, also behind `ray job submit ... --`."""
    found = [shlex.split(line.partition(f"jobs/{name}")[2], comments=True) for line in COMMANDS if f"python jobs/{name}" in line]
    assert found, name
    return found


@pytest.fixture
def user_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder `my` with the one picture of the examples, below the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my" / "images").mkdir(parents=True)
    (tmp_path / "my" / "images" / "cat.png").write_bytes(picture(120, 90))
    return tmp_path


def the_block(language: str, words: str) -> str:
    return next(block for kind, block in BLOCKS if kind == language and words in block)


def usable(data: Data) -> list[str]:
    """Ids of the rows of a data set, each read, tokenized and with its pictures looked at, as a run does it."""
    fragments = index_fragments(data)
    items = [{"position": number, "number": number, "epoch": 0, "fragment": pickle.dumps(fragment)} for number, fragment in enumerate(fragments)]
    block = ReadFragments(ProcessorSpec.of(Model(preset="tiny"), data), image_root(data), 0)(pa.Table.from_pylist(items))
    assert [record for record in block["error"].to_pylist() if record] == []
    return list(block["id"].to_pylist())


@pytest.mark.parametrize("arguments", jobs("train.py"), ids=" ".join)
def test_a_training_command_is_one(arguments: list[str]) -> None:
    if "--help" not in arguments:
        load(arguments)


def test_the_other_commands_are_ones() -> None:
    plan_job = entry("plan")
    for arguments in jobs("plan.py"):
        plan_job.read_arguments(arguments)
    for arguments in jobs("report.py"):
        load(arguments)


def test_targets_files_and_links_are_there() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in {match[1] for line in COMMANDS for match in re.finditer(r"^make ([a-z-]+)", line)}:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    for name in {*re.findall(r"\]\(([^):]+)\)", README), *re.findall(r"ray up (\S+\.yaml)", README), *re.findall(r"apply -f (\S+\.yaml)", README)}:
        assert (ROOT / name).exists(), name
    for cell in [row[0] for row in rows_of("Layout")[1:]]:
        paths = re.findall(r"`([^`]+)`", cell)
        folder = Path(paths[0]).parent if not paths[0].endswith("/") else Path(paths[0])
        for path in paths:
            assert (ROOT / path).exists() or (ROOT / folder / path).exists(), path


def test_conversations_as_shown_are_read(user_folder: Path) -> None:
    (user_folder / "my" / "chat.json").write_text(the_block("json", "conversations"))
    (user_folder / "my" / "messages.jsonl").write_text(json.dumps(json.loads(the_block("json", "messages"))))
    found = [usable(load(arguments).data) for arguments in jobs("train.py") if arguments[:2] in
             (["data=llava", "data.path=my/chat.json"], ["data=llava", "data.path=my/messages.jsonl"])]
    assert found == [["cat-1"], ["cat-2"]]


def test_parquet_as_shown_is_read(user_folder: Path) -> None:
    exec(the_block("python", "pyarrow"), {})
    assert usable(load(["data=parquet", "data.path=my/rows.parquet"]).data) == ["cat-3"]


def test_shards_as_shown_are_read(user_folder: Path) -> None:
    block = the_block("", "tar --sort=name")
    subprocess.run(["bash", "-e", "-c", block.replace("python jobs/train.py", ": ")], check=True)
    [identifier] = usable(load(shlex.split(block.splitlines()[-1])[2:]).data)
    assert identifier.endswith("cat-4")


@pytest.mark.skipif(importlib.util.find_spec("datasets") is None, reason="the library datasets is not installed")
def test_saved_sets_as_shown_are_read(user_folder: Path) -> None:
    exec(the_block("python", "save_to_disk"), {})
    assert usable(load(["data=huggingface", "data.path=my/saved"]).data) == ["colour-1"]


def test_planning_as_shown_works(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)
    exec(the_block("python", "plan_batch"), {})
    printed = capsys.readouterr().out
    assert "'clip'" in printed
    assert re.search(r"\(\d+, \d+.*\) \['clip'", printed), "the long one has several ranks"


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_attention_as_shown_works(num_ranks: int, tmp_path: Path) -> None:
    said = f"open({str(tmp_path)!r} + f'/rank{{rank}}', 'w').write(f'{{out.shape[1]}} {{bool(q.grad.isfinite().all())}}')\n"
    (tmp_path / "example.py").write_text(the_block("python", "ring_attention") + said)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks), str(tmp_path / "example.py")]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=240,
                          check=False)
    assert done.returncode == 0, done.stderr
    found = [path.read_text().split() for path in tmp_path.glob("rank*")]
    assert len(found) == num_ranks
    assert sum(int(tokens) for tokens, _ in found) == 2001
    assert {finite for _, finite in found} == {"True"}


def test_keys_to_tune_are_keys_with_these_defaults() -> None:
    """A default in words (`auto`, `of the device`) is compared where it is a value."""
    defaults = {name: value for name, value, _ in walk(Config())}
    for names, default, _ in rows_of("Tune")[1:]:
        for name, shown in zip(re.findall(r"`([\w.]+)`", names), default.split(", "), strict=True):
            assert name in defaults, name
            if shown != "of the device":
                assert str(defaults[name]).lower().removesuffix(".0") == shown.strip("`").removesuffix(".0"), name


def test_errors_are_ones_that_the_code_prints() -> None:
    sources = "\n".join(path.read_text() for folder in ("dhp_ray", "jobs") for path in (ROOT / folder).rglob("*.py"))
    joined = re.sub(r"\"\s*f?\"", "", sources)  # literals that Python joins
    for line in [row[0].strip("`") for row in rows_of("Troubleshoot")[1:]]:
        assert line in joined or line.replace(" step ", " step {") in joined, line


def test_what_a_run_leaves_is_listed(tmp_path: Path) -> None:
    write_run(tmp_path, 1)
    listed = section("Read the dashboards")
    for path in tmp_path.iterdir():
        assert path.name in listed, path.name


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_from_a_clone_to_a_model_of_ones_own(tmp_path: Path) -> None:
    """The five commands of the README on a folder of twenty pictures, in a copy of what git tracks; `make install` is spared by its own environment."""
    checkout = tmp_path / "dhp_ray"
    checkout.mkdir()
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, text=True, capture_output=True, check=True).stdout.split("\n")
    for name in filter(None, listed):
        if (ROOT / name).is_file():
            (checkout / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, checkout / name)
    (checkout / "my" / "images").mkdir(parents=True)
    rows = json.loads(the_block("json", "conversations"))
    for number in range(20):
        (checkout / "my" / "images" / f"{number}.png").write_bytes(picture(100 + 10 * number, 120))
    chat = [rows[0] | {"id": f"cat-{number}", "image": f"images/{number}.png"} for number in range(20)]
    (checkout / "my" / "chat.json").write_text(json.dumps(chat))
    commands = [line for line in the_block("", "conf/finetune.yaml data=llava").splitlines() if line]
    assert len(commands) == 5
    assert commands[0].startswith("git clone")
    (checkout / ".venv").mkdir()
    for name in ("bin", "lib", "pyvenv.cfg"):
        (checkout / ".venv" / name).symlink_to(Path(sys.prefix) / name)
    (checkout / ".venv" / "installed").touch()
    environment = {name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", "VIRTUAL_ENV")}
    environment |= {"PYTHONPATH": str(checkout), "RAY_TMPDIR": tempfile.mkdtemp(prefix="ray_")}  # else a head that runs on this machine would be joined
    program = "\n".join(commands[1:])
    done = subprocess.run(["bash", "-e", "-c", program], cwd=checkout, env=environment, capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    shutil.rmtree(environment["RAY_TMPDIR"], ignore_errors=True)
    assert (checkout / "runs" / "mine" / "report.html").exists()
    ledger = [json.loads(line) for line in (checkout / "runs" / "mine" / "ledger.jsonl").read_text().splitlines()]
    assert sorted(name for line in ledger for name in line["sample_ids"]) == sorted(row["id"] for row in chat)
    program = the_block("python", "AutoModelForImageTextToText") + "print(sum(p.numel() for p in model.parameters()))"
    loaded = subprocess.run([sys.executable, "-c", program], cwd=checkout, capture_output=True, text=True, check=True)
    assert int(loaded.stdout.split()[-1]) > 100_000
