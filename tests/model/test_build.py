from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dhp_ray.model.build import build_model, model_shape
from dhp_ray.model.families import FAMILIES
from dhp_ray.model.files import EXPERT_TYPES, INDEX_FILE, MODEL_TYPES, ModelError, check_model_folder, fingerprint
from dhp_ray.model.presets import PRESETS
from dhp_ray.runtime.evaluate.evaluator import load_model
from tests.packs import TOKEN_IDS, save_model, stored_values


def saved(folder: Path) -> Path:
    adapter = build_model("tiny", "", TOKEN_IDS, 0)
    save_model(adapter, folder, {name: parameter.detach() for name, parameter in adapter.module.named_parameters()})
    return folder


def test_a_preset_is_made_by_its_seed_alone() -> None:
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    first = build_model("tiny", "", TOKEN_IDS, 7)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(2)
    second = build_model("tiny", "", TOKEN_IDS, 7)
    other = build_model("tiny", "", TOKEN_IDS, 8)
    weights, same, different = (dict(adapter.module.named_parameters()) for adapter in (first, second, other))
    assert all(torch.equal(weights[name], same[name]) for name in weights)
    assert not torch.equal(weights["model.language_model.embed_tokens.weight"],
                           different["model.language_model.embed_tokens.weight"])
    assert weights["model.language_model.layers.0.mlp.up_proj.weight"].std().item() == pytest.approx(0.02, rel=0.05)


def test_the_tiny_preset() -> None:
    adapter = build_model("tiny", "", TOKEN_IDS, 0)
    assert (adapter.merge_area, adapter.patch_dim, adapter.feature_width,
            adapter.vision_token_ids[0]) == (4, 3 * 2 * 14 * 14, 128, 261)
    assert adapter.vocabulary_size == 264
    sizes = {name: parameter.numel() for name, parameter in adapter.module.named_parameters()}
    shape = model_shape("tiny", "", TOKEN_IDS)
    assert (shape.num_parameters(), shape.num_layers) == (sum(sizes.values()), 5)
    assert sum(sizes.values()) < 1_000_000
    vision = adapter.module.config.vision_config
    assert vision.depth == 2
    assert list(vision.fullatt_block_indexes) == [1]

    assert 7_000_000 < model_shape("small", "", TOKEN_IDS).num_parameters() < 7_500_000


