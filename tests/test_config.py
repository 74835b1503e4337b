"""What a configuration takes from files, choices and the command line, and what it says of each thing that is wrong."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from dhp_ray.config import (
    CHOICES,
    CONF,
    EVALUATE,
    PREPARE_DATA,
    TRAIN,
    Command,
    Config,
    ConfigError,
    _keys,
    check_device,
    dump,
    help_text,
    leaves,
    load,
    make_absolute,
    places,
    walk,
)
from dhp_ray.credentials import full_uri
from dhp_ray.schema import Data, Source

KEYS = [name for name, _, _ in walk(Config())]


def refused(argv: list[str], command: Command = TRAIN) -> str:
    with pytest.raises(ConfigError) as caught:
        load(argv, command)
    message = str(caught.value)
    assert message
    assert "\n" not in message
    return message


def test_every_name_of_the_contract_is_a_key() -> None:
    contract = """
        run.dir run.steps run.epochs run.resume seed data.format data.path data.image_root data.sources
        data.max_pixels data.on_error batch.global_samples batch.drop_last model.preset model.path
        cluster.num_workers cluster.min_workers cluster.max_workers cluster.device cluster.cpus_per_worker
        cluster.start_timeout_s planner.name planner.sync planner.cost planner.tokens_per_rank comm.transport
        checkpoint.every_steps eval.path eval.every_steps train.learning_rate train.vision_learning_rate
        train.weight_decay train.adam_eps train.clip_norm train.precision train.freeze
        train.activation_checkpointing"""
    assert set(contract.split()) <= set(KEYS)
    assert list(_keys(Config)) == KEYS


def test_overrides_win_and_keep_their_types(bare: list[str]) -> None:
    config = load([*bare, "run.steps=7", "train.learning_rate=3e-4", "batch.drop_last=true", "train.freeze=[vision]",
                   "planner.tokens_per_rank=480", "run.dir=s3://bucket/x?region=a", "cluster.cpus_per_worker=1",
                   "run.steps=8", "train.weight_decay=0"])
    assert config.run.steps == 8  # the last of two
    assert config.train.learning_rate == 3e-4
    assert config.batch.drop_last is True
    assert config.train.freeze == ["vision"]
    assert config.planner.tokens_per_rank == "480"
    assert config.run.dir == "s3://bucket/x?region=a"
    assert isinstance(config.cluster.cpus_per_worker, float)
    assert config.train.weight_decay == 0.0


@pytest.mark.parametrize("text", ["1e3", "007", "true", "2020-01-01", "a: b", "[half", "{x", "a=b", "ü ö", "1_000",
                                  "C:\\runs", "-", "0x1F", "my #1 run", "null", "!!int 3", "&a b", " x "])
def test_text_for_a_string_is_taken_as_it_is(bare: list[str], text: str) -> None:
    assert load([*bare, f"run.dir={text}"]).run.dir == text


def test_recomputation_is_true_false_or_auto(bare: list[str], tmp_path: Path) -> None:
    for text in ("true", "True", "false", "auto"):
        assert load([*bare, f"train.activation_checkpointing={text}"]).train.activation_checkpointing == text.lower()
    (tmp_path / "older.yaml").write_text("model: {preset: tiny}\ntrain: {activation_checkpointing: true}\n")
    assert load(["--config", str(tmp_path / "older.yaml")]).train.activation_checkpointing == "true"


def test_quotes_of_a_string_are_yaml(bare: list[str]) -> None:
    assert load([*bare, "run.dir='a b'"]).run.dir == "a b"
    assert load([*bare, "model.preset=''", "model.path=/m"]).model.path == "/m"


def test_nothing_after_the_sign_empties_strings_and_lists(bare: list[str]) -> None:
    config = load([*bare, "data.path=", "train.freeze=", "data.sources=", "model.preset=", "model.path=/m"])
    assert (config.data.path, config.train.freeze, config.data.sources, config.model.preset) == ("", [], [], "")
    assert refused([*bare, "run.steps="]) == "run.steps: got nothing (the command line); allowed: a whole number"


def test_a_folder_on_the_command_line_replaces_the_preset_of_a_file(bare: list[str], tmp_path: Path) -> None:
    config = load([*bare, "model.path=/models/qwen"])
    assert (config.model.preset, config.model.path) == ("", "/models/qwen")
    path = tmp_path / "folder.yaml"
    path.write_text("model: {path: /models/qwen}\n")
    assert load(["--config", str(path), "model.preset=tiny"]).model.path == ""
    assert "exactly one of the two" in refused([*bare, "model.path=/m", "model.preset=tiny"])
    assert "exactly one of the two" in refused([*bare, "model.preset="])


def test_epochs_on_the_command_line_replace_the_steps_of_a_file(bare: list[str], tmp_path: Path) -> None:
    assert (load(["run.epochs=3"]).run.steps, load(["run.epochs=3"]).run.epochs) == (0, 3)
    assert load(["run.epochs=3", "run.steps=7"]).run.steps == 7
    path = tmp_path / "epochs.yaml"
    path.write_text("model: {preset: tiny}\nrun: {epochs: 3, steps: 5}\n")
    assert load(["--config", str(path), "run.steps=0"]).run.epochs == 3  # which takes the epochs of the file
    assert load(["--config", str(path), "run.steps=9"]).run.steps == 9


def test_adapters_are_of_a_folder(bare: list[str]) -> None:
    folder = [*bare, "model.path=/m", "train.lora.rank=8"]
    lora = load([*folder, "train.lora.targets=[q_proj,v_proj]", "train.lora.alpha=4", "train.lora.dropout=0.1"]
                ).train.lora
    assert (lora.rank, lora.alpha, lora.targets, lora.dropout) == (8, 4.0, ["q_proj", "v_proj"], 0.1)
    for given in ("alpha=8.0", "targets=['q_proj']", "dropout=0.1"):
        assert refused([*bare, "model.path=/m", f"train.lora.{given}"]) == (
            f"train.lora.rank: got 0 with train.lora.{given}; allowed: at least 1")
    assert refused([*bare, "train.lora.rank=8"]).startswith("train.lora.rank: got 8 with model.preset=tiny; allowed: 0")
    assert refused([*folder, "train.lora.targets="]).startswith("train.lora.targets: got []; allowed: all-linear")
    assert refused([*folder, "train.lora.dropout=1"]) == (
        "train.lora.dropout: got 1.0; allowed: at least 0 and less than 1")


def test_experts_are_shared_by_ranks_that_gather_them(bare: list[str]) -> None:
    assert load([*bare, "planner.sync=step", "train.expert_parallel=1"]).train.expert_parallel == "1"
    assert refused([*bare, "planner.sync=step", "train.expert_parallel=2"]) == (
        "train.expert_parallel: got 2 with planner.sync=step, where each rank has all experts; allowed: 1, or "
        "planner.sync=micro_batch")
    assert refused([*bare, "train.expert_parallel=0"]).startswith("train.expert_parallel: got '0'; allowed: auto, or a")


def test_what_a_runs_first_start_found_out_is_no_key(bare: list[str], tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"{dump(load(bare))}resolved:\n  image_limit: 1280\n")
    assert load(["--config", str(path)]) == load(bare)


def test_a_name_is_a_list_of_one(bare: list[str], tmp_path: Path) -> None:
    assert load([*bare, "train.freeze=vision"]).train.freeze == ["vision"]
    assert load([*bare, "model.preset=", "model.path=x", "train.lora.rank=1",
                 "train.lora.targets=q_proj, v_proj"]).train.lora.targets == ["q_proj", "v_proj"]
    (tmp_path / "frozen.yaml").write_text("model: {preset: tiny}\ntrain: {freeze: vision}\n")
    assert load(["--config", str(tmp_path / "frozen.yaml")]).train.freeze == ["vision"]


PATHS = {name: item.metadata["path"] for name, _, item in places(Config())}


def test_the_users_home_stands_in_every_path(bare: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert set(PATHS) == {"run.dir", "data.path", "data.image_root", "model.path", "planner.cost", "eval.path"}
    (tmp_path / "mine.yaml").write_text(Path(bare[1]).read_text())
    config = load(["--config=~/mine.yaml", "model.preset=", "eval.every_steps=1", *(f"{name}=~/x" for name in PATHS)])
    assert {getattr(section, item.name) for _, section, item in places(config)} == {str(tmp_path / "x")}
    [source] = load([*bare, "data.sources=[{path: ~/x}]"]).data.sources
    assert source.path == str(tmp_path / "x")
    assert load([*bare, "data.path=~nobody_here/x"]).data.path == "~nobody_here/x"
    assert load([*bare, "run.dir=~"]).run.dir == str(tmp_path)


@pytest.mark.parametrize("name", sorted(set(PATHS) - {"run.dir"}))
def test_a_uri_is_refused_where_none_is_read(bare: list[str], name: str) -> None:
    said = refused([*bare, "eval.every_steps=1", "eval.path=x", f"{name}=s3://KEY:secret@bucket/x"])
    assert re.fullmatch(rf"{name}: got s3://\*\*\*@bucket/x; allowed: a (file|folder|file or folder) of this machine "
                        r"\(URIs are not read\)", said)
    assert refused([*bare, "data.sources=[{path: s3://bucket/x}]"]).startswith("data.sources[0].path: got s3://bucket/x;")


@pytest.mark.parametrize("words", [[], ["data=llava"], ["model=small"]])
def test_a_package_without_its_settings_is_one_line(
    words: list[str], bare: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As a wheel installs it."""
    monkeypatch.setattr("dhp_ray.config.CONF", tmp_path / "conf")
    line = ("dhp_ray is installed without its conf/; allowed: an editable install of a checkout "
            "(pip install -e FOLDER)")
    assert refused([*bare, *words]) == line
    assert refused(words, replace(TRAIN, file=tmp_path / "conf" / "train.yaml")) == line


