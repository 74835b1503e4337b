"""Refusals before Ray starts: exit status 2 and one line, by a process that imports neither Ray nor torch."""

from __future__ import annotations

import codecs
import json
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from dhp_ray.comm.device import CUDA, NPU, Accelerator
from dhp_ray.config import EVALUATE, UPLOADS, Config, ConfigError, dump, load, make_absolute
from dhp_ray.data.processor import ProcessorSpec
from dhp_ray.model.build import build_model
from dhp_ray.model.files import MODEL_TYPES
from dhp_ray.planner import LAST_RESORT, PLANNERS
from dhp_ray.runtime.job.preflight import (
    check_evaluation_here,
    check_here,
    check_workers,
    device_of,
    resources_here,
)
from dhp_ray.schema import PLANNERS as NAMES
from tests.data.samples import talk, write_rows
from tests.packs import save_model

ROOT = Path(__file__).parents[3]
HEAVY = ("ray", "torch", "transformers", "numba", "PIL", "av")
ROWS = [{"id": "colour", "conversations": talk("Name a colour.", "Red.")}]
CLUSTER = "or a Ray cluster with {} (its head in RAY_ADDRESS)"


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No cluster, and no device but this machine's."""
    for name in ("RAY_ADDRESS", "RAY_TMPDIR", "RAY_OVERRIDE_RESOURCES", CUDA.visible, NPU.visible):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with everything in it."""
    folder = tmp_path_factory.mktemp("model")
    processor = ProcessorSpec("tiny").load()
    adapter = build_model("tiny", "", processor.token_ids, 0)
    save_model(adapter, folder, {name: parameter.detach() for name, parameter in adapter.module.named_parameters()})
    processor.save(folder)
    return folder


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    """Of a run that nothing is wrong with."""
    return ["data=llava", f"data.path={write_rows(tmp_path / 'rows.json', ROWS)}", f"run.dir={tmp_path / 'run'}"]


def refused(arguments: list[str]) -> str:
    with pytest.raises(ConfigError) as caught:
        check_here(load(arguments))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def write_run(folder: Path, arguments: list[str]) -> None:
    folder.mkdir()
    (folder / "config.yaml").write_text(dump(load(arguments)))
    (folder / "ledger.jsonl").write_text('{"step": 1, "sample_ids": []}\n')


@pytest.mark.parametrize(("words", "line"), [
    (["planner.name=best"], "planner.name: got 'best'; allowed: dhp, dhp_paper, static, static_best, "
                               "pow2, megatron"),
    (["data.path={folder}/none.json"], "data.path: no file or folder {folder}/none.json"),
    (["model.path={model}", "seed=5"],
     "seed: got 5; the run in {folder}/run has 0; allowed: that value, or another run.dir")])
def test_a_refused_run_imports_nothing_heavy_and_takes_no_second(
    words: list[str], line: str, arguments: list[str], model: Path, tmp_path: Path
) -> None:
    """By the entry point. The last one passes every other check. Process time, so that a busy machine does not fail it;
    the best of three.
    """
    write_run(tmp_path / "run", [*arguments, f"model.path={model}"])
    command = [sys.executable, "-X", "importtime", "jobs/train.py", *arguments,
               *(word.format(folder=tmp_path, model=model) for word in words)]
    times: list[float] = []
    while len(times) < 3 and (not times or times[-1] >= 1.0):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    said = [text for text in done.stderr.splitlines() if not text.startswith("import time:")]
    assert (done.returncode, done.stdout, said) == (2, "", [f"error: {line.format(folder=tmp_path)}"])
    imported = {text.rpartition("|")[2].strip().partition(".")[0] for text in done.stderr.splitlines()
                if text.startswith("import time:")}
    assert {"dhp_ray", "omegaconf"} <= imported
    assert not imported & set(HEAVY)
    assert min(times) < 1.0


def test_nothing_is_wrong_with_a_good_run(
    arguments: list[str], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_here(load(arguments))
    assert not list((tmp_path / "run").iterdir())
    cost = ROOT / "conf" / "cost" / "cpu.yaml"
    check_here(load([*arguments, f"model.path={model}", f"eval.path={tmp_path / 'rows.json'}", "eval.every_steps=1",
                     f"planner.cost={cost}"]))
    check_here(load([*arguments, "planner.cost=measure"]))
    (tmp_path / "measure").mkdir()
    monkeypatch.chdir(tmp_path)  # where the word is also the name of a folder
    check_here(load([*arguments, "planner.cost=measure"]))


def test_dropout_in_an_encoder_is_refused_before_a_worker_describes_it(arguments: list[str], model: Path) -> None:
    words = [*arguments, f"model.path={model}", "train.lora.rank=4", "train.lora.dropout=0.1"]
    assert refused(words) == (
        "train.lora.dropout: got 0.1 with train.lora.targets=all-linear, which adapts the vision encoder too; allowed: "
        "0, or train.freeze=vision")
    check_here(load([*words, "train.freeze=vision"]))
    check_here(load([*words, "train.lora.targets=q_proj"]))  # no layer of this encoder has the name


def test_the_planners_have_their_names() -> None:
    assert tuple(PLANNERS) == (*NAMES, LAST_RESORT)


@pytest.mark.parametrize(("words", "line"), [
    (["data.image_root={folder}/none"], "data.image_root: no folder {folder}/none"),
    (["eval.path={folder}/none", "eval.every_steps=1"], "eval.path: no file or folder {folder}/none"),
    (["data=parquet"],
     "data.path: {folder}/rows.json is no file of the format parquet; allowed: a name ending in .parquet, "
     "or data=llava"),
    (["data=synthetic"], "data.path: {folder}/rows.json is no file of the format synthetic; allowed: a name ending in "
                         ".parquet, or data=llava"),
    (["data=webdataset", "data.path={folder}"],
     "data.path: {folder} holds no file of the format webdataset; allowed: names ending in .tar, or data=llava"),
    (["data=synthetic", "data.path={folder}/my.json"], "data.path: no file or folder {folder}/my.json"),
    (["data=synthetic", "data.path={folder}/my.parquet"],
     "data.path: no file or folder {folder}/my.parquet; jobs/prepare_data.py writes it"),
    (["model=tiny_qwen3", "data=synthetic", "data.path={folder}/none.parquet"],
     "data.format: got synthetic, whose samples have images, and the model is text-only; allowed: text in "
     "another format"),
    (["model=tiny_llama", "train.freeze=[vision]"],
     "train.freeze: got vision, and the model is text-only; allowed: nothing"),
    (["model=tiny_qwen3", "train.balance_loss=0.001"],
     "train.balance_loss: got 0.001, and the model (qwen3) has no experts; allowed: 0"),
    (["train.expert_parallel=2", "planner.sync=micro_batch"],
     "train.expert_parallel: got 2, and the model (qwen2_5_vl) has no experts; allowed: auto, 1"),
    (["train.router_z_loss=0.001"],
     "train.router_z_loss: got 0.001, and the model (qwen2_5_vl) has no experts; allowed: 0"),
    (["data.image_root={folder}/rows.json"], "data.image_root: {folder}/rows.json is a file; allowed: a folder"),
    (["model.preset=", "model.path={folder}/rows.json"], "model.path: {folder}/rows.json is a file; allowed: a folder"),
    (["planner.cost={folder}/empty"], "planner.cost: {folder}/empty is a folder; allowed: a file"),
    (["run.dir={folder}/rows.json"], "run.dir: {folder}/rows.json is a file; allowed: a folder or URI"),
    (["run.dir=file://{folder}/rows.json"], "run.dir: {folder}/rows.json is a file; allowed: a folder or URI"),
    (["run.dir=nonsense://bucket/run"], "run.dir: nonsense://bucket/run: not a folder that storage knows: Unrecognized "
                                        "filesystem type in URI: nonsense://bucket/run"),
    (["data.path={folder}/damaged.json"],
     "data.path: {folder}/damaged.json is not JSON: 'utf-8' codec can't decode byte 0x89 in position 0: "
     "invalid start byte (in its first row; rows are the objects of one array, or one a line)"),
    (["data.path={folder}/other.jsonl"],
     "data.path: {folder}/other.jsonl: no row has conversations; "
     "allowed: rows with id, image and conversations (or messages)"),
    (["data.path=", "data.sources=[{{path: {folder}/rows.json}}, {{path: {folder}/none}}]"],
     "data.path: no file or folder {folder}/none"),
    (["data=parquet", "data.path={folder}/empty"],
     "data.path: {folder}/empty holds no file of the format parquet; allowed: names ending in .parquet"),
    (["planner.cost={folder}/none.yaml"], "planner.cost: {folder}/none.yaml: cannot be read: FileNotFoundError"),
    (["planner.cost={folder}/other.jsonl"], "planner.cost: {folder}/other.jsonl: quadratic_s: missing"),
    (["run.dir={folder}/rows.json/run"],
     "run.dir: {folder}/rows.json/run/checkpoints: cannot be listed: Not a directory"),
    (["run.dir={folder}/whole", "run.resume=never"],
     "run.resume: got 'never' with a run in {folder}/whole; allowed: auto, or another run.dir"),
    (["run.dir={folder}/whole", "batch.global_samples=3"],
     "batch.global_samples: got 3; the run in {folder}/whole has 16; allowed: that value, or another run.dir"),
    (["run.dir={folder}/whole", "data.path={folder}/whole/plans/rows.json"],
     "data.path: got '{folder}/whole/plans/rows.json', which lies in run.dir, where the run writes plans; allowed: "
     "another place, or another run.dir")])
def test_a_path_that_is_wrong(words: list[str], line: str, arguments: list[str], tmp_path: Path) -> None:
    (tmp_path / "damaged.json").write_bytes(b"\x89PNG\r\n\x1a\n\x00")
    (tmp_path / "other.jsonl").write_text('{"name": "cost"}\n')
    (tmp_path / "empty").mkdir()
    write_run(tmp_path / "whole", arguments)
    (tmp_path / "whole" / "plans").mkdir()
    write_rows(tmp_path / "whole" / "plans" / "rows.json", ROWS)
    assert refused([*arguments, *(word.format(folder=tmp_path) for word in words)]) == line.format(folder=tmp_path)


@pytest.mark.parametrize(("path", "line"), [
    ("Qwen/Qwen2.5-VL-3B-Instruct",
     "model.path: no folder Qwen/Qwen2.5-VL-3B-Instruct; allowed: a local Hugging Face folder "
     "(`hf download Qwen/Qwen2.5-VL-3B-Instruct --local-dir FOLDER` fetches that model, then model.path=FOLDER)"),
    ("runs/default/model", "model.path: no folder runs/default/model; allowed: a local Hugging Face folder"),
    ("runs/none", "model.path: no folder runs/none; allowed: a local Hugging Face folder"),
    ("/nowhere", "model.path: no folder /nowhere; allowed: a local Hugging Face folder"),
    ("x" * 300, f"model.path: {'x' * 300}: File name too long")])
def test_a_model_that_is_no_folder(
    path: str, line: str, arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What reads like a name on the Hub is answered with the line that fetches it; not where its first part is a folder
    that there is.
    """
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    assert refused([*arguments, f"model.path={path}"]) == line


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def add_words(folder: Path) -> None:
    """To the tokenizer, and not to the embedding, which has one row to spare."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<red>", "<green>"])
    tokenizer.save_pretrained(folder)


def marked(name: str, folder: Path) -> None:
    """As an editor writes it that puts a byte order mark before a text."""
    (folder / name).write_bytes(codecs.BOM_UTF8 + (folder / name).read_bytes())


@pytest.mark.parametrize(("damage", "line"), [
    (add_words, ": its tokenizer has token ids up to 264, which take 265 rows of the model's embedding; it has 264 "
                "(vocab_size in config.json); allowed: a tokenizer that the embedding holds, or a model saved after "
                "resize_token_embeddings"),
    (lambda folder: (folder / "config.json").unlink(), " has no config.json; allowed: a local Hugging Face folder"),
    (lambda folder: (folder / "config.json").rename(folder / "adapter_config.json"),
     " holds an adapter; allowed: the model that `python jobs/merge.py adapter={folder} out=FOLDER` makes of it"),
    (lambda folder: (folder / "config.json").write_text('{"model_type": "internvl_chat"}'),
     " holds a model of type 'internvl_chat', which brings its own code; allowed: the same model in the form of "
     "transformers, from the repository whose name ends in -hf or -HF"),
    (lambda folder: (folder / "config.json").write_text('{"model_type": "gpt2"}'),
     f" holds a model of type 'gpt2'; allowed: {', '.join(MODEL_TYPES)}"),
    (lambda folder: (folder / "model.safetensors").rename(folder / "model.bin"),
     " has no model.safetensors (it has model.bin, which can run code when read); allowed: weights as safetensors"),
    (lambda folder: cut(folder / "model.safetensors"), r": model.safetensors cannot be read: .+"),
    (lambda folder: (folder / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n"),
     ": model.safetensors cannot be read: .+"),
    (lambda folder: (folder / "tokenizer.json").unlink(),
     " has no tokenizer; allowed: a folder with tokenizer.json or with vocab.json and merges.txt"),
    (lambda folder: [file.unlink() for file in folder.glob("chat_template.*")],
     " has no chat template; allowed: chat_template.jinja, chat_template.json, or one in tokenizer_config.json"),
    (lambda folder: (folder / "chat_template.jinja").write_bytes(b"\xff"),
     "/chat_template.jinja is not UTF-8 text: .+"),
    *((partial(marked, name), f"/{name} begins with a byte order mark; allowed: UTF-8 without one") for name in (
        "tokenizer.json", "tokenizer_config.json", "preprocessor_config.json", "video_preprocessor_config.json",
        "processor_config.json", "chat_template.json")),
    *((partial(marked, name), f"/{name} is not JSON: .*BOM.*") for name in ("config.json", "generation_config.json")),
    (lambda folder: (folder / "config.json").write_text('{"a":' * 200_000), "/config.json is not JSON: maximum "),
    (lambda folder: (folder / "generation_config.json").write_text('{"eos_token_id":'),
     "/generation_config.json is not JSON: .+"),
    (lambda folder: (folder / "generation_config.json").write_text("[]"),
     "/generation_config.json holds list; allowed: an object"),
    (lambda folder: (folder / "merges.txt").write_bytes("#version: 0.2\n".encode("utf-16")),
     "/merges.txt begins with a byte order mark; allowed: UTF-8 without one"),
    (lambda folder: (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": 3}}'),
     " is not an index of safetensors: .+"),
    (lambda folder: (folder / "preprocessor_config.json").unlink(),
     " has the image processor (none)|has no preprocessor_config.json")])
def test_a_model_folder_that_lacks_something(
    damage: Callable[[Path], object], line: str, arguments: list[str], model: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(model, tmp_path / "model"))
    damage(folder)
    said = refused([*arguments, f"model.path={folder}"])
    assert said.startswith(f"model.path: {folder}")
    assert said.endswith(line.replace("{folder}", str(folder))) or re.search(line, said), said


def with_workers(device: str, number: int, cpus: float = 0.1, precision: str = "bf16") -> Config:
    config = Config()
    config.train.precision = precision
    config.cluster.device, config.cluster.num_workers, config.cluster.cpus_per_worker = device, number, cpus
    return config


MORE_NODES = CLUSTER.format("more nodes")


@pytest.mark.parametrize(("config", "line"), [
    (with_workers("cuda", 4),
     f"cluster.num_workers: got 4; they need 4 GPU, this machine has 1; allowed: at most 1, {MORE_NODES}"),
    (with_workers("auto", 4),
     f"cluster.num_workers: got 4; they need 4 GPU, this machine has 1; allowed: at most 1, {MORE_NODES}"),
    (with_workers("cpu", 4, 3.0),
     f"cluster.num_workers: got 4; they need 12 CPU, this machine has 8; allowed: at most 2, {MORE_NODES}"),
    (with_workers("cpu", 1, 9.0),
     "cluster.num_workers: got 1; they need 9 CPU, this machine has 8; "
     "allowed: a Ray cluster with more nodes (its head in RAY_ADDRESS)"),
    (with_workers("auto", 1, precision="fp32"),
     "train.precision: got 'fp32' with cluster.device=cuda; "
     "allowed: bf16 (attention there has no fp32 kernel; master weights stay fp32)")])
def test_workers_that_this_machine_has_no_room_for(config: Config, line: str) -> None:
    device = config.cluster.device
    with pytest.raises(ConfigError) as caught:
        check_workers(config, {"CPU": 8, "GPU": 1, "NPU": 0})
    assert str(caught.value) == line
    assert config.cluster.device == device


@pytest.mark.parametrize("config", [with_workers("cuda", 1), with_workers("auto", 1), with_workers("cpu", 80),
                                    with_workers("cpu", 8, 1.0)])
def test_workers_that_fit(config: Config) -> None:
    check_workers(config, {"CPU": 8, "GPU": 1, "NPU": 0})


@pytest.mark.parametrize(("resources", "name"), [
    ({"CPU": 8.0}, "cpu"), ({"GPU": 1}, "cuda"), ({"GPU": 1, "NPU": 8}, "npu"), ({"GPU": 0.0, "NPU": 0}, "cpu")])
def test_the_best_kind_of_device(resources: dict[str, float], name: str) -> None:
    assert device_of("auto", resources).name == name
    assert device_of("cpu", resources).name == "cpu"


@pytest.mark.parametrize("kind", [CUDA, NPU], ids=lambda kind: kind.name)
def test_no_device_is_told_before_ray(kind: Accelerator, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    if kind.num_devices():
        pytest.skip(f"this machine has {kind.files}")
    words = [*arguments, f"cluster.device={kind.name}", "train.precision=bf16", "cluster.num_workers=1"]
    allowed = f"allowed: cpu, auto, {CLUSTER.format('such devices')}"
    assert refused(words) == f"cluster.device: got '{kind.name}'; this machine has no {kind.files}; {allowed}"
    monkeypatch.setenv(kind.visible, "")
    assert refused(words) == f"cluster.device: got '{kind.name}'; {kind.visible}='' shows none; {allowed}"
    monkeypatch.setenv("RAY_OVERRIDE_RESOURCES", json.dumps({kind.resource: 2}))
    check_here(load(words))
    monkeypatch.delenv("RAY_OVERRIDE_RESOURCES")
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")  # what another cluster has is for that cluster to say
    check_here(load(words))


@pytest.mark.parametrize("address", ["", "ray://10.0.0.1:10001"])
def test_a_cluster_that_is_joined_says_itself_what_it_holds(
    address: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    check_here(load([*arguments, "cluster.device=npu", "train.precision=bf16", "cluster.num_workers=99999"]), True)


@pytest.mark.parametrize("unusable", ['{"CPU": "many"}', "[1]", "no JSON"])
def test_resources_that_are_no_numbers_are_rays_to_refuse(
    unusable: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_OVERRIDE_RESOURCES", unusable)
    check_here(load([*arguments, "cluster.device=cpu", "cluster.num_workers=1"]))


@pytest.mark.parametrize(
    ("shown", "number"), [(None, 3), ("0,1", 2), ("1", 1), ("", 0), ("NoDevFiles", 0), ("0,1,2,3,4", 3)]
)
def test_devices_are_counted_by_their_files(
    shown: str | None, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("davinci0", "davinci1", "davinci12", "davinci_manager"):
        (tmp_path / name).touch()
    npu = Accelerator("npu", "hccl", "NPU", str(tmp_path / "davinci[0-9]*"), NPU.visible)
    if shown is not None:
        monkeypatch.setenv(NPU.visible, shown)
    assert npu.num_devices() == number


def test_this_machines_resources_are_at_least_rays() -> None:
    from ray._private.resource_and_label_spec import ResourceAndLabelSpec

    found = ResourceAndLabelSpec().resolve(is_head=True, node_ip_address="127.0.0.1")
    here = resources_here()
    assert here["CPU"] >= found.num_cpus
    assert here["GPU"] >= (found.num_gpus or 0)
    assert here["CPU"] == os.cpu_count()


@pytest.mark.parametrize("address", ["ray://10.0.0.1:10001", "http://127.0.0.1:8265"])
def test_a_cluster_that_this_machine_is_no_node_of_is_refused(
    address: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    line = f"RAY_ADDRESS: got {address}; allowed: HOST:PORT of the head of a cluster that this machine is a node of"
    assert refused(arguments).startswith(line)
    with pytest.raises(ConfigError, match=re.escape(line)):
        check_evaluation_here(load(["model.path=m", "eval.path=p"], EVALUATE))


def test_a_relative_run_folder_in_an_upload_is_refused(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload = tmp_path / UPLOADS / "_ray_pkg_1"
    upload.mkdir(parents=True)
    monkeypatch.chdir(upload)
    for folder in ("runs/mine", "mine", "./runs", "../runs"):
        assert refused([*arguments, f"run.dir={folder}"]) == (
            f"run.dir: got '{folder}', which is relative: it would lie in the copy of the working directory that Ray "
            "makes on each node, and deletes; allowed: an absolute path or a URI that every node reaches")
    assert not list(upload.iterdir())
    check_here(load(arguments))
    check_here(load([*arguments, "run.dir=s3://bucket/run"]))
    monkeypatch.chdir(tmp_path)
    check_here(load([*arguments, "run.dir=mine"]))


@pytest.mark.parametrize(("words", "line"), [
    (["eval.output={folder}"], "eval.output: {folder} is a folder; allowed: a file"),
    (["eval.output={folder}/file/out"], "eval.output: {folder}/file/out cannot be written: Not a directory"),
    (["data.image_root={folder}/rows.json"], "data.image_root: {folder}/rows.json is a file; allowed: a folder"),
    (["eval.path={folder}/none"], "eval.path: no file or folder {folder}/none")])
def test_an_evaluation_with_a_wrong_path(words: list[str], line: str, model: Path, tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.json", ROWS)
    (tmp_path / "file").write_text("")
    arguments = [f"model.path={model}", f"eval.path={tmp_path / 'rows.json'}", "data.format=llava",
                 f"eval.output={tmp_path / 'new' / 'out'}", "cluster.num_workers=1"]
    check_evaluation_here(load(arguments, EVALUATE))
    assert not (tmp_path / "new").exists()
    with pytest.raises(ConfigError) as caught:
        check_evaluation_here(load([*arguments, *(word.format(folder=tmp_path) for word in words)],
                                   EVALUATE))
    assert str(caught.value) == line.format(folder=tmp_path)


def test_an_evaluation_of_a_model_with_more_token_ids_than_rows(model: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(model, tmp_path / "model"))
    add_words(folder)
    arguments = [f"model.path={folder}", f"eval.path={write_rows(tmp_path / 'rows.json', ROWS)}", "data.format=llava",
                 f"eval.output={tmp_path / 'out'}", "cluster.num_workers=1"]
    with pytest.raises(ConfigError, match=f"^model.path: {folder}: its tokenizer has token ids up to 264, "):
        check_evaluation_here(load(arguments, EVALUATE))


def test_a_run_goes_on_whether_its_paths_were_relative_or_not(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    relative = [*arguments, "data.path=rows.json", "run.dir=whole"]
    write_run(tmp_path / "whole", relative)
    check_here(load(relative))
    config = load(relative)
    make_absolute(config)
    check_here(config)
    (tmp_path / "elsewhere").mkdir()
    write_rows(tmp_path / "elsewhere" / "rows.json", ROWS)
    monkeypatch.chdir(tmp_path / "elsewhere")
    (tmp_path / "whole" / "config.yaml").write_text(dump(config))
    assert refused([*relative, f"run.dir={tmp_path / 'whole'}"]).startswith("data.path: got 'rows.json'; the run in ")
