"""The model folder that all ranks write together, with the worker's own `Rank` object."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from dhp_ray.comm.device import CPU
from dhp_ray.comm.progress import AbortedError
from dhp_ray.comm.world import is_peer_loss
from dhp_ray.config import load
from dhp_ray.data.processor import ProcessorSpec
from dhp_ray.model.build import build_model
from dhp_ray.model.files import ADAPTER_FILE, ADAPTER_SETTINGS, INDEX_FILE
from dhp_ray.runtime.messages import Membership
from dhp_ray.runtime.worker import export
from dhp_ray.runtime.worker.rank import Rank
from dhp_ray.runtime.worker.worker import give_back_memory
from dhp_ray.storage import Folder, StorageError
from tests.packs import save_model
from tests.ranks import run_processes
from tests.runtime.worker.test_loading_memory import pss_bytes, random_folder

WAYS = {"whole": ["planner.sync=step"], "sharded": ["planner.sync=micro_batch"]}
NAME = "model"


def given(folder: Path, tied: bool = True) -> Path:
    """The tiny model as a stranger may store it: in bf16, the tied head under both names, with a head of another
    part in a type of its own.
    """
    processor = ProcessorSpec("tiny").load()
    adapter = build_model("tiny", "", processor.token_ids, 0)
    save_model(adapter, folder, dict(adapter.module.named_parameters()))
    processor.save(folder)
    weights = {name: value.bfloat16() for name, value in load_file(folder / "model.safetensors").items()}
    embedding = next(name for name in weights if name.endswith("embed_tokens.weight"))
    if tied:
        weights["lm_head.weight"] = weights[embedding].clone()
    extras = {"mtp.layers.0.weight": torch.randn(3, 5).half(), "mtp.scale": torch.ones(2).to(torch.float8_e4m3fn)}
    save_file(weights | extras, folder / "model.safetensors", {"format": "pt"})
    return folder


def run(rank: int, port: int, num_ranks: int, settings: Sequence[str], smallest_bytes: int, breaks: int = -1) -> str:
    """Export what a rank has loaded; returns what it says of a failure, which comes on rank `breaks`."""
    config = load(["cluster.device=cpu", *settings])
    member = Rank(config, Membership(rank, num_ranks, 1, "127.0.0.1", port), CPU)
    processor = ProcessorSpec(config.model.preset, config.model.path).load()

    def save(folder: Path) -> None:
        processor.save(folder)
        if breaks == rank == 0:
            raise OSError("no room for a processor")

    if breaks == rank != 0:
        def full(*_: object) -> None:
            raise StorageError("model-2: cannot be written: no space left")

        export.layout.write_file = full  # type: ignore[assignment]
    try:
        export.export_model(config, member.adapter, member.engine, rank, num_ranks,
                            member.state_group if num_ranks > 1 else None, save, NAME, smallest_bytes)
    except (OSError, AbortedError) as error:
        # the driver replaces a worker for an error of its own, and not for another's
        return f"another's: {error}" if is_peer_loss(error) else str(error)
    finally:
        member.close()
    return ""


def exported(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a model folder; its index, where it has one, tells the truth."""
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            assert opened.metadata() == {"format": "pt"}
        found |= load_file(file)
    if (folder / INDEX_FILE).exists():
        index = json.loads((folder / INDEX_FILE).read_text())
        assert index["weight_map"].keys() == found.keys()
        assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())
        for key, file in index["weight_map"].items():
            with safe_open(folder / file, framework="pt") as opened:
                assert key in opened.keys()  # noqa: SIM118
    return found


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    return first.dtype == second.dtype and first.shape == second.shape and torch.equal(
        first.view(torch.uint8), second.view(torch.uint8))


@pytest.mark.parametrize(("way", "freeze"), [
    ("whole", "vision"), ("sharded", "language"),
    *(pytest.param(way, "", marks=pytest.mark.slow) for way in WAYS)])
