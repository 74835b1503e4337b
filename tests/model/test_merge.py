"""Merged weights are base + scale B A where the adapter is, and the base's bytes elsewhere."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from peft import EvaConfig, LoraConfig, PeftModel
from safetensors.torch import load_file, save_file

from dhp_ray.model.build import build_model
from dhp_ray.model.files import ADAPTER_FILE, ADAPTER_PREFIX, ADAPTER_SETTINGS, ModelError
from dhp_ray.model.language_model import LanguageModel
from dhp_ray.model.lora import first_values
from dhp_ray.model.merge import HARMLESS, OFF, PLAIN, base_of, merged_files, read_adapter
from tests.checkout import job_of
from tests.model.test_lora import ALL, EXPERTS, OF_EXPERTS, save, with_adapters
from tests.packs import EXPERT_PRESETS, PRESETS, plain_copy, rough_model, save_model
from tests.test_jobs import ended

OTHER = "model.language_model.layers.0.self_attn.q_proj"


def write_base(folder: Path, preset: str = "tiny", seed: int = 0) -> LanguageModel:
    base = rough_model(seed, preset=preset)
    base.module.bfloat16().save_pretrained(folder, max_shard_size="1MB")
    (folder / "tokenizer.json").write_text("{}")
    return base


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a base and an adapter of it."""
    folder = tmp_path_factory.mktemp("written")
    write_base(folder / "base")
    save(with_adapters(), folder / "adapter")
    return folder


@pytest.mark.parametrize("preset", PRESETS)
def test_merged_weights(tmp_path: Path, preset: str) -> None:
    base = write_base(tmp_path / "base", preset)
    targets = ("q_proj", "o_proj") if preset in EXPERT_PRESETS else ("q_proj", "down_proj")
    adapter = with_adapters(preset, replace(ALL, targets=targets))
    save(adapter, tmp_path / "adapter")
    num_files = len(list((tmp_path / "base").glob("*.safetensors")))
    changed = list(merged_files(str(tmp_path / "adapter"), str(tmp_path / "base"), tmp_path / "out"))
    parts = read_adapter(str(tmp_path / "adapter"))
    assert len(changed) == num_files > 1
    assert sum(changed) == len(parts.pairs) > 0
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == sorted(
        file.name for file in (tmp_path / "base").iterdir())

    merged = type(base.module).from_pretrained(tmp_path / "out", dtype="auto").state_dict()
    for name, before in base.module.state_dict().items():
        layer = name.removesuffix(".weight")
        if layer in parts.pairs:
            a, b = parts.pairs[layer]
            assert torch.equal(merged[name], (before.float() + 2.0 * (b @ a)).bfloat16())
            assert not torch.equal(merged[name], before)
        else:
            assert torch.equal(merged[name], before)
    wanted = PeftModel.from_pretrained(plain_copy(rough_model(preset=preset)), tmp_path / "adapter").merge_and_unload()
    for name, value in wanted.state_dict().items():
        torch.testing.assert_close(merged[name].float(), value, rtol=0.01, atol=0.005)


@pytest.mark.parametrize(("preset", "targets"), [
    ("tiny_qwen3_vl_moe", OF_EXPERTS.targets), ("tiny_qwen3_moe", ("0.mlp.experts.gate_up_proj", "experts.down_proj")),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ("tiny_qwen3_5_moe", OF_EXPERTS.targets), ("tiny_qwen3_moe", EXPERTS[:1]), ("tiny_qwen3_moe", EXPERTS[1:])))],
    ids=str)
def test_merged_experts(tmp_path: Path, preset: str, targets: tuple[str, ...]) -> None:
    """Of bases that have each expert by itself, and all of a layer transposed: as PEFT merges them."""
    base = write_base(tmp_path / "base", preset)
    save(with_adapters(preset, replace(OF_EXPERTS, targets=targets)), tmp_path / "adapter")
    changed = sum(merged_files(str(tmp_path / "adapter"), str(tmp_path / "base"), tmp_path / "out"))
    before, after = ({key: value for file in sorted(folder.glob("*.safetensors"))
                      for key, value in load_file(file).items()} for folder in (tmp_path / "base", tmp_path / "out"))
    assert before.keys() == after.keys()
    assert changed == sum(not torch.equal(before[key], after[key]) for key in before) > 0
    peft = PeftModel.from_pretrained(plain_copy(base).float(), tmp_path / "adapter")
    wanted = peft.merge_and_unload().state_dict()
    merged = type(base.module).from_pretrained(tmp_path / "out", dtype="auto").state_dict()
    assert merged.keys() == wanted.keys()
    for name, value in wanted.items():  # both round the same fp32 sums, but for their last bits
        torch.testing.assert_close(merged[name].float(), value, rtol=2**-8, atol=1e-5)