def test_a_folder_of_safetensors_in_shards(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    files = {name: f"model-0000{1 + (index % 2)}-of-00002.safetensors" for index, name in enumerate(names)}
    for file in sorted(set(files.values())):
        save_file({name: weights[name] for name in names if files[name] == file}, folder / file, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    built = stored_values(build_model("", str(folder), None, 3))
    expected = dict(build_model("tiny", "", TOKEN_IDS, 0).module.named_parameters())
    assert all(torch.equal(built[name], expected[name]) for name in expected)
    assert model_shape("", str(folder), None).num_parameters() == sum(
        parameter.numel() for parameter in expected.values())
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(
        ModelError,
        match=r"^model.path: [^\n]* has no model-00002-of-00002.safetensors; allowed: weights as safetensors$",
    ):
        build_model("", str(folder), None, 0)


def test_a_folder_in_the_form_of_the_published_models(tmp_path: Path) -> None:
    """Flat configuration, older weight names, bf16, a generation configuration: kept through a load and a save."""
    module = build_model("tiny", "", TOKEN_IDS, 0).module
    tree = module.config.to_dict()
    text, vision = tree.pop("text_config"), tree.pop("vision_config")
    for section in (text, vision):
        for key in ("rope_parameters", "layer_types", "model_type"):
            section.pop(key, None)
    tree = text | tree | {"vision_config": vision, "torch_dtype": "bfloat16", "rope_theta": 1e4,
                          "rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]}}
    generation = {"bos_token_id": 256, "pad_token_id": 256, "do_sample": True, "eos_token_id": [258, 256],
                  "repetition_penalty": 1.05, "temperature": 0.000001}
    (tmp_path / "config.json").write_text(json.dumps(tree))
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    weights = {name: parameter.detach().bfloat16() for name, parameter in module.named_parameters()}
    save_file({name.replace("model.visual.", "visual.").replace("model.language_model.", "model."): value
               for name, value in weights.items()},
              tmp_path / "model.safetensors", {"format": "pt"})
    adapter = build_model("", str(tmp_path), None, 0)
    loaded = stored_values(adapter)
    assert loaded.keys() == weights.keys()
    assert all(torch.equal(loaded[name], weights[name].float()) for name in weights)
    assert adapter.module.config.text_config.rope_parameters["mrope_section"] == [4, 6, 6]
    save_model(adapter, tmp_path / "saved", loaded)
    for name in ("config.json", "generation_config.json"):  # also for readers that know only the older keys
        assert (tmp_path / "saved" / name).read_bytes() == (tmp_path / name).read_bytes()
    again = stored_values(build_model("", str(tmp_path / "saved"), None, 0))
    assert all(torch.equal(again[name], loaded[name]) for name in loaded)


def test_settings_for_generation_in_config_json_are_kept(tmp_path: Path) -> None:
    """As transformers reads and writes them, which refuses to save odd ones: a temperature that nothing uses."""
    first = build_model("tiny", "", TOKEN_IDS, 0)
    save_model(first, tmp_path / "model", dict(first.module.named_parameters()))
    (tmp_path / "model/generation_config.json").unlink()
    file, settings = tmp_path / "model/config.json", {"temperature": 0.7, "max_length": 77, "do_sample": False}
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    adapter = build_model("", str(tmp_path / "model"), None, 0)
    save_model(adapter, tmp_path / "saved", stored_values(adapter))
    again = build_model("", str(tmp_path / "saved"), None, 0)
    plain = FAMILIES["qwen2_5_vl"].model_class.from_pretrained(tmp_path / "model")
    for found in (adapter.module, again.module, plain):
        assert {name: getattr(found.generation_config, name) for name in settings} == settings
    assert adapter.module.generation_config.to_dict() == plain.generation_config.to_dict()


@pytest.mark.parametrize("content", ["{", "[]", '{"max_new_tokens": -1}', '{"cache_implementation": "none such"}'])
def test_damaged_settings_for_generation_are_one_line(tmp_path: Path, content: str) -> None:
    first = build_model("tiny", "", TOKEN_IDS, 0)
    save_model(first, tmp_path, dict(first.module.named_parameters()))
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(ModelError, match=r"^model.path: [^\n]*/generation_config.json is no generation configuration: "
                                         r"[^\n]+$"):
        build_model("", str(tmp_path), None, 0)


def test_a_saved_model_names_no_weights_of_its_folder(tmp_path: Path) -> None:
    """It may have other files."""
    folder = saved(tmp_path / "model")
    tree = json.loads((folder / "config.json").read_text())
    named(folder, "model.safetensors")
    adapter = build_model("", str(folder), None, 0)
    save_model(adapter, tmp_path / "saved", stored_values(adapter))
    assert json.loads((tmp_path / "saved/config.json").read_text()) == tree


def test_the_families_are_those_that_a_folder_is_checked_for() -> None:
    assert tuple(sorted(FAMILIES)) == MODEL_TYPES
    texts = {name: FAMILIES[name].config_class().get_text_config() for name in MODEL_TYPES}
    assert [name for name in MODEL_TYPES if hasattr(texts[name], "num_experts")] == list(EXPERT_TYPES)


def test_a_missing_folder() -> None:
    with pytest.raises(ModelError, match=r"^model.path: no folder /nowhere; allowed: a local Hugging Face folder$"):
        build_model("", "/nowhere", None, 0)


def test_a_folder_without_a_config_that_can_be_used(tmp_path: Path) -> None:
    with pytest.raises(ModelError,
                       match=r"^model.path: [^\n]* has no config.json; allowed: a local Hugging Face folder$"):
        build_model("", str(tmp_path), None, 0)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"^model.path: [^\n]*config.json is not JSON: [^\n]*$"):
        build_model("", str(tmp_path), None, 0)
    (tmp_path / "config.json").write_text(
        json.dumps(
            {"model_type": "qwen2_5_vl", "text_config": {"num_hidden_layers": 2, "layer_types": ["full_attention"]}}
        )
    )
    with pytest.raises(
        ModelError,
        match=r"^model.path: [^\n]*config.json is no configuration of a qwen2_5_vl model: "
              r"[^\n]*num_hidden_layers[^\n]*$",
    ):
        build_model("", str(tmp_path), None, 0)


def test_an_unknown_family_runs_no_code(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "other_vl",
                                                      "auto_map": {"AutoModel": "code.Model"}}))
    (tmp_path / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(ModelError, match=r"^model.path: [^\n]* holds a model of type 'other_vl'; allowed: "
                                         f"{', '.join(sorted(FAMILIES))}$"):
        build_model("", str(tmp_path), None, 0)
    assert not (tmp_path / "ran").exists()


SHARD = "model-00001-of-00001.safetensors"


@pytest.mark.parametrize(("add", "said"), [
    (lambda folder: sharded(folder, SHARD), "holds two sets of weights: model.safetensors, and what "
                                            f"{INDEX_FILE} names (1 file); allowed: one of them"),
    (lambda folder: sharded(folder, SHARD, "model.safetensors"), "holds two sets of weights: model.safetensors, and "
                                                                 f"what {INDEX_FILE} names (2 files)"),
    (lambda folder: (folder / "adapter_config.json").write_text("{}"), "holds a model and an adapter "
                                                                       "(adapter_config.json), "),
    (lambda folder: named(folder, "model.other.safetensors"), "holds model.safetensors, and its config.json names "
                                                              "'model.other.safetensors' (transformers_weights)"),
    (lambda folder: named(folder, INDEX_FILE), f"holds model.safetensors, and its config.json names '{INDEX_FILE}'")])
def test_a_folder_of_two_sets_of_weights(add: Callable[[Path], object], said: str, tmp_path: Path) -> None:
    """transformers reads the other one, and so would serving engines."""
    folder = saved(tmp_path / "model")
    add(folder)
    for read in (lambda: build_model("", str(folder), None, 0), lambda: fingerprint(str(folder)),
                 lambda: check_model_folder(str(folder)),
                 lambda: load_model(str(folder), torch.float32, torch.device("cpu"))):
        with pytest.raises(ModelError) as raised:
            read()
        assert f"model.path: {folder} {said}" in str(raised.value)
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize("add", [
    lambda folder: sharded(folder, "model.safetensors"),
    lambda folder: named(folder, "model.safetensors"),
    lambda folder: save_file({"lm_head.weight": torch.zeros(1)}, folder / "model-00002-of-00002.safetensors"),
    lambda folder: save_file({"lm_head.weight": torch.zeros(1)}, folder / "model.fp16.safetensors"),
    lambda folder: save_file({"lm_head.weight": torch.zeros(1)}, folder / "adapter_model.safetensors"),
    lambda folder: torch.save({}, folder / "pytorch_model.bin"),
    lambda folder: (folder / "pytorch_model.bin.index.json").write_text('{"weight_map": {"a": "b.bin"}}')])
def test_files_that_transformers_does_not_read_either(add: Callable[[Path], object], tmp_path: Path) -> None:
    folder = saved(tmp_path / "model")
    expected = fingerprint(str(folder))
    add(folder)
    assert fingerprint(str(folder)) == expected
    mine = dict(build_model("", str(folder), None, 0).module.named_parameters())
    theirs = dict(load_model(str(folder), torch.float32, torch.device("cpu")).named_parameters())
    assert mine.keys() == theirs.keys()


def sharded(folder: Path, *files: str) -> None:
    """Write an index of `files`, each with all the weights."""
    weights = load_file(folder / "model.safetensors")
    for file in files:
        save_file(weights, folder / file, {"format": "pt"})
    weight_map = dict(zip(weights, [*files, *[files[0]] * len(weights)]))
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def named(folder: Path, file: str) -> None:
    tree = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(tree | {"transformers_weights": file}))