def test_three_ranks_export_what_one_does(way: str, freeze: str, tmp_path: Path) -> None:
    source = given(tmp_path / "given")
    common = ["model.preset=", f"model.path={source}", f"train.freeze=[{freeze}]"]
    run_processes(run, 1, 1, [*common, f"run.dir={tmp_path / 'one'}"], 2**26)
    run_processes(run, 3, 3, [*common, *WAYS[way], "train.precision=bf16", f"run.dir={tmp_path / 'three'}"], 0)
    one, three, wanted = (exported(folder) for folder in (tmp_path / "one/model", tmp_path / "three/model", source))
    assert one.keys() == three.keys() == wanted.keys()
    assert all(same_bits(one[key], three[key]) for key in wanted)
    assert all(same_bits(three[key], value) for key, value in wanted.items())
    names = {file.name for file in (tmp_path / "three/model").glob("*.safetensors")}
    assert len(names) >= 3
    assert names == {f"model-{number:05d}-of-{len(names):05d}.safetensors" for number in range(1, len(names) + 1)}
    assert [file.name for file in (tmp_path / "one/model").glob("model*")] == ["model.safetensors"]
    beside = [{file.name for file in (tmp_path / run / "model").iterdir()} - names - {INDEX_FILE, "model.safetensors"}
              for run in ("one", "three")]
    assert beside[0] == beside[1]
    assert beside[0] >= {"config.json", "generation_config.json", "tokenizer.json", "preprocessor_config.json"}
    assert [path.name for path in (tmp_path / "three").iterdir()] == ["model"]
    _, report = AutoModelForImageTextToText.from_pretrained(tmp_path / "three/model", output_loading_info=True)
    assert report["missing_keys"] == set()
    assert set(report["unexpected_keys"]) == {key for key in wanted if key.startswith("mtp.")}
    again = build_model("", str(tmp_path / "three/model"), None, 0)
    assert again.weights is not None


@pytest.mark.parametrize("way", ["sharded", pytest.param("whole", marks=pytest.mark.slow)])
def test_three_ranks_export_the_adapters_that_one_does(way: str, tmp_path: Path) -> None:
    """One file: two ranks have none to write."""
    common = ["model.preset=", f"model.path={given(tmp_path / 'given')}", "train.lora.rank=4"]
    run_processes(run, 1, 1, [*common, f"run.dir={tmp_path / 'one'}"], 2**26)
    run_processes(run, 3, 3, [*common, *WAYS[way], f"run.dir={tmp_path / 'three'}"], 0)
    for name in (ADAPTER_FILE, ADAPTER_SETTINGS):
        assert (tmp_path / "one/model" / name).read_bytes() == (tmp_path / "three/model" / name).read_bytes()
    assert not list((tmp_path / "three/model").glob("model*"))


@pytest.mark.parametrize("sharing", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_adapters_of_experts_that_are_sharded_are_exported_whole(sharing: int, tmp_path: Path) -> None:
    """The engine reshapes experts' parameters, and a rank has those of its experts alone."""
    processor = ProcessorSpec("tiny_qwen3_moe").load()
    adapter = build_model("tiny_qwen3_moe", "", processor.token_ids, 0)
    save_model(adapter, tmp_path / "given", dict(adapter.module.named_parameters()))
    processor.save(tmp_path / "given")
    common = ["model.preset=", f"model.path={tmp_path / 'given'}", "train.lora.rank=8",
              "train.lora.targets=[q_proj,experts.gate_up_proj,experts.down_proj]"]
    run_processes(run, 1, 1, [*common, *WAYS["whole"], f"run.dir={tmp_path / 'one'}"], 2**26)
    run_processes(run, 2, 2, [*common, *WAYS["sharded"], f"train.expert_parallel={sharing}",
                              f"run.dir={tmp_path / 'two'}"], 0)
    for name in (ADAPTER_FILE, ADAPTER_SETTINGS):
        assert (tmp_path / "one/model" / name).read_bytes() == (tmp_path / "two/model" / name).read_bytes()


@pytest.mark.parametrize(("preset", "way", "freeze"), [
    ("tiny_qwen3_vl", "whole", "vision"), ("tiny_internvl", "sharded", "language"), ("tiny_qwen3_moe", "sharded", ""),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ("tiny", "whole", "vision"), ("tiny_qwen3_vl_moe", "sharded", "vision"),
        ("tiny_internvl", "whole", "vision"), ("tiny_internvl", "sharded", "vision")))])
