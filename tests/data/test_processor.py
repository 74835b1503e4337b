from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoImageProcessor, AutoTokenizer, PreTrainedTokenizerFast
from transformers.image_utils import load_image
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize as reference_resize
from transformers.processing_utils import ProcessorMixin

from dhp_ray.data.conversation import read_turns
from dhp_ray.data.errors import DataError, RowError
from dhp_ray.data.families.qwen2_5_vl import CHAT_TEMPLATE, SPECIAL_TOKENS, smart_resize
from dhp_ray.data.images import decode, image_size
from dhp_ray.data.model_folder import check_byte_order_marks, check_processor_files
from dhp_ray.data.processor import Processor, ProcessorSpec, within
from tests.data.samples import MIN_PIXELS, processor, talk

PROCESSOR = processor()
SIZE = -1
"""In a configuration, where the size of the embedding belongs."""


class OwnProcessor(Qwen2_5_VLProcessor):
    """The model's own processor without its video part, which needs torchvision."""

    def __init__(
        self,
        image_processor: object = None,
        tokenizer: PreTrainedTokenizerFast | None = None,
        chat_template: str | None = None,
    ) -> None:
        self.image_token, self.video_token = "<|image_pad|>", "<|video_pad|>"
        assert tokenizer is not None
        self.image_token_id = tokenizer.convert_tokens_to_ids(self.image_token)
        self.video_token_id = tokenizer.convert_tokens_to_ids(self.video_token)
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)