def test_experts_of_another_base_and_of_none(written: Path, tmp_path: Path) -> None:
    """Fewer experts than the base has; pairs of a parameter that the settings do not name; another parameter."""
    write_base(tmp_path / "base", "tiny_qwen3_moe")
    folder = tmp_path / "adapter"
    save(with_adapters("tiny_qwen3_moe", replace(OF_EXPERTS, targets=EXPERTS)), folder)
    tensors, settings = load_file(folder / ADAPTER_FILE), json.loads((folder / ADAPTER_SETTINGS).read_text())

    def refused(base: Path = tmp_path / "base", **changes: object) -> str:
        (folder / ADAPTER_SETTINGS).write_text(json.dumps(settings | changes))
        with pytest.raises(ModelError) as raised:
            list(merged_files(str(folder), str(base), tmp_path / "out"))
        assert "\n" not in str(raised.value)
        return str(raised.value)

    assert "layers find no weight in" in refused(target_parameters=["experts.down_proj"])
    assert "has no lora_A and lora_B of rank 8" in refused(target_parameters=None)
    for value in (["mlp.gate.weight"], "experts.down_proj"):
        assert f"has target_parameters={value!r}; allowed: names that end in gate_up_proj, down_proj" in refused(
            target_parameters=value)
    assert "is of 6 experts; " in refused(written / "base")
    save_file({name: value[: 5 * 8] if "lora_A" in name else value[:, : 5 * 8].contiguous()
               for name, value in tensors.items()}, folder / ADAPTER_FILE)
    assert refused().endswith(f"is of 5 experts; {tmp_path / 'base'} has 6: another base")


@pytest.mark.parametrize("umask", [0o022, 0o027])
def test_others_may_read_weights_as_they_may_any_new_file(tmp_path: Path, umask: int) -> None:
    """Both of an export and of a merge; safetensors makes files that are their owner's alone."""
    write_base(tmp_path / "base")
    before = os.umask(umask)
    try:
        save(with_adapters(), tmp_path / "adapter")
        list(merged_files(str(tmp_path / "adapter"), str(tmp_path / "base"), tmp_path / "out"))
    finally:
        os.umask(before)
    weights = [tmp_path / "adapter" / ADAPTER_FILE, *(tmp_path / "out").glob("*.safetensors")]
    assert {file.stat().st_mode & 0o777 for file in weights} == {0o666 & ~umask}


def test_sizes_of_images_are_those_of_the_training(tmp_path: Path) -> None:
    """Where the adapter's folder says which; all else is the base's."""
    write_base(tmp_path / "base")
    save(with_adapters(), tmp_path / "adapter")
    for name in ("preprocessor_config.json", "processor_config.json", "tokenizer_config.json"):
        (tmp_path / "base" / name).write_text('{"of": "base"}')
    for name in ("preprocessor_config.json", "video_preprocessor_config.json", "tokenizer_config.json", "README.md"):
        (tmp_path / "adapter" / name).write_text('{"of": "adapter"}')
    list(merged_files(str(tmp_path / "adapter"), str(tmp_path / "base"), tmp_path / "out"))
    found = {file.name: json.loads(file.read_text()).get("of") for file in (tmp_path / "out").glob("*_config.json")}
    assert found == {"preprocessor_config.json": "adapter", "video_preprocessor_config.json": "adapter",
                     "processor_config.json": "base", "tokenizer_config.json": "base", "generation_config.json": None}
    assert not (tmp_path / "out" / "README.md").exists()