def test_a_folder_without_safetensors(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError,
                       match=r"^model.path: [^\n]* has no model.safetensors; allowed: weights as safetensors$"):
        build_model("", str(folder), None, 0)
    torch.save(weights, folder / "pytorch_model.bin")
    with pytest.raises(
        ModelError,
        match=r"^model.path: [^\n]* has no model.safetensors \(it has pytorch_model.bin[^\n]*\); allowed: weights as "
              r"safetensors$",
    ):
        build_model("", str(folder), None, 0)


def test_a_weight_that_is_missing_or_of_another_shape_is_not_made_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monitored = logging.getLogger("transformers")
    monitored.addHandler(caplog.handler)  # it hands nothing on to the root
    folder = saved(tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    name = next(name for name in weights if name.endswith("layers.1.mlp.up_proj.weight"))
    save_file({key: value for key, value in weights.items() if key != name}, folder / "model.safetensors",
              {"format": "pt"})
    with pytest.raises(
        ModelError,
        match=r"^model.path: [^\n]* lacks 1 weights, the first is model.language_model.layers.1.mlp.up_proj.weight$",
    ):
        build_model("", str(folder), None, 0)
    save_file(weights | {name: weights[name][:5].contiguous()}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"^model.path: [^\n]*$"):
        build_model("", str(folder), None, 0)
    monitored.removeHandler(caplog.handler)
    assert caplog.messages == [], "reports of transformers, from every rank and in colour"


def test_broken_safetensors(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model")
    (folder / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ModelError, match=r"^model.path: [^\n]* [^ ]+ cannot be read: [^\n]*$"):
        build_model("", str(folder), None, 0)


def test_an_unknown_preset_and_token_ids_that_lack_a_name() -> None:
    with pytest.raises(ModelError, match=f"^model.preset: got 'huge'; allowed: {', '.join(sorted(PRESETS))}$"):
        build_model("huge", "", TOKEN_IDS, 0)
    with pytest.raises(ModelError, match=r"^model.preset: tiny needs the tokenizer's id of eos$"):
        build_model("tiny", "", {name: token for name, token in TOKEN_IDS.items() if name not in ("video", "eos")}, 0)


def test_a_tied_weight_of_two_types_is_saved_as_one_that_can_be_read(tmp_path: Path) -> None:
    folder = saved(tmp_path / "given")
    weights = {name: value.bfloat16() for name, value in load_file(folder / "model.safetensors").items()}
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].float()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    adapter = build_model("", str(folder), None, 0)
    values = {name: value / 3 for name, value in stored_values(adapter).items()}
    save_model(adapter, tmp_path / "saved", values)
    again = stored_values(build_model("", str(tmp_path / "saved"), None, 0))
    name = next(name for name in values if name.endswith("embed_tokens.weight"))
    assert torch.equal(again[name], values[name])


def test_a_model_is_saved_in_the_types_that_it_came_in(tmp_path: Path) -> None:
    """A frozen encoder, and a head that the module has not, byte for byte; so are trained weights that are as before,
    and others are rounded.
    """
    folder, mixed = saved(tmp_path / "given"), "model.layers.0.input_layernorm.weight"
    weights = {name: value.bfloat16() for name, value in load_file(folder / "model.safetensors").items()}
    weights[mixed] = torch.rand(weights[mixed].shape)
    given = weights | {"mtp.layers.0.weight": torch.randn(3, 5).bfloat16()}
    save_file(given, folder / "model.safetensors", {"format": "pt"})
    adapter = build_model("", str(folder), None, 0)
    adapter.freeze(["vision"])
    values = stored_values(adapter)
    save_model(adapter, tmp_path / "before", values)
    save_model(adapter, tmp_path / "saved", {name: value / 3 for name, value in values.items()})
    before, found = (load_file(tmp_path / name / "model.safetensors") for name in ("before", "saved"))
    assert before.keys() == found.keys() == given.keys()
    for name, value in given.items():
        kept = name.startswith(("visual.", "mtp."))
        assert before[name].dtype == found[name].dtype == value.dtype == (
            torch.float32 if name == mixed else torch.bfloat16)
        assert torch.equal(before[name], value)
        assert torch.equal(found[name], value if kept else (value.float() / 3).to(value.dtype)), name
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"^model.path: [^\n]*model.safetensors cannot be read: [^\n]*$"):
        save_model(adapter, tmp_path / "again", values)
