"""A model folder read in shards: the same parameters, buffers and losses as the whole model, in a rank's share of its
memory.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from dhp_ray.model.build import build_model
from dhp_ray.model.files import ModelError
from dhp_ray.model.language_model import LanguageModel
from dhp_ray.planner.plan.types import Plan
from dhp_ray.train.collate import Payload
from dhp_ray.train.sharded_engine import MicroBatchModel, ShardedEngine, first_element, read_shards
from dhp_ray.train.step_inputs import collated
from tests.engine_values import full_parameters
from tests.packs import load_whole, plain_copy, relative_errors, rough_model, save_model, stored_values
from tests.ranks import run_ranks
from tests.train.test_sharded_engine import MIXED, make_plan, make_step, payloads_of

CPU = torch.device("cpu")


def shard(adapter: LanguageModel) -> MicroBatchModel:
    """As the engine does."""
    root = MicroBatchModel(adapter)
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")
    for unit in [*adapter.units(), root]:
        fully_shard(unit, mesh=mesh)
    return root


def compare(rank: int, num_ranks: int, path: str) -> dict[str, Any]:
    """What a rank reads, against its rows of the whole model."""
    whole, adapter = load_whole(path), build_model("", path, None, 0)
    adapter.freeze(["vision"])
    assert all(parameter.is_meta for parameter in adapter.module.parameters())
    root = shard(adapter)
    read_shards(root, dict(adapter.module.named_parameters()), adapter.weights, CPU,
                lambda name, parameter: first_element(parameter, rank, num_ranks))
    wanted, found = dict(whole.module.named_parameters()), dict(adapter.module.named_parameters())
    buffers = dict(adapter.module.named_buffers())
    return {
        "names": list(found) == list(wanted),
        "equal": all(torch.equal(found[name].full_tensor(), wanted[name]) for name in wanted),
        "rows": sum(parameter.to_local().numel() for parameter in found.values()),
        "types": {parameter.dtype for parameter in found.values()},
        "sharded": all(isinstance(parameter, DTensor) for parameter in found.values()),
        "trained": all(parameter.requires_grad != adapter.is_vision(name) for name, parameter in found.items()),
        "buffers": len(buffers) > 0 and all(torch.equal(buffers[name], buffer)
                                            for name, buffer in whole.module.named_buffers()),
        "generation": adapter.module.generation_config.to_dict() == whole.module.generation_config.to_dict(),
        "total": sum(map(torch.numel, wanted.values()))}


def published(folder: Path, tie: bool, older: bool, num_files: int = 3) -> Path:
    """A folder in the form of the published models: bf16, several files, a generation configuration, and older names or
    today's.
    """
    adapter = rough_model(tie_word_embeddings=tie)
    save_model(adapter, folder, {name: parameter.detach() for name, parameter in adapter.module.named_parameters()})
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    assert all(name.startswith(("visual.", "model.layers.", "model.embed_tokens.", "model.norm.", "lm_head."))
               for name in weights)
    stored = {name: value.bfloat16() for name, value in weights.items()}
    stored["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(16)  # as files of old have, and nobody reads
    if not older:
        stored = {re.sub(r"^visual", "model.visual", re.sub(r"^model", "model.language_model", name)): value
                  for name, value in stored.items()}
    files = {name: f"model-{place % num_files + 1:05d}-of-{num_files:05d}.safetensors"
             for place, name in enumerate(sorted(stored))}
    for file in set(files.values()):
        save_file({name: stored[name].contiguous() for name in stored if files[name] == file}, folder / file,
                  {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 256, "eos_token_id": [258, 256],
                                                               "temperature": 0.1, "do_sample": True}))
    return folder


@pytest.mark.parametrize(("num_ranks", "tie", "older"), [
    (2, False, True), (3, True, False), pytest.param(1, True, True, marks=pytest.mark.slow)])
def test_every_rank_reads_its_rows_of_the_whole(num_ranks: int, tie: bool, older: bool, tmp_path: Path) -> None:
    path = published(tmp_path / "model", tie, older)
    results = run_ranks(compare, num_ranks, num_ranks, str(path))
    total = results[0].pop("total")
    assert sum(result.pop("rows") for result in results) == total
    for result in results:
        assert result.pop("types") == {torch.float32}
        assert all(result[key] for key in result if key != "total"), result


def test_tied_weights_may_be_stored_under_either_name_or_both(tmp_path: Path) -> None:
    adapter = rough_model()
    save_model(adapter, tmp_path, {name: parameter.detach() for name, parameter in adapter.module.named_parameters()})
    names = {"lm_head.weight", "model.embed_tokens.weight"}
    weights = load_file(tmp_path / "model.safetensors")
    assert len(names & weights.keys()) == 1
    tied = weights[(names & weights.keys()).pop()]
    rest = {name: value for name, value in weights.items() if name not in names}
    for stored in (names, *({name} for name in names)):
        save_file(rest | {name: tied.clone() for name in stored}, tmp_path / "model.safetensors", {"format": "pt"})
        assert run_ranks(compare, 2, 2, str(tmp_path))[1]["equal"]
    save_file(rest | {name: tied + place for place, name in enumerate(names)}, tmp_path / "model.safetensors",
              {"format": "pt"})
    with pytest.raises(
        AssertionError,
        match=r"(?m)model.path: [^\n]*: lm_head.weight and model.embed_tokens.weight differ; its config.json ",
    ):
        run_ranks(read_alone, 1, str(tmp_path))


def read_alone(rank: int, path: str) -> None:
    adapter = build_model("", path, None, 0)
    read_shards(shard(adapter), dict(adapter.module.named_parameters()), adapter.weights, CPU,
                lambda name, parameter: 0)


def test_a_weight_that_is_missing_or_of_another_shape_or_type_is_refused_before_anything_is_read(
    tmp_path: Path,
) -> None:
    adapter = rough_model()
    save_model(adapter, tmp_path, {name: parameter.detach() for name, parameter in adapter.module.named_parameters()})
    weights = load_file(tmp_path / "model.safetensors")
    name, stored = "model.language_model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"
    save_file({key: value for key, value in weights.items() if key != stored}, tmp_path / "model.safetensors",
              {"format": "pt"})
    with pytest.raises(ModelError, match=rf"^model.path: [^\n]* lacks 1 weights, the first is {re.escape(name)}$"):
        build_model("", str(tmp_path), None, 0)
    save_file(weights | {stored: weights[stored][:5].contiguous()}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        ModelError,
        match=rf"^model.path: [^\n]*: {re.escape(stored)} has shape \(5, 128\); its config.json says \(352, 128\)$",
    ):
        build_model("", str(tmp_path), None, 0)
    save_file(weights | {stored: weights[stored].to(torch.int8)}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        ModelError, match=rf"^model.path: [^\n]*: {re.escape(stored)} is stored as I8; allowed: F64, F32, F16, BF16$"
    ):
        build_model("", str(tmp_path), None, 0)
    (tmp_path / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ModelError, match=r"^model.path: [^\n]*: model.safetensors cannot be read: [^\n]+$"):
        build_model("", str(tmp_path), None, 0)


def test_a_model_on_the_meta_device_lacks_only_its_values(tmp_path: Path) -> None:
    adapter = rough_model()
    save_model(adapter, tmp_path, {name: parameter.detach() for name, parameter in adapter.module.named_parameters()})
    on_meta = build_model("", str(tmp_path), None, 0)
    assert all(parameter.is_meta for parameter in on_meta.module.parameters())
    assert not any(buffer.is_meta for buffer in on_meta.module.buffers())
    ids, grids = torch.tensor([5, *[on_meta.vision_token_ids[0]] * 4, 6]), torch.tensor([[1, 4, 4]])
    assert torch.equal(on_meta.positions(ids, grids), adapter.positions(ids, grids))
    values = dict(plain_copy(adapter).named_parameters())
    save_model(on_meta, tmp_path / "again", {name: parameter.detach() for name, parameter in values.items()})
    again = stored_values(build_model("", str(tmp_path / "again"), None, 0))
    assert max(relative_errors(again, values).values()) == 0.0


def train(
    rank: int, num_ranks: int, path: str, in_shards: bool, precision: str, plan: Plan, payloads: dict[str, Payload]
) -> list[Any]:
    """Losses and gradient norms of two steps, and whether what is exported then is trained and whole."""
    adapter = build_model("", path, None, 0) if in_shards else load_whole(path)
    adapter.freeze(["vision"])
    stepper = make_step(adapter, rank, num_ranks, precision=precision)
    assert isinstance(stepper.engine, ShardedEngine)
    narrow = in_shards and precision == "bf16"  # frozen rows that files have need not be kept in fp32
    assert {value.dtype for value in stepper.engine.frozen.values()} == {torch.bfloat16 if narrow else torch.float32}
    rank_plan = plan.rank_plan(1, rank)
    inputs = collated(rank_plan, payloads_of(rank_plan.packs, payloads, rank), stepper.adapter, precision)
    results = [stepper.run(inputs, 1.0) for _ in range(2)]
    after = {name: value for name, value in full_parameters(stepper.engine).items() if not adapter.is_vision(name)}
    return [[(result.loss_sum, result.gradient_norm) for result in results],
            float(sum(value.double().sum() for value in after.values())), len(after)]


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.slow), "bf16"])
@pytest.mark.parametrize("most", [1, pytest.param(len(MIXED), marks=pytest.mark.slow)])
def test_training_from_shards_is_training_from_the_whole(tmp_path: Path, precision: str, most: int) -> None:
    path = published(tmp_path / "model", tie=True, older=True)
    for file in path.glob("*.safetensors"):  # values that a narrower type does not hold
        save_file({name: value.float() * 1.001 for name, value in load_file(file).items()}, file, {"format": "pt"})
    plan, payloads = make_plan(3, MIXED[:most])
    found, wanted = (run_ranks(train, 3, 3, str(path), in_shards, precision, plan, payloads)
                     for in_shards in (True, False))
    assert found == wanted
    assert found[0][0][0] != found[0][0][1]


def peak_bytes() -> int:
    return next(1024 * int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines()
                if line.startswith("VmHWM"))


def grown(rank: int, num_ranks: int, path: str, in_shards: bool) -> int:
    """Bytes by which a rank's peak of resident memory grows while it comes to hold its share."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = peak_bytes()
    adapter = build_model("", path, None, 0) if in_shards else load_whole(path)
    root = shard(adapter)
    if in_shards:
        read_shards(root, dict(adapter.module.named_parameters()), adapter.weights, CPU,
                    lambda name, parameter: first_element(parameter, rank, num_ranks))
    return peak_bytes() - before


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(),
                    reason="the peak of resident memory is read from Linux's /proc")