def test_the_job(tmp_path: Path) -> None:
    write_base(tmp_path / "base")
    save(with_adapters(), tmp_path / "adapter")
    main = job_of("merge").main
    words = [f"adapter={tmp_path / 'adapter'}", f"out={tmp_path / 'out'}"]
    error = f"error: base: the adapter in {tmp_path / 'adapter'} names '', no folder here; allowed: base=FOLDER"
    assert ended(main, words)[::2] == (2, [error])
    error = f"error: base: no folder {tmp_path / 'none'}; allowed: a local Hugging Face folder"
    assert ended(main, [*words, f"base={tmp_path / 'none'}"])[::2] == (2, [error])
    status, output, errors = ended(main, [*words, f"base={tmp_path / 'base'}"])
    assert (status, errors) == (0, [])
    assert output.startswith(f"{tmp_path / 'out'}: ")
    assert "weights changed by the adapter" in output
    status, _, errors = ended(main, [*words, f"base={tmp_path / 'base'}"])
    assert status == 2
    assert "is there already; allowed: a folder that is empty, or not there" in errors[0]
    for words, error in ((["adapter"], "'adapter': allowed: adapter=, base=, out="),
                         (["out=x"], "adapter: got nothing"), (["adapter=x"], "out: got nothing")):
        status, _, errors = ended(main, words)
        assert status == 2
        assert error in errors[0]
    status, output, _ = ended(main, ["--help"])
    assert status == 0
    assert "usage" in output


def broken(folder: Path, what: str) -> str:
    """Change an adapter; the error that follows."""
    settings = json.loads((folder / ADAPTER_SETTINGS).read_text())
    tensors = load_file(folder / ADAPTER_FILE)
    a, b = (f"{ADAPTER_PREFIX}{OTHER}.lora_{part}.weight" for part in "AB")
    if what == "rank":
        settings["r"], error = 0, "has r=0 and lora_alpha=8.0; allowed: numbers, r at least 1"
    elif what == "kind":
        settings["use_dora"], error = True, "sets use_dora; allowed: plain LoRA"
    elif what == "half":
        del tensors[b]
        error = f"{OTHER} has no lora_A and lora_B of rank 4, which adapter_config.json gives"
    elif what == "other rank":
        settings["r"], error = 8, "has no lora_A and lora_B of rank 8, which adapter_config.json gives"
    elif what == "start":
        settings["init_lora_weights"] = "pissa_niter_4"
        error = "sets init_lora_weights=pissa_niter_4, which has changed the base; allowed: plain LoRA"
    elif what == "layers":
        settings["layer_replication"], error = [[0, 2], [1, 3]], "sets layer_replication; allowed: plain LoRA"
    elif what == "extra":
        tensors["base_model.model.lm_head.weight"] = torch.zeros(2)
        error = "holds base_model.model.lm_head.weight, which is not merged"
    elif what == "place":
        for name in (a, b):
            tensors[name.replace("layers.0", "layers.9")] = tensors.pop(name)
        error = (f"layers find no weight in {folder.parent / 'base'}, the first is {OTHER.replace('0', '9')}: another "
                 "base")
    elif what == "shape":
        tensors[a] = tensors[a][:, :-1].contiguous()
        error = (f"{OTHER} is of a weight of shape (128, 127); that of {folder.parent / 'base'} has (128, 128): "
                 "another base")
    else:
        (folder / ADAPTER_FILE).write_bytes(b"short")
        return f"{ADAPTER_FILE} cannot be read"
    (folder / ADAPTER_SETTINGS).write_text(json.dumps(settings))
    save_file(tensors, folder / ADAPTER_FILE)
    return error


@pytest.mark.parametrize("what", ["rank", "other rank", "kind", "start", "layers", "half", "extra", "place",
                                  "shape", "short"])