def test_relative_paths_are_the_callers(bare: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    config = load([*bare, "data.sources=[{path: a/../b}]", "run.dir=runs/x", "planner.cost=measure", "eval.path=/c",
                   "eval.every_steps=1"])
    make_absolute(config)
    monkeypatch.chdir("/")
    assert config.run.dir == str(tmp_path / "runs" / "x")
    assert config.data.sources[0].path == str(tmp_path / "b")
    assert (config.planner.cost, config.eval.path, config.model.path) == ("measure", "/c", "")
    remote = load([*bare, "run.dir=s3://KEY:secret@bucket/run"])
    make_absolute(remote)
    assert full_uri(remote.run.dir) == "s3://KEY:secret@bucket/run"


def test_a_command_offers_its_own_keys(bare: list[str]) -> None:
    command = replace(TRAIN, keys=r"data\.|eval\.path", own=("quick",))
    assert refused([*bare, "quik=1"], command) == "quik: no such key (the command line); allowed: quick, data, eval"
    assert refused([*bare, "eval.paht=1"], command) == "eval.paht: no such key (the command line); allowed: eval.path"


def test_the_key_of_another_command_is_passed_over_in_files_alone(bare: list[str], tmp_path: Path) -> None:
    (tmp_path / "both.yaml").write_text(
        "model: {preset: tiny}\ndata: {synthetic: {num_samples: 5}}\neval: {output: x}\n")
    both = ["--config", str(tmp_path / "both.yaml")]
    assert load(both) == load(bare)
    assert load(both, PREPARE_DATA).data.synthetic.num_samples == 5
    assert load([*both, "model.path=m", "eval.path=p"], EVALUATE).eval.output == "x"
    for key, command, others in (("train.precision=fp32", EVALUATE, "train.py"),
                                 ("run.dir=x", PREPARE_DATA, "train.py"),
                                 ("data.path=x", EVALUATE, "train.py and jobs/prepare_data.py")):
        assert refused([*bare, key], command) == (
            f"{key.partition('=')[0]}: no key of {command.name} (the command line); allowed: in jobs/{others} alone")
    assert refused([*bare, "data.synthetic.max_tokens=5"]) == (
        "data.synthetic.max_tokens: no key of jobs/train.py (the command line); allowed: in jobs/prepare_data.py alone")
    assert refused([*bare, "eval.output=x"], PREPARE_DATA) == (
        "eval.output: no key of jobs/prepare_data.py (the command line); allowed: in jobs/evaluate.py alone")
    assert refused([*bare, "data.synthetic.num_samples=1000000000000"], PREPARE_DATA) == (
        "data.synthetic.num_samples: got 1000000000000; allowed: at least 1 and at most 10000000")


def test_sources(bare: list[str]) -> None:
    config = load([*bare, "data.sources=[{path: a, weight: 3}, {path: b}]"])
    assert config.data.sources == [Source(path="a", weight=3.0), Source(path="b", weight=1.0)]
    assert load([*bare, "data.path=x", "data.sources="]).data.path == "x"
    for text, said in [("[{path: a, weight: 0}]", "data.sources[0].weight: got 0.0; allowed: more than 0"),
                       ("[{path: a}, {weight: 1}]", "data.sources[1].path: got nothing"),
                       ("[{pth: a}]", "a list of {path: ..., weight: ..., format: ...}"),
                       ("[a]", "a list of {path: ..., weight: ..., format: ...}"),
                       ("a", "a list of {path: ..., weight: ..., format: ...}"),
                       ("{path: a}", "a list of {path: ..., weight: ..., format: ...}")]:
        message = refused([*bare, f"data.sources={text}"])
        assert message.startswith("data.sources")
        assert said in message
    assert refused([*bare, "data.path=x",
                    "data.sources=[{path: a}]"]).startswith("data.sources: got 1 with data.path='x'")


@pytest.mark.parametrize(("word", "key", "said"), [
    ("run.stepz=3", "run.stepz", "no such key (the command line); allowed: run.dir, run.steps"),
    ("nonsense=3", "nonsense", "no such key (the command line); allowed: batch, checkpoint"),
    ("run.dir.x=3", "run.dir.x", "no such key"),
    ("run=3", "run", "a section, not a key"),
    ("run.steps=three", "run.steps", "got 'three' (the command line); allowed: a whole number"),
    ("run.steps=1.5", "run.steps", "got 1.5 (the command line); allowed: a whole number"),
    ("run.steps=1e3", "run.steps", "got 1000.0 (the command line); allowed: a whole number"),
    ("run.steps=true", "run.steps", "got True (the command line); allowed: a whole number"),
    ("run.steps=[3]", "run.steps", "got [3] (the command line); allowed: a whole number"),
    ("run.steps=-1", "run.steps", "got -1; allowed: at least 0"),
    ("run.steps=null", "run.steps", "got nothing (the command line); allowed: a whole number"),
    ("run.steps=" + "9" * 5000, "run.steps", ""),
    ("run.steps=" + "9" * 400, "run.steps", "got a number of more than 18 digits; allowed: at least 0"),
    ("train.learning_rate=" + "9" * 400, "train.learning_rate", "allowed: a number"),
    ("train.learning_rate=fast", "train.learning_rate", "got 'fast' (the command line); allowed: a number"),
    ("train.learning_rate=0", "train.learning_rate", "got 0.0; allowed: more than 0 and at most 1e+30"),
    ("train.learning_rate=1e39", "train.learning_rate", "got 1e+39; allowed: more than 0 and at most 1e+30"),
    ("cluster.num_workers=1000000000", "cluster.num_workers", "got 1000000000; allowed: at least 1 and at most 100000"),
    ("cluster.cpus_per_worker=1e-9", "cluster.cpus_per_worker",
     "got 1e-09; allowed: at least 0.0001 and at most 10000"),
    ("comm.timeout_s=1e18", "comm.timeout_s", "got 1e+18; allowed: more than 0 and at most 2592000"),
    ("train.learning_rate=.nan", "train.learning_rate", "got nan; allowed: more than 0"),
    ("train.learning_rate=.inf", "train.learning_rate", "got inf; allowed: more than 0"),
    ("train.adam_beta1=1", "train.adam_beta1", "got 1.0; allowed: at least 0 and less than 1"),
    ("train.min_learning_rate_ratio=1.5", "train.min_learning_rate_ratio",
     "got 1.5; allowed: at least 0 and at most 1"),
    ("batch.drop_last=2", "batch.drop_last", "got 2 (the command line); allowed: true or false"),
    ("batch.drop_last=maybe", "batch.drop_last", "got 'maybe' (the command line); allowed: true or false"),
    ("batch.global_samples=0", "batch.global_samples", "got 0; allowed: at least 1"),
    ("batch.global_samples=1000000000000", "batch.global_samples",
     "got 1000000000000; allowed: at least 1 and at most 10000000"),
    ("seed=-1", "seed", "got -1; allowed: at least 0"),
    ("seed=4294967296", "seed", "got 4294967296; allowed: at least 0 and at most 4294967295"),
    ("run.dir=", "run.dir", "got nothing"),
    ("run.dir=${seed}", "run.dir", "allowed: a plain value, without ${...}"),
    ("run.dir=???", "run.dir", "allowed: a plain value, without ${...}"),
    ("train.freeze=['${seed}']", "train.freeze", "allowed: a plain value, without ${...}"),
    ("run.resume=maybe", "run.resume", "got 'maybe'; allowed: auto, never"),
    ("data.format=csv", "data.format", "got 'csv'; allowed: llava, parquet"),
    ("cluster.device=tpu", "cluster.device", "got 'tpu'; allowed: auto, cpu, cuda, npu"),
    ("cluster.num_workers=0", "cluster.num_workers", "got 0; allowed: at least 1"),
    ("cluster.min_workers=3", "cluster.min_workers", "got 3; allowed: at most cluster.num_workers (2)"),
    ("cluster.max_workers=1", "cluster.max_workers", "got 1; allowed: 0, or at least cluster.num_workers (2)"),
    ("planner.tokens_per_rank=0", "planner.tokens_per_rank", "got '0'; allowed: auto, or a whole number"),
    ("planner.tokens_per_rank=some", "planner.tokens_per_rank", "got 'some'; allowed: auto, or a whole number"),
    ("elastic.mirror_every_steps=1001", "elastic.mirror_every_steps",
     "got '1001'; allowed: auto, or a whole number of at least 0 and at most 1000"),
    ("elastic.mirror_every_steps=-1", "elastic.mirror_every_steps", "got '-1'; allowed: auto, or a whole number"),
    ("elastic.mirror_every_steps=often", "elastic.mirror_every_steps", "got 'often'; allowed: auto, or a whole number"),
    ("planner.tokens_per_rank=4.5", "planner.tokens_per_rank", "got '4.5'; allowed: auto, or a whole number"),
    ("data.min_pixels=9999999", "data.min_pixels", "got 9999999; allowed: at most data.max_pixels (1003520)"),
    ("train.activation_checkpointing=1", "train.activation_checkpointing",
     "allowed: true, false, selective, packs, auto"),
    ("planner.sync=none", "planner.sync", "got 'none'; allowed: step, micro_batch, auto"),
    ("train.freeze=3", "train.freeze", "got 3 (the command line); allowed: vision, language"),
    ("train.freeze=head", "train.freeze", "got 'head'; allowed: vision, language"),
    ("train.freeze=[audio]", "train.freeze", "got 'audio'; allowed: vision, language"),
    ("train.freeze=[[vision]]", "train.freeze", "allowed: vision, language"),
    ("train.freeze=[vision, language]", "train.freeze", "nothing is left to train"),
    ("train.freeze=[vision", "train.freeze", "is not a YAML value"),
    ("eval.every_steps=5", "eval.every_steps", "got 5 with eval.path=''; allowed: both or neither"),
    ("data.format=webdataset", "data.path", "got nothing with data.format=webdataset; allowed: a file or folder"),
    ("data.sources=[{path: a, format: csv}]", "data.sources[0].format", "got 'csv'; allowed: nothing, llava, parquet"),
    ("cluster.device=cuda", "train.precision", "got 'fp32' with cluster.device=cuda; allowed: bf16"),
    ("run.dir=s3://***@bucket/x", "run.dir",
     "got 's3://***@bucket/x', a URI as it is shown; allowed: the whole URI, with its credentials"),
    ("run.steps=s3://KEY:secret@bucket", "run.steps", "got 's3://***@bucket' (the command line)"),
    ("data.format=llava", "data.path", "got nothing with data.format=llava; allowed: a file or folder"),
    ("model=huge", "model", "got 'huge'; allowed: "),
    ("model=../train", "model", "got '../train'; allowed: "),
    ("--steps", "--steps", "not understood; allowed: --config FILE, --help and key=value"),
    ("steps", "steps", "not understood"),
    ("=3", "=3", "not understood; allowed: key=value"),
    ("a b=3", "a b=3", "not understood; allowed: key=value"),
    ("run.dir\n=3", "run.dir =3", "not understood"),
])
def test_what_is_wrong_is_said_in_one_line_with_the_key(bare: list[str], word: str, key: str, said: str) -> None:
    message = refused([*bare, word])
    assert message.startswith(f"{key}: ")
    assert said in message
    assert len(message) < 6000


@pytest.mark.parametrize(("text", "said"), [
    ("run: {stepz: 3}", "run.stepz: no such key ("), ("run: 3", "run: a section, not a key ("),
    ("run: {steps: x}", "run.steps: got 'x' ("),
    ("[1, 2]", "allowed: sections with keys"), ("just text", "no such key ("), ("a: [", "is not YAML"),
    ("a: 1\na: 2", "is not YAML: line 2: found duplicate key a"),
    ("run:\n  dir: x\n\tseed: 3", "is not YAML: line 3: "),
    ("\x00", "--config: "),
    ("choices: tiny", "choices: got 'tiny'; allowed: model, data, cluster"),
    ("choices: {modle: tiny}", "choices.modle: no such choice"),
    ("choices: {model: huge}", "model: got 'huge'; allowed: "),
    ("choices: {model: [tiny]}", "model: got ['tiny']; allowed: "),
    ("run: {dir: '${seed}'}", "run.dir: got '${seed}'"), ("run: {dir: '${'}", ""), ("seed:", "seed: got nothing"),
    ("1: 2", "1: no such key"),
    ("run: {1: 2}", "run.1: no such key"), ("run: {dir: {a: 1}}", "run.dir.a: no such key"),
])
def test_a_bad_file_is_one_line(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text + ("" if "model" in text else "\nmodel: {preset: tiny}\n" if ":" in text and "[" not in text
                            else ""))
    assert said in refused(["--config", str(path)])


def test_a_file_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    assert refused(["--config", str(tmp_path / "none.yaml")]) == f"--config: no file {tmp_path / 'none.yaml'}"
    assert "cannot be read" in refused([f"--config={tmp_path}"])
    assert refused(["--config"]) == "--config: needs a file"
    (tmp_path / "latin.yaml").write_bytes(b"run: {dir: \xff\xfe}")
    assert refused([f"--config={tmp_path / 'latin.yaml'}"]).startswith("--config: ")


def test_later_layers_win(tmp_path: Path) -> None:
    """Schema, the file's own choices, its other keys, the choices of the command line, its keys."""
    path = tmp_path / "run.yaml"
    path.write_text("choices: {model: tiny, data: llava, cluster: local}\nseed: 3\n"
                    "data: {path: a.json, max_pixels: 200704, image_root: images}\ncluster: {num_workers: 2}\n")
    argv = ["--config", str(path)]
    config = load(argv)
    assert (config.seed, config.model.preset, config.cluster.cpus_per_worker) == (3, "tiny", 0.1)
    assert (config.cluster.num_workers, config.cluster.device) == (2, "cpu")
    assert config.data == Data(format="llava", path="a.json", max_pixels=200704, image_root="images")
    config = load([*argv, "data=parquet", "data.path=b", "cluster=local", "cluster.device=npu"])
    assert config.data == Data(format="parquet", path="b", max_pixels=200704, image_root="images")
    assert (config.cluster.num_workers, config.cluster.device) == (4, "npu")
    assert load([*argv, "cluster=local", "cluster.num_workers=5"]).cluster.num_workers == 5


@pytest.mark.parametrize("name", ["llava", "parquet", "webdataset", "huggingface"])
def test_a_format_chosen_on_the_command_line_leaves_the_files_other_keys(name: str) -> None:
    assert leaves(yaml.safe_load((CONF / "data" / f"{name}.yaml").read_text())) == [("data.format", name)]


def test_one_of_two_keys_replaces_the_other_of_an_earlier_layer(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("choices: {model: tiny, data: synthetic}\nmodel: {path: /m}\ndata: {sources: [{path: a}]}\n")
    config = load(["--config", str(path)])
    assert (config.model.preset, config.model.path) == ("", "/m")
    assert (config.data.path, config.data.sources) == ("", [Source(path="a")])
    config = load(["--config", str(path), "model=small", "data=synthetic"])
    assert (config.model.preset, config.model.path, config.data.sources) == ("small", "", [])
    path.write_text("model: {preset: tiny, path: /m}\n")
    assert "exactly one of the two" in refused(["--config", str(path)])


def test_choices_come_from_the_command_line_too(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model: {preset: tiny}\n")
    assert load(["--config", str(path)]).cluster.num_workers == Config().cluster.num_workers
    assert load(["--config", str(path), "cluster=local"]).cluster.num_workers == 4


def test_the_embedded_default_uses_every_part_of_the_method() -> None:
    config = load([], PREPARE_DATA)
    ranks = config.cluster.num_workers
    tokens = int(config.planner.tokens_per_rank)
    longest = config.data.synthetic.max_tokens
    assert tokens * (ranks - 1) < longest <= tokens * ranks  # the longest sample takes all ranks, and all fit
    assert config.data.synthetic.short_median_tokens < tokens / 2  # short ones are packed
    assert config.run.steps * config.batch.global_samples <= 2 * config.data.synthetic.num_samples
    assert (config.model.preset, config.data.format, config.cluster.device) == ("tiny", "synthetic", "cpu")
    assert config.cluster.cpus_per_worker * (ranks + 1) < 1


@pytest.mark.parametrize("path", sorted(CONF.glob("*/*.yaml")), ids=lambda path: f"{path.parent.name}={path.stem}")
def test_every_choice_loads(bare: list[str], path: Path) -> None:
    if path.parent.name in CHOICES:
        load([*bare, f"{path.parent.name}={path.stem}", "data.path=somewhere"])


def test_dump_and_load_give_the_same_back(bare: list[str], tmp_path: Path) -> None:
    config = load([*bare, "run.dir=s3://b/x?region=a", "train.adam_eps=1e-12", "train.learning_rate=2.5e-5",
                   "train.freeze=[language]",
                   "data.sources=[{path: '1e3', weight: 0.1}, {path: 'no'}]", "planner.tokens_per_rank=480",
                   "model.path=yes"])
    path = tmp_path / "config.yaml"
    path.write_text(dump(config))
    assert load(["--config", str(path)]) == config


def test_the_device_that_auto_finds_is_checked_too(bare: list[str]) -> None:
    config = load([*bare, "cluster.device=auto"])
    config.cluster.device = "cuda"
    with pytest.raises(ConfigError, match=r"with cluster\.device=cuda; allowed: bf16"):
        check_device(config)
    check_device(load([*bare, "cluster.device=cuda", "train.precision=bf16"]))


def test_help_shows_the_values_of_the_file_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(CONF.parent)
    text = help_text("Train.", ["run.stepz=3", "--help"])
    assert "Values are those of conf/train.yaml;" in text
    assert re.search(r"^  run\.steps=60 .*^  model\.preset=tiny .*^  cluster\.device=cpu ", text, re.M | re.S)
    assert "  eval.generate=True " in help_text("Evaluate.", ["--help"], EVALUATE)
    (tmp_path / "mine.yaml").write_text("run: {dir: 's3://KEY:secret@b/x'}\ndata: {sources: [{path: a}, {path: b}]}")
    text = help_text("Train.", ["--help", "--config", str(tmp_path / "mine.yaml")])
    assert "  run.dir=s3://***@b/x " in text
    assert "  data.sources=[{...}, {...}] " in text
    assert text == help_text("Train.", [f"--config={tmp_path / 'mine.yaml'}", "--help"])


def test_help_names_every_key_with_its_choices() -> None:
    text = help_text("Train.", [])
    for name, _, spec in walk(Config()):
        assert f"  {name}=" in text
        assert spec["text"] in text
        assert "|".join(spec["choices"]) in text
    assert "Exit status: 0 on success, 2 on a bad configuration, 1 on failure." in text