def test_no_rank_ever_holds_the_whole(tmp_path: Path) -> None:
    text = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
            "num_key_value_heads": 4,
            "rope_parameters": {"rope_type": "default", "mrope_section": [8, 12, 12], "rope_theta": 10000.0}}
    small = rough_model()
    config = small.module.config.to_dict()
    config = type(small.module.config).from_dict(config | {"text_config": config["text_config"] | text
                                                           | {"layer_types": ["full_attention"] * 12},
                                                           "vision_config": config["vision_config"]
                                                           | {"out_hidden_size": 768}})
    with torch.device("meta"):
        shapes = {name: parameter.shape
                  for name, parameter in type(small.module)(config).named_parameters()}  # type: ignore[call-arg]
    num_bytes = 4 * sum(shape.numel() for shape in shapes.values())
    assert num_bytes > 400e6
    save_file({name: torch.ones(shape, dtype=torch.bfloat16) for name, shape in shapes.items()},
              tmp_path / "model.safetensors", {"format": "pt"})
    config.save_pretrained(tmp_path)
    shares = run_ranks(grown, 3, 3, str(tmp_path), True)
    assert max(shares) < 0.5 * num_bytes, shares  # a third, and what is read at a time
    wholes = run_ranks(grown, 3, 3, str(tmp_path), False)
    assert min(wholes) > num_bytes, wholes