def test_what_is_refused(written: Path, tmp_path: Path, what: str) -> None:
    shutil.copytree(written, tmp_path, dirs_exist_ok=True)
    error = broken(tmp_path / "adapter", what)
    with pytest.raises(ModelError) as raised:
        list(merged_files(str(tmp_path / "adapter"), str(tmp_path / "base"), tmp_path / "out"))
    assert error in str(raised.value)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("name", "value"), [
    ("alora_invocation_tokens", [1, 2]), ("alora_invocation_tokens", []), ("layer_replication", [[0, 2], [1, 3]]),
    ("use_dora", True), ("use_qalora", True), ("lora_bias", True), ("fan_in_fan_out", True),
    ("ensure_weight_tying", True), ("bias", "lora_only"), ("bias", "all"), ("modules_to_save", ["lm_head"]),
    ("rank_pattern", {"q_proj": 2}), ("alpha_pattern", {"q_proj": 2}), ("trainable_token_indices", [5]),
    ("trainable_token_indices", {"embed_tokens": [5]}), ("target_parameters", ["experts.weight"]),
    ("megatron_config", {"x": 1}), ("loftq_config", {"loftq_bits": 4}), ("corda_config", {}), ("lora_ga_config", {}),
    ("velora_config", {}), ("monteclora_config", {}), ("use_bdlora", {}), ("arrow_config", {}), ("kasa_config", {}),
    *(("init_lora_weights", way) for way in ("pissa", "pissa_niter_4", "olora", "corda", "loftq", "mica", "lora_ga",
                                             "of tomorrow", ["gaussian"])),
    ("of_tomorrow", True), ("of_tomorrow", 3), ("of_tomorrow", 0), ("of_tomorrow", 0.0), ("use_dora", 0), ("r", True),
    ("lora_alpha", True), ("init_lora_weights", 1), ("of_tomorrow", "some"), ("of_tomorrow", {}), ("use_rslora", "no")])
def test_what_may_be_more_than_low_rank_is_refused(written: Path, tmp_path: Path, name: str, value: object) -> None:
    shutil.copytree(written / "adapter", tmp_path, dirs_exist_ok=True)
    file = tmp_path / ADAPTER_SETTINGS
    file.write_text(json.dumps(json.loads(file.read_text()) | {name: value}))
    with pytest.raises(ModelError) as raised:
        read_adapter(str(tmp_path))
    assert name in str(raised.value)
    assert "; allowed: " in str(raised.value)
    assert "\n" not in str(raised.value)


def test_every_setting_that_peft_has_is_decided_on(tmp_path: Path) -> None:
    """PEFT's file of a plain adapter is merged, with all that it says; a setting that a later version brings is off."""
    save(with_adapters(), tmp_path)
    given = json.loads((tmp_path / ADAPTER_SETTINGS).read_text())
    plain = LoraConfig(r=given["r"], lora_alpha=given["lora_alpha"], target_modules=given["target_modules"])
    for settings in (plain, replace(plain, init_lora_weights="gaussian", lora_dropout=0.1, bias="none"),
                     replace(plain, init_lora_weights="eva", eva_config=EvaConfig(), layers_to_transform=[0, 1],
                             layers_pattern="layers", exclude_modules="head", revision="main")):
        settings.save_pretrained(tmp_path)
        file = tmp_path / ADAPTER_SETTINGS
        file.write_text(json.dumps(json.loads(file.read_text()) | {"of_tomorrow": None, "use_tomorrow": False}))
        assert read_adapter(str(tmp_path)).pairs
    known = {field.name for field in fields(LoraConfig)}
    assert known >= HARMLESS
    assert PLAIN.keys() <= known
    assert {field.name: field.default for field in fields(LoraConfig)
            if field.name not in HARMLESS | PLAIN.keys() and field.default not in OFF} == {}, "what PEFT has on"


def test_a_head_that_is_the_embedding_too(tmp_path: Path) -> None:
    """W + B A in the head alone is no model with one weight for both."""
    write_base(tmp_path / "base")
    save(with_adapters(), tmp_path / "adapter")
    file = tmp_path / "adapter" / ADAPTER_FILE
    tensors = load_file(file)
    for part in "AB":
        tensors[f"{ADAPTER_PREFIX}lm_head.lora_{part}.weight"] = torch.zeros(4, 4)
    save_file(tensors, file)
    with pytest.raises(ModelError, match=r"changes lm_head, which in .* is the embedding too \(tie_word_embeddings\)"):
        list(merged_files(str(tmp_path / "adapter"), str(tmp_path / "base"), tmp_path / "out"))