def test_a_presets_keys_and_shapes_are_those_of_transformers(
    preset: str, way: str, freeze: str, tmp_path: Path
) -> None:
    common = [f"model.preset={preset}", f"train.freeze=[{freeze}]", f"run.dir={tmp_path / 'run'}", *WAYS[way]]
    run_processes(run, 2, 2, common, 0)
    processor = ProcessorSpec(preset).load()
    module = build_model(preset, "", processor.token_ids, load(common).seed).module
    module.save_pretrained(tmp_path / "plain")
    found, wanted = exported(tmp_path / "run/model"), exported(tmp_path / "plain")
    assert found.keys() == wanted.keys()
    assert all(same_bits(found[key], wanted[key]) for key in wanted)
    mine, theirs = (json.loads((folder / "config.json").read_text())
                    for folder in (tmp_path / "run/model", tmp_path / "plain"))
    assert (mine["architectures"], mine["dtype"]) == (theirs["architectures"], "float32")


@pytest.mark.parametrize("breaks", [0, 1])
def test_a_rank_that_cannot_write_is_one_line_on_all(breaks: int, tmp_path: Path) -> None:
    """And the model that was there stays."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "older").touch()
    said = run_processes(run, 2, 2, ["model.preset=tiny", f"run.dir={tmp_path}"], 0, breaks)
    words = "no room for a processor" if breaks == 0 else "model-2: cannot be written: no space left"
    assert said == [words if rank == breaks else f"another's: rank {breaks}: {words}" for rank in range(2)]
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")] == ["model", "model/older"]


def test_an_export_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    run_processes(run, 2, 2, ["model.preset=tiny", f"run.dir={tmp_path}"], 0)
    assert (tmp_path / "model" / INDEX_FILE).is_file()
    run_processes(run, 1, 1, ["model.preset=tiny", f"run.dir={tmp_path}"], 2**26)
    assert [path.name for path in (tmp_path / "model").glob("model*")] == ["model.safetensors"]


def test_ranks_upload_their_files_to_an_object_store(object_store: str, tmp_path: Path) -> None:
    uri = f"s3://bucket/{tmp_path.name}{object_store}"
    Folder(uri).write("model/model-00009-of-00009.safetensors", b"older")
    run_processes(run, 2, 2, ["model.preset=tiny", f"run.dir={uri}"], 0)
    for file in Folder(uri).names("model"):
        Folder(uri).download(f"model/{file}", tmp_path / "found" / file)
    assert exported(tmp_path / "found")
    assert build_model("", str(tmp_path / "found"), None, 0).weights is not None


def measured(rank: int, port: int, settings: Sequence[str], warm_up: Sequence[str]) -> int:
    """Bytes of memory that an export takes at most of one of three ranks, above those before it."""
    run(rank, port, 3, warm_up, 0)
    config = load(["cluster.device=cpu", *settings])
    member = Rank(config, Membership(rank, 3, 2, "127.0.0.1", port), CPU)
    give_back_memory()
    before, peak, done = pss_bytes(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.is_set():
            peak = max(peak, pss_bytes())
            time.sleep(0.01)

    thread = threading.Thread(target=watch)
    thread.start()
    member.export(NAME, lambda _: None)
    done.set()
    thread.join()
    member.close()
    return peak - before


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("way", list(WAYS))
def test_no_rank_holds_more_than_its_share(way: str, tmp_path: Path) -> None:
    """0.25 G parameters, 1 GB in fp32: a third of it and a fifth more."""
    random_folder(tmp_path, 1024, 16)
    model = ["model.preset=", f"model.path={tmp_path}", *WAYS[way]]
    found = run_processes(measured, 3, [*model, f"run.dir={tmp_path / 'run'}"],
                          ["model.preset=tiny", f"run.dir={tmp_path / 'warm'}", *WAYS[way]], timeout_s=400)
    num_parameters = sum(tensor.numel() for tensor in exported(tmp_path / "run/model").values())
    assert num_parameters > 0.25e9
    share = max(found) / (4 * num_parameters)
    print(f"{way}: {num_parameters / 1e9:.3f} G parameters, {share:.3f} of the model at most on a rank's host")
    assert share < 1.2 / 3
