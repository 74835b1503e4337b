"""Qwen3.5's ids, labels and positions, from a folder, against its own processor and model of transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import AddedToken
from transformers import AutoTokenizer
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5Model
from transformers.video_utils import VideoMetadata

from dhp_ray.data.conversation import read_turns
from dhp_ray.data.errors import DataError, RowError
from dhp_ray.data.processor import Processor, ProcessorSpec
from dhp_ray.data.video import read_clip
from dhp_ray.model.families import FAMILIES
from dhp_ray.model.presets import preset_config
from tests.data.families.test_qwen3_vl_processor import LIMITS, as_published, own_processor
from tests.data.samples import talk, video
from tests.data.test_processor import word_tokenizer
from tests.data.test_tools import TOOLS, call, with_text_arguments
from tests.data.test_video import frames_of

# What Qwen3.5's template does: a thought, which may be empty, before the answers to the last question; those before
# lose theirs. What tools answer is no question. The prompt begins the thought. Calls of tools are a kind of XML.
TEMPLATE = """
{%- macro shown(content) -%}
    {%- for part in ([{'type': 'text', 'text': content}] if content is string else content) -%}
        {{- part.text if part.type == 'text' else '<|vision_start|><|' + part.type + '_pad|><|vision_end|>' -}}
    {%- endfor -%}
{%- endmacro -%}
{%- set question = namespace(last=-1) -%}
{%- for message in messages -%}
    {%- if message.role == 'user' and not shown(message.content).startswith('<tool_response>') -%}
        {%- set question.last = loop.index0 -%}
    {%- endif -%}
{%- endfor -%}
{{- raise_exception('No question.') if question.last < 0 -}}
{%- if tools -%}
    {{- '<|im_start|>system\\nTools:' -}}
    {%- for tool in tools -%}{{- '\\n' + tool | tojson -}}{%- endfor -%}
    {{- '\\n\\n' + shown(messages[0].content) | trim if messages[0].role == 'system' -}}
    {{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
    {%- set text = shown(message.content) | trim -%}
    {%- if message.role == 'system' -%}
        {{- raise_exception('A late system turn.\\nIt comes first.') if not loop.first -}}
        {{- '<|im_start|>system\\n' + text + '<|im_end|>\\n' if not tools -}}
        {%- continue -%}
    {%- elif message.role == 'tool' -%}
        {{- '<|im_start|>user' if loop.previtem.role != 'tool' -}}
        {{- '\\n<tool_response>\\n' + text + '\\n</tool_response>' -}}
        {{- '<|im_end|>\\n' if loop.last or loop.nextitem.role != 'tool' -}}
        {%- continue -%}
    {%- endif -%}
    {{- '<|im_start|>' + message.role + '\\n' -}}
    {%- if message.role == 'assistant' -%}
        {%- set thought = message.reasoning_content if message.reasoning_content is string
                          else text.split('</think>')[0].split('<think>')[-1] if '</think>' in text else '' -%}
        {%- set text = text.split('</think>')[-1] | trim -%}
        {{- '<think>\\n' + thought | trim + '\\n</think>\\n\\n' if loop.index0 > question.last -}}
    {%- endif -%}
    {{- text -}}
    {%- for call in message.tool_calls or [] -%}
        {{- ('' if loop.first and not text else '\\n\\n' if loop.first else '\\n') + '<tool_call>\\n' -}}
        {{- '<function=' + call.function.name + '>\\n' -}}
        {%- for name, value in call.function.arguments | items -%}
            {{- '<parameter=' + name + '>\\n' + (value if value is string else value | tojson) -}}
            {{- '\\n</parameter>\\n' -}}
        {%- endfor -%}
        {{- '</function>\\n</tool_call>' -}}
    {%- endfor -%}
    {{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n<think>\\n' -}}
    {{- '\\n</think>\\n\\n' if enable_thinking is defined and not enable_thinking -}}
{%- endif -%}
"""
WORDS = ["What", "is", " true", "größer", "\n", "\n\n", "block.", "1", "<2.0 seconds>", "</im_end>"]


def from_folder(folder: Path, template: str = TEMPLATE) -> Processor:
    """Of the files of a published model: a tokenizer with merges over words that knows thoughts as tokens."""
    tokenizer = AutoTokenizer.from_pretrained(word_tokenizer(folder))
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in ("<think>", "</think>")])
    replace(ProcessorSpec("tiny_qwen3_5").load(), tokenizer=tokenizer, chat_template=template).save(folder)
    (folder / "config.json").write_text('{"model_type": "qwen3_5"}')
    (folder / "chat_template.jinja").write_text(template)
    return ProcessorSpec(path=str(folder)).load()


def random_messages(random: np.random.Generator) -> tuple[list[dict[str, Any]], list[Image.Image | bytes]]:
    """A conversation with one to four answers, some of which call tools that answer next, and its images and encoded
    videos in their order.
    """
    def some_text() -> str:
        return "a" + "".join(random.choice(WORDS, random.integers(1, 5)))

    messages: list[dict[str, Any]] = [{"role": "system", "content": some_text()}] * int(random.integers(2))
    media: list[Image.Image | bytes] = []
    for number in range(int(random.integers(1, 5))):
        kinds = [str(kind) for kind in random.permutation(["text", "text", "image", "image", "video"])][:4]
        content = [{"type": kind} | ({"text": some_text()} if kind == "text" else {}) for kind in kinds]
        if random.random() < 0.6:
            content = [part for part in content if part["type"] == "text"]
        if number and random.random() < 0.2:
            content = [{"type": "text", "text": "<tool_response>\n7\n</tool_response>"}]
        for part in content:
            width, height = (int(side) for side in random.integers(20, 120, 2))
            if part["type"] == "image":
                media.append(Image.new("RGB", (width, height), "red"))
            elif part["type"] == "video":
                media.append(video(int(random.choice([2, 9])), 64, 48))
        thought, text = some_text(), some_text()
        answers = [{"content": text}, {"content": f"<think>\n\n</think>\n\n{text}"},
                   {"content": f"<think>{thought}</think>{text}"}, {"content": f"{thought}\n</think>\n\n{text}"},
                   {"content": f"<think>\n{thought}\n</think>\n\n{text}"},
                   {"content": text, "reasoning_content": thought}]
        calls = [call("zoom", text=some_text(), factor=[1, 2.5, None]), call("clock")][: int(random.integers(3))]
        answer = answers[random.integers(6)] | ({"tool_calls": calls} if calls else {})
        called = bool(messages) and "tool_calls" in messages[-1]
        messages += [*([{"role": "tool", "content": some_text()}] * int(called and random.integers(2))),
                     {"role": "tool" if called else "user", "content": content},
                     {"role": "assistant", **answer, "weight": int(random.random() < 0.8)}]
    messages[-1]["weight"] = 1
    return messages, media


def expected_text(own: Any, messages: list[dict[str, Any]], tools: Any) -> tuple[str, list[tuple[int, int]]]:
    """Turn by turn by the processor's own template, and where the answers are that are generated: each learned one as
    it is written when it is the last one, after the prompt that led to it; all else as in the whole conversation.
    """
    def written(until: int, **options: Any) -> str:
        return own.apply_chat_template(  # type: ignore[no-any-return]
            messages[:until], tools=tools, tokenize=False, **options)

    blocks = written(len(messages)).split("<|im_start|>")
    block = 1 + (tools is not None and messages[0]["role"] != "system")
    text, answers = "<|im_start|>".join(blocks[:block]), []
    for number, message in enumerate(messages):
        if message["role"] == "tool" == messages[number - 1]["role"]:  # in one block
            continue
        learned = message.get("weight") == 1
        turn = written(number + 1).split("<|im_start|>")[block] if learned else blocks[block]
        text += "<|im_start|>" + turn
        block += 1
        if learned:
            thinks = not turn.startswith("assistant\n<think>\n\n</think>")
            prompt = written(number, add_generation_prompt=True, enable_thinking=thinks)
            assert written(number + 1).startswith(prompt)
            answer = written(number + 1).removeprefix(prompt)
            answers.append((len(text) - len(answer), len(text) - len("\n")))
    return text, answers


def own_encoding(own: Any, text: str, media: list[Image.Image | torch.Tensor]) -> Any:
    """Of a text that shows the first ones of the images and frames of videos."""
    text = as_published(text)
    shown = media[: text.count("<|image_pad|>") + text.count("<|video_pad|>")]
    images = [medium for medium in shown if isinstance(medium, Image.Image)]
    films = [medium for medium in shown if isinstance(medium, torch.Tensor)]
    metadata = [VideoMetadata(total_num_frames=len(film), fps=10.0) for film in films]
    return own(text=[text], images=images or None, videos=films or None, return_tensors="pt", do_sample_frames=True,
               return_mm_token_type_ids=True, **({"video_metadata": metadata} if films else {}))


def test_ids_labels_and_positions_of_random_conversations(tmp_path: Path) -> None:
    assert PROCESSOR_MAPPING_NAMES["qwen3_5"] == "Qwen3VLProcessor"
    ours = from_folder(tmp_path)
    own = own_processor(ours)
    config = preset_config("tiny_qwen3_5", ours.token_ids)
    with torch.device("meta"):
        model = Qwen3_5Model(config)
    random, kinds = np.random.default_rng(62), set()
    for _ in range(40):
        messages, media = random_messages(random)
        tools = TOOLS if random.random() < 0.5 else None
        sizes = [read_clip(medium, LIMITS) if isinstance(medium, bytes) else medium.size for medium in media]
        found = ours.encode_turns(read_turns(with_text_arguments(messages), tools), sizes)
        shown = [torch.from_numpy(np.stack(frames_of(medium))).permute(0, 3, 1, 2) if isinstance(medium, bytes)
                 else medium for medium in media]
        text, answers = expected_text(own, messages, tools)
        expected = own_encoding(own, text, shown)
        ids = expected["input_ids"][0].numpy()
        assert found.input_ids.tolist() == ids.tolist(), text
        labels = np.full_like(ids, -100)
        for start, stop in answers:
            prompt, until = (own_encoding(own, text[:end], shown)["input_ids"][0].numpy() for end in (start, stop))
            assert np.array_equal(prompt, ids[: len(prompt)])  # as encoded by themselves when the model is prompted
            labels[len(prompt) : len(until)] = ids[len(prompt) : len(until)]
        assert found.labels.tolist() == labels.tolist(), text
        positions, _ = model.get_rope_index(
            expected["input_ids"], expected["mm_token_type_ids"], expected.get("image_grid_thw"),
            expected.get("video_grid_thw"))
        own_positions = FAMILIES["qwen3_5"].positions_of(
            config, torch.from_numpy(found.input_ids), torch.tensor(found.grids).view(-1, 3),
            torch.tensor(found.seconds))
        assert torch.equal(own_positions, positions[:, 0])
        num_calls = max(len(message.get("tool_calls", [])) for message in messages)
        kinds |= {(type(medium).__name__, len(answers), num_calls) for medium in media}
    assert [set(found) for found in zip(*kinds)] == [{"bytes", "Image"}, {1, 2, 3, 4}, {0, 1, 2}]


def test_conversations_whose_last_answer_alone_is_learned_are_what_the_template_writes(tmp_path: Path) -> None:
    """As at inference: without the thoughts of earlier answers."""
    ours = from_folder(tmp_path)
    first, answer, *rest = talk("a", "<think>Hm.</think>b", "c", "<think>Well.</think>d")
    found = ours.encode([first, answer | {"weight": 0}, *rest], [])
    assert ours.tokenizer.decode(found.input_ids) == (
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n<|im_start|>user\nc<|im_end|>\n"
        "<|im_start|>assistant\n<think>\nWell.\n</think>\n\nd<|im_end|>\n")
    assert ours.tokenizer.decode(found.labels[found.labels != -100]) == "Well.\n</think>\n\nd<|im_end|>"
    prompt, alone = ours.encode_prompt(read_turns([first, answer, *rest])[:3], [])
    assert prompt.endswith("assistant\nb<|im_end|>\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n<think>\n\n"
                           "</think>\n\n")
    assert alone.input_ids.tolist() == ours.tokenizer(prompt)["input_ids"]


def test_a_template_that_keeps_all_thoughts_is_the_same_for_learned_answers(tmp_path: Path) -> None:
    conversation = talk("a", "<think>Hm.</think>b", "c", "d")
    keeps = TEMPLATE.replace(" if loop.index0 > question.last", "")
    for name, template in (("drops", TEMPLATE), ("keeps", keeps)):
        (tmp_path / name).mkdir()
        ours = from_folder(tmp_path / name, template)
        found = ours.encode(conversation, [])
        assert ours.tokenizer.decode(found.labels[found.labels != -100]) == "Hm.\n</think>\n\nb<|im_end|>d<|im_end|>"
        assert ours.tokenizer.decode(found.input_ids) == (
            "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n<think>\nHm.\n</think>\n\nb<|im_end|>\n"
            "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\nd<|im_end|>\n")


@pytest.mark.parametrize(("answer", "reason"), [
    ("<think>\nHm, and then", r"^turn 2 begins a thought that does not end; allowed: <think>\.\.\.</think>, then the "
                              r"answer$"),
    ("<think>a</think>b<think>c</think>d", r"^the chat template changes an answer, turn 2; allowed: a text that it "
                                           r"writes as it is, or stripped, behind one thought in "
                                           r"<think>\.\.\.</think> at most$"),
    ("a <think>b</think> c", "^the chat template changes an answer, turn 2; "),
    ("Use </think> here", "^the chat template changes an answer, turn 2; "),
    ("<think>a</think></think>b", "^the chat template changes an answer, turn 2; "),
    ("<think><think>a</think>b", "^the chat template changes an answer, turn 2; "),
    ("<think>a</think>\n", "^turn 2 has a thought and no answer; allowed: both, or the answer alone$")])
def test_thoughts_that_the_template_would_lose_are_bad_rows(tmp_path: Path, answer: str, reason: str) -> None:
    with pytest.raises(RowError, match=reason):
        from_folder(tmp_path).encode(talk("a", answer, "c", "d"), [])


def test_a_template_that_leaves_learned_answers_out_makes_bad_rows(tmp_path: Path) -> None:
    """All but the last two turns, say."""
    ours = from_folder(tmp_path, TEMPLATE.replace(
        "{%- set question", "{%- set messages = messages[-4:] -%}\n{%- set question", 1))
    ours.encode(talk("a", "b", "c", "d"), [])
    with pytest.raises(RowError, match=r"^the chat template leaves out or changes 1 of 3 learned answers; allowed: "
                                       r"templates that write every turn of the assistant$"):
        ours.encode(talk("a", "b", "c", "d", "e", "f"), [])


def test_a_template_whose_prompt_begins_a_thought_that_no_answer_has_is_refused(tmp_path: Path) -> None:
    template = TEMPLATE.replace("if loop.index0 > question.last", "if thought")
    with pytest.raises(DataError, match=r"^model.path: its chat template rewrites earlier turns, or begins an answer "
                                        r"otherwise than the prompt for it; allowed: [^\n]+$"):
        from_folder(tmp_path, template)


@pytest.mark.parametrize(("conversation", "reason"), [
    ([{"from": "system", "value": "s"}, *talk("a", "b"), {"from": "system", "value": "t"}, *talk("c", "d")],
     "the chat template refuses turn 4, of the system: A late system turn."),
    ([{"from": "system", "value": "s"}, *talk("<tool_response>1</tool_response>", "b")],
     "the chat template refuses the conversation: No question.")])
def test_what_the_template_refuses_is_a_bad_row(tmp_path: Path, conversation: list[Any], reason: str) -> None:
    ours = from_folder(tmp_path)
    for encode in (ours.encode_turns, ours.encode_prompt):
        with pytest.raises(RowError) as caught:
            encode(read_turns(conversation), [])
        assert str(caught.value) == reason