def test_a_quantized_base(tmp_path: Path) -> None:
    """Whose codes are no weights."""
    write_base(tmp_path / "base")
    save(with_adapters(), tmp_path / "adapter")
    for file in (tmp_path / "base").glob("*.safetensors"):
        save_file({name: value.to(torch.int8) if name.endswith("layers.0.self_attn.q_proj.weight") else value
                   for name, value in load_file(file).items()}, file, {"format": "pt"})
    with pytest.raises(ModelError, match=r"q_proj.weight is stored as I8; allowed: F64, F32, F16, BF16$"):
        list(merged_files(str(tmp_path / "adapter"), str(tmp_path / "base"), tmp_path / "out"))


def test_places_for_what_is_merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder inside the base is refused; that in which one stands is taken, where it is empty; others are made."""
    write_base(tmp_path / "base")
    save(with_adapters(), tmp_path / "adapter")
    (tmp_path / "base" / "sub").mkdir()
    with pytest.raises(ModelError, match=r"is inside the base, .*; allowed: a folder elsewhere"):
        list(merged_files(str(tmp_path / "adapter"), str(tmp_path / "base"), tmp_path / "base" / "sub" / "out"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    list(merged_files(str(tmp_path / "adapter"), str(tmp_path / "base"), Path(".")))
    assert (tmp_path / "here" / "config.json").exists()
    list(merged_files(str(tmp_path / "adapter"), str(tmp_path / "base"), tmp_path / "new" / "merged"))
    assert (tmp_path / "new" / "merged" / "config.json").exists()


def test_a_full_disk(tmp_path: Path, small_disk: Path) -> None:
    write_base(tmp_path / "base")
    save(with_adapters(), tmp_path / "adapter")
    (small_disk / "fills").write_bytes(bytes(shutil.disk_usage(small_disk).free - 2**20))
    words = [f"adapter={tmp_path / 'adapter'}", f"base={tmp_path / 'base'}", f"out={small_disk / 'out'}"]
    status, _, errors = ended(job_of("merge").main, words)
    assert status == 1
    [line] = errors
    assert line.startswith(f"error: out: {small_disk / 'out'} cannot be written: ")
    assert [file.name for file in small_disk.iterdir()] == ["fills"]


UNREADABLE = "/proc/self/mem"


@pytest.mark.parametrize(("key", "file", "link"), [
    ("base", "notes.txt", "gone"), ("base", "notes.txt", UNREADABLE), ("base", "sub/notes.txt", UNREADABLE),
    ("base", "config.json", UNREADABLE), ("base", "model.safetensors.index.json", UNREADABLE),
    ("adapter", "preprocessor_config.json", UNREADABLE)])
def test_what_cannot_be_read_is_named(key: str, file: str, link: str, written: Path, tmp_path: Path) -> None:
    for name in ("base", "adapter"):
        shutil.copytree(written / name, tmp_path / name)
    target = tmp_path / key / file
    target.parent.mkdir(exist_ok=True)
    target.unlink(missing_ok=True)
    target.symlink_to(link)
    words = [f"adapter={tmp_path / 'adapter'}", f"base={tmp_path / 'base'}", f"out={tmp_path / 'out'}"]
    status, _, [line] = ended(job_of("merge").main, words)
    assert status == 2
    assert line.startswith((f"error: {key}: {target} cannot be read: ", f"error: {key}: {target} is not "))
    assert {path.name for path in tmp_path.iterdir()} == {"base", "adapter"}


def test_an_adapter_of_other_weights(tmp_path: Path) -> None:
    """Of the same names and shapes: only its fingerprint tells."""
    for name, seed in (("base", 0), ("other", 1)):
        write_base(tmp_path / name, seed=seed)
    adapter = build_model("", str(tmp_path / "base"), None, 0)
    adapter.add_lora(ALL)
    save_model(adapter, tmp_path / "adapter", {name: first_values(name, value.shape, 0)
                                        for name, value in adapter.module.named_parameters() if value.requires_grad})
    assert base_of(str(tmp_path / "adapter")) == str(tmp_path / "base")
    with pytest.raises(ModelError, match="was trained on other weights than those in"):
        list(merged_files(str(tmp_path / "adapter"), str(tmp_path / "other"), tmp_path / "out"))
    assert sum(merged_files(str(tmp_path / "adapter"), str(tmp_path / "base"), tmp_path / "out")) > 0