def word_tokenizer(folder: Path) -> Path:
    """A folder like a real model's: byte-level BPE with merges over words, as Qwen's tokenizer splits them."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    split = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
             r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(split), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    corpus = [
        "Is this sentence true of the image? There is a blue block\n\n over a yellow block. true false assistant user "
        "system\n"
    ] * 9
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>",
                            chat_template=CHAT_TEMPLATE).save_pretrained(folder)
    settings = PROCESSOR.family.settings | {"image_processor_type": "Qwen2VLImageProcessor"}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text('{"model_type": "qwen2_5_vl"}')
    return folder


def own_processor(folder: Path, ours: Processor) -> OwnProcessor:
    """Made of the same folder by transformers alone."""
    size = {"shortest_edge": ours.family.min_pixels, "longest_edge": ours.family.max_pixels}
    images = AutoImageProcessor.from_pretrained(folder, local_files_only=True, backend="pil", size=size)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return OwnProcessor(images, tokenizer, tokenizer.chat_template)


@given(st.integers(1, 3000), st.integers(1, 3000), st.sampled_from([(3136, 1003520), (3136, 50176), (12544, 12544)]))
def test_smart_resize_is_that_of_transformers(height: int, width: int, bounds: tuple[int, int]) -> None:
    if max(height, width) / min(height, width) > 200:
        with pytest.raises(RowError, match="aspect ratio"):
            smart_resize(height, width, 28, *bounds)
    else:
        assert smart_resize(height, width, 28, *bounds) == reference_resize(height, width, 28, *bounds)


@pytest.mark.parametrize("kind", ["bytes", "words"])
def test_ids_pixels_and_grids_equal_the_models_own_on_real_images(kind: str, test_data: Path, tmp_path: Path) -> None:
    if kind == "words":
        ours = ProcessorSpec(path=str(word_tokenizer(tmp_path))).load()
    else:
        ours = PROCESSOR
        ours.save(tmp_path)
    own = own_processor(tmp_path, ours)
    folder = test_data / "nlvr"
    rows = json.loads((folder / "conversations.json").read_text())
    longest = max(rows, key=lambda row: len(row["image"]) if isinstance(row["image"], list) else 1)
    for row in [*rows[:6], longest]:
        names = row["image"] if isinstance(row["image"], list) else [row["image"]]
        images = [(folder / name).read_bytes() for name in names]
        encoded = ours.encode(row["conversations"], [image_size(image) for image in images])
        text = own.apply_chat_template([turn.message() for turn in read_turns(row["conversations"])], tokenize=False)
        expected = own(text=[text], images=[load_image(str(folder / name)) for name in names], return_tensors="np")
        assert np.array_equal(encoded.input_ids, expected["input_ids"][0])
        assert np.array_equal(np.array(encoded.grids), expected["image_grid_thw"])
        pixels = np.concatenate([decode(image, ours.family) for image in images])
        assert np.array_equal(pixels, expected["pixel_values"])
        assert encoded.vision_tokens == int((expected["input_ids"] == own.image_token_id).sum())
        assert encoded.text_tokens + encoded.vision_tokens == expected["input_ids"].shape[1]


@pytest.mark.parametrize("kind", ["bytes", "words"])
def test_labels_are_what_a_marked_template_says(kind: str, tmp_path: Path) -> None:
    """Transformers reports the assistant's tokens of a template that marks them with {% generation %}: an independent
    way to the mask.
    """
    ours = PROCESSOR if kind == "bytes" else ProcessorSpec(path=str(word_tokenizer(tmp_path))).load()
    marked = """{%- for message in messages -%}{%- if loop.first and message['role'] != 'system' -%}
{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' -}}{%- endif -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['role'] == 'assistant' -%}
{%- generation -%}{{- message['content'] + '<|im_end|>' -}}{%- endgeneration -%}
{%- else -%}{{- message['content'] + '<|im_end|>' -}}{%- endif -%}{{- '\\n' -}}{%- endfor -%}"""
    conversation = talk("Is this true?", "true", "And\n this: größer?", "Ja, größer – 3 > 2.", "assistant",
                        " a blue block. ", "x", "<|b|>")
    encoded = ours.encode([{"from": "system", "value": "true false"}, *conversation], [])
    messages = [{"role": "system", "content": "true false"}] + [
        {"role": {"human": "user", "gpt": "assistant"}[turn["from"]], "content": turn["value"]}
        for turn in conversation]
    expected = ours.tokenizer.apply_chat_template(messages, chat_template=marked, tokenize=True, return_dict=True,
                                                  return_assistant_tokens_mask=True)
    assert encoded.input_ids.tolist() == expected["input_ids"]
    assert (encoded.labels != -100).tolist() == [bool(flag) for flag in expected["assistant_masks"]]
    assert np.array_equal(encoded.labels[encoded.labels != -100], encoded.input_ids[encoded.labels != -100])


def test_labels_are_the_answers_and_their_end_token() -> None:
    encoded = PROCESSOR.encode(talk("<image>\nWhich?", "the left", "Sure?", "yes"), [(56, 84)])
    assert PROCESSOR.tokenizer.decode(encoded.labels[encoded.labels != -100]) == "the left<|im_end|>yes<|im_end|>"
    assert encoded.grids == ((1, 6, 4),)
    assert encoded.vision_tokens == 6
    assert int((encoded.input_ids == PROCESSOR.token_ids["image"]).sum()) == 6
    assert encoded.input_ids.dtype == encoded.labels.dtype == np.int32


@pytest.mark.parametrize(("conversation", "sizes", "reason"), [
    ([], [], "the conversation is empty"),
    ([{"from": "human", "value": "a"}], [], "no turn of the assistant"),
    (talk("a", "b")[1:], [], "the assistant speaks first"),
    ([{"from": "bot", "value": "a"}], [],
     "turn 1 is from 'bot'; allowed: human, user, gpt, assistant, function_call, observation, tool, function, system"),
    (["a"], [], "turn 1 holds str"),
    (talk("a", ""), [], "turn 2 has no text"),
    ([{"from": "human", "value": 3}], [], "turn 1 has 3 in value; allowed: a text"),
    ([{"from": "human", "value": ["a"]}], [], r"turn 1 has \['a'\] in value; allowed: a text"),
    ([{"role": "user", "content": {"text": "a"}}], [], "turn 1 has {'text': 'a'} in content; allowed: a text"),
    (talk("<image>", "b"), [], "1 <image> marks for 0 images"),
    (talk("a", "b"), [(56, 56)], "0 <image> marks for 1 images"),
    (talk("<image>a", "<image>"), [(56, 56), (56, 56)], r"1 <image> marks for 2 images; .* \(\\<image> is a word; "),
    ([{"role": "user", "content": "a"}, {"role": "assistant", "content": [{"type": "image"}]}], [(56, 56)],
     "turn 2: <image> in a turn of the assistant"),
    (talk("<image>", "b"), [(5700, 28)], "aspect ratio 203.571; allowed: at most 200"),
    (talk("a\ud800", "b"), [], "turn 1 is not UTF-8 text"),
])
def test_what_cannot_be_encoded_is_a_bad_row(conversation: list, sizes: list[tuple[int, int]], reason: str) -> None:
    with pytest.raises(RowError, match=reason) as caught:
        PROCESSOR.encode(conversation, sizes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("preset", ["tiny", "tiny_qwen3_vl", "tiny_internvl"])
def test_marks_are_words_outside_of_the_users_turns_and_behind_a_backslash(preset: str) -> None:
    ours = ProcessorSpec(preset).load()
    said = [{"from": "system", "value": "Write <image> and <video>."},
            *talk(r"<image>\<image> is what? \<video>\\<image>", "<video src=a></video> <image>",
                  r"Go. <image>\<image>", "<image>")]
    call = json.dumps({"name": "f", "arguments": {"tag": "<image>"}})
    if preset != "tiny_internvl":  # which, like InternVL3's own, writes no calls
        said[3:] = [{"from": "human", "value": "Go."}, {"from": "function_call", "value": call},
                    {"from": "observation", "value": r"<image>\<image>"}, {"from": "gpt", "value": "<image>"}]
    encoded = ours.encode(said, [(56, 56), (56, 56)])
    text = ours.tokenizer.decode(encoded.input_ids)
    assert "Write <image> and <video>.<|im_end|>" in text
    assert r"<image> is what? <video>\<image><|im_end|>" in text
    assert ("<image>\n</tool_response>" in text) == (preset != "tiny_internvl")
    called = "" if preset == "tiny_internvl" else f"<tool_call>\n{call}\n</tool_call><|im_end|>"
    assert ours.tokenizer.decode(encoded.labels[encoded.labels != -100]) == (
        f"<video src=a></video> <image><|im_end|>{called}<image><|im_end|>")
    assert encoded.media == (0, 1)
    typed = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": r"<image>\<image> is what?"}]},
             {"role": "assistant", "content": [{"type": "text", "text": "<image>"}]}]
    assert r"<image>\<image> is what?" in ours.tokenizer.decode(ours.encode(typed, [(56, 56)]).input_ids)


def test_an_answer_ends_with_its_turn_whatever_else_a_model_names() -> None:
    """The turn's end is what it learns. The config.json of Llama 3 names only the end of a text."""
    turn, text = PROCESSOR.token_ids["eos"], PROCESSOR.token_ids["bos"]
    assert turn != text
    assert PROCESSOR.end_ids(None) == PROCESSOR.end_ids(turn) == [turn]
    assert PROCESSOR.end_ids(text) == PROCESSOR.end_ids([text, turn]) == sorted([text, turn])


def test_a_saved_processor_loads_as_the_same(tmp_path: Path) -> None:
    PROCESSOR.save(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen2_5_vl"}')
    loaded = ProcessorSpec("", str(tmp_path), MIN_PIXELS, 50176).load()
    conversation = talk("<image>\nWhich?", "the left")
    assert np.array_equal(loaded.encode(conversation, [(56, 56)]).input_ids,
                          PROCESSOR.encode(conversation, [(56, 56)]).input_ids)
    assert loaded.family.grid((1000, 1000)) == (1, 16, 16)  # the configuration's max_pixels, not the folder's
    assert {path.name for path in tmp_path.iterdir()} >= {
        "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "preprocessor_config.json",
        "video_preprocessor_config.json", "processor_config.json"}


@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_the_tokenizer_of_a_folder_is_saved_byte_for_byte(mark: str, tmp_path: Path) -> None:
    """Training changes nothing of it, and other versions of transformers read what the folder's publisher wrote."""
    folder, saved = word_tokenizer(tmp_path / "given"), tmp_path / "saved"
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["added_tokens_decoder"] = {str(token["id"]): {"content": token["content"], "special": token["special"]}
                                        for token in tokenizer["added_tokens"]}
    template = (folder / "chat_template.jinja").read_bytes()
    texts = {"tokenizer.json": json.dumps(tokenizer), "tokenizer_config.json": json.dumps(settings, indent=1),
             "special_tokens_map.json": "{}", "added_tokens.json": "{ }", "vocab.json": "{}\n", "merges.txt": "",
             "chat_template.json": json.dumps({"chat_template": template.decode()})}
    for name, text in texts.items():
        (folder / name).write_text(text)
    (folder / "chat_template.jinja").write_bytes(mark.encode() + template)
    (folder / "preprocessor_config.json").write_text(json.dumps(
        {"image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 3136, "max_pixels": 99999}))
    saved.mkdir()
    ProcessorSpec(path=str(folder), max_pixels=50176).load().save(saved)
    assert {name: (saved / name).read_text() for name in texts} == texts
    assert (saved / "chat_template.jinja").read_bytes() == template
    assert json.loads((saved / "preprocessor_config.json").read_text())["size"]["longest_edge"] == 50176
    assert {file.name for file in saved.iterdir()} == {
        *texts, "chat_template.jinja", *PROCESSOR.family.processor_files()}


def test_a_folder_that_is_gone_when_its_processor_is_saved(tmp_path: Path) -> None:
    processor = ProcessorSpec(path=str(word_tokenizer(tmp_path / "given"))).load()
    (tmp_path / "given").rename(tmp_path / "moved")
    with pytest.raises(DataError, match=r"^model\.path: [^\n]*given has no tokenizer; "):
        processor.save(tmp_path)


def test_a_preset_that_a_full_disk_has_no_room_for(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"^No space left on device[^\n]*$"):
        PROCESSOR.save(tmp_path)


def test_transformers_reads_the_sizes_of_a_saved_processor(tmp_path: Path) -> None:
    ProcessorSpec("tiny", "", 12544, 50176).load().save(tmp_path)
    loaded = AutoImageProcessor.from_pretrained(tmp_path, local_files_only=True, backend="pil")
    assert (loaded.size["shortest_edge"], loaded.size["longest_edge"]) == (12544, 50176)
    assert (loaded.patch_size, loaded.temporal_patch_size, loaded.merge_size) == (14, 2, 2)


def test_auto_processor_loads_a_saved_processor(tmp_path: Path) -> None:
    pytest.importorskip("torchvision", reason="AutoProcessor needs torchvision, which does not import here",
                        exc_type=Exception)
    from transformers import AutoProcessor

    PROCESSOR.save(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen2_5_vl"}')
    loaded = AutoProcessor.from_pretrained(tmp_path, local_files_only=True)
    assert type(loaded).__name__ == "Qwen2_5_VLProcessor"
    assert loaded.chat_template == CHAT_TEMPLATE


def test_a_template_that_strips_answers_is_followed(tmp_path: Path) -> None:
    word_tokenizer(tmp_path)
    stripping = CHAT_TEMPLATE.replace("{{- message['content'] -}}", "{{- message['content'] | trim -}}")
    (tmp_path / "chat_template.jinja").write_text(stripping)
    loaded = ProcessorSpec(path=str(tmp_path)).load()
    encoded = loaded.encode(talk("a", "  true "), [])
    assert loaded.tokenizer.decode(encoded.labels[encoded.labels != -100]) == "true<|im_end|>"


def test_a_template_that_writes_other_answers_makes_bad_rows(tmp_path: Path) -> None:
    word_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(
        CHAT_TEMPLATE.replace("{{- message['content'] -}}", "{{- message['content'] | replace('true', 'yes') -}}")
    )
    loaded = ProcessorSpec(path=str(tmp_path)).load()
    with pytest.raises(RowError, match="the chat template changes an answer"):
        loaded.encode(talk("a", "true"), [])


@pytest.mark.parametrize("name", ["chat_template.jinja", "chat_template.json", "tokenizer_config.json"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_a_template_that_an_editor_saved_anew_writes_the_same(name: str, mark: str, tmp_path: Path) -> None:
    """With a byte order mark before it, and with the line ends of Windows."""
    template = mark + CHAT_TEMPLATE.replace("\n", "\r\n")
    word_tokenizer(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    for file in tmp_path.glob("chat_template.*"):
        file.unlink()
    text = template if name.endswith("jinja") else json.dumps(
        {**(config if name.startswith("tokenizer") else {}), "chat_template": template}, indent=1).replace("\n", "\r\n")
    (tmp_path / name).write_bytes(text.encode())
    loaded = ProcessorSpec(path=str(tmp_path)).load()
    found = loaded.encode(talk("a", "true"), [])
    whole = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\na<|im_end|>\n"
    written = f"{whole}<|im_start|>assistant\ntrue<|im_end|>\n"
    assert found.input_ids.tolist() == loaded.tokenizer(written, add_special_tokens=False)["input_ids"]
    assert loaded.encode_prompt(read_turns(talk("a", "true"))[:-1], [])[0] == f"{whole}<|im_start|>assistant\n"


def test_only_files_are_looked_at_for_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "logs.json").mkdir()
    (tmp_path / "link.json").symlink_to(tmp_path / "gone")
    check_byte_order_marks(tmp_path)


def test_the_processors_own_template_comes_first(tmp_path: Path) -> None:
    word_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "chat_template.json").write_text(
        json.dumps({"chat_template": CHAT_TEMPLATE.replace("helpful", "terse")})
    )
    loaded = ProcessorSpec(path=str(tmp_path)).load()
    assert "You are a terse assistant." in loaded.tokenizer.decode(loaded.encode(talk("a", "b"), []).input_ids)


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda folder: (folder / "tokenizer.json").unlink(), "no tokenizer that loads"),
        (lambda folder: (folder / "preprocessor_config.json").unlink(), "no preprocessor_config.json"),
        (lambda folder: (folder / "preprocessor_config.json").write_text("{"), "is not JSON"),
        (
            lambda folder: (folder / "preprocessor_config.json").write_text(
                '{"image_processor_type": "CLIPImageProcessor"}'
            ),
            "CLIPImageProcessor; allowed",
        ),
        (lambda folder: (folder / "chat_template.jinja").unlink(), "no chat template"),
        (
            lambda folder: (folder / "chat_template.jinja").write_text(
                "{% for m in messages %}{{ loop.length }}{% endfor %}"
            ),
            "template rewrites earlier turns",
        ),
        (lambda folder: (folder / "chat_template.jinja").write_text("{% for %}"), "chat template"),
        (lambda folder: (folder / "video_preprocessor_config.json").write_text('{"size": {"longest_edge": "x"}}'),
         r"video_preprocessor_config.json: size.longest_edge is 'x'; allowed: a number of pixels"),
        (lambda folder: (folder / "video_preprocessor_config.json").write_text('{"min_pixels": "few"}'),
         r"video_preprocessor_config.json: min_pixels is 'few'; allowed: a number of pixels"),
        (lambda folder: (folder / "video_preprocessor_config.json").write_text('{"size": {"longest_edge": NaN}}'),
         r"video_preprocessor_config.json: size.longest_edge is nan"),
    ],
)
def test_a_folder_that_lacks_something_is_refused_in_one_line(
    break_it: Callable[[Path], object], message: str, tmp_path: Path
) -> None:
    break_it(word_tokenizer(tmp_path))
    with pytest.raises(DataError, match=message) as caught:
        ProcessorSpec(path=str(tmp_path)).load()
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("model.path: ")


@pytest.mark.parametrize("vocabulary", [{"model": None, "added_tokens": 5}, {"model": {"vocab": 7}}])
def test_a_tokenizer_file_of_another_form_is_left_to_its_reader(vocabulary: Any, tmp_path: Path) -> None:
    (word_tokenizer(tmp_path) / "tokenizer.json").write_text(json.dumps(vocabulary))
    for size in ("10", float("nan"), [], 10):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2_5_vl", "vocab_size": size}))
        check_processor_files(tmp_path)
        with pytest.raises(DataError, match=r"^model\.path: .* has no tokenizer that loads"):
            ProcessorSpec(path=str(tmp_path)).load()


@pytest.mark.parametrize("config", [
    {"text_config": {"vocab_size": SIZE}}, {"vocab_size": SIZE},
    {"vocab_size": 9999, "text_config": {"vocab_size": SIZE}}])
@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
def test_a_tokenizer_with_words_beyond_the_embedding_is_refused(
    config: dict[str, Any], file: str, tmp_path: Path
) -> None:
    """Also with words that its settings alone add."""
    folder = word_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    largest = max(tokenizer.get_vocab().values())
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2_5_vl"} | fitting(config, largest + 1)))
    ProcessorSpec(path=str(folder)).load()
    kept = (folder / "tokenizer.json").read_bytes()
    tokenizer.add_tokens(["<red>"])
    tokenizer.save_pretrained(folder)
    if file != "tokenizer.json":
        (folder / "tokenizer.json").write_bytes(kept)
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        settings["added_tokens_decoder"] = {str(largest + 1): {"content": "<red>", "special": False}}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(DataError) as caught:
        ProcessorSpec(path=str(folder)).load()
    assert (f"its tokenizer has token ids up to {largest + 1}, which take {largest + 2} rows of the model's embedding; "
            f"it has {largest + 1} (vocab_size in config.json)") in str(caught.value)


def fitting(config: dict[str, Any], size: int) -> dict[str, Any]:
    """The configuration with an embedding of this size."""
    return {name: fitting(value, size) if isinstance(value, dict) else size if value == SIZE else value
            for name, value in config.items()}


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"model\.path: no folder"):
        ProcessorSpec(path=str(tmp_path / "absent")).load()


def test_the_reading_side_needs_no_torch() -> None:
    code = (
        "import sys; from dhp_ray.data import reader, stream; from dhp_ray.data.processor import ProcessorSpec\n"
        "ProcessorSpec('tiny').load().encode([{'from': 'human', 'value': 'a'}, {'from': 'gpt', 'value': "
        "'b'}], [])\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_a_text_that_is_far_too_long_is_refused_before_it_is_tokenized() -> None:
    for text in ("x" * 5_000_000, "\N{GRINNING FACE}" * 1_250_000):  # a token may be as little as a byte
        with pytest.raises(RowError, match=r"^50001\d\d bytes of text; allowed: at most 4194304$"):
            processor().encode(talk(text, "a"), [])


def test_tokens_of_many_answers_are_found_at_once() -> None:
    """A row of 4 MiB has some 60,000 answers; to look for the tokens of each would take minutes."""
    spans = [(1, 4), (4, 4), (6, 9)]
    tokens = np.array([(start, stop) for start in range(11) for stop in range(start, 11)])
    expected = [any(first <= start < stop <= last for first, last in spans) for start, stop in tokens.tolist()]
    assert within(*tokens.T, spans).tolist() == expected
    assert not within(*tokens.T, []).any()
    begun, number = time.process_time(), np.arange(1_000_000)
    assert within(number, number + 1, [(20 * answer, 20 * answer + 5) for answer in range(50_000)]).sum() == 250_000
    assert time.process_time() - begun < 10


def test_labels_of_many_answers_around_images_are_theirs() -> None:
    ours = processor()
    talked = talk(*(text for number in range(40) for text in (f"<image>{number}<image>", f"answer {number}")))
    encoded = ours.encode(talked, [(56, 56), (84, 56)] * 40)
    learned = ours.tokenizer.decode(encoded.labels[encoded.labels != -100])
    assert learned == "".join(f"answer {number}<|im_end|>" for number in range(40))
