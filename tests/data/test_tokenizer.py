from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dhp_ray.data.errors import DataError
from dhp_ray.data.families.qwen2_5_vl import SPECIAL_TOKENS, Qwen25VLFamily

TOKENIZER = Qwen25VLFamily.byte_tokenizer()


@given(st.text())
def test_a_text_is_its_bytes(text: str) -> None:
    if any(token in text for token in SPECIAL_TOKENS):
        return
    ids = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    assert ids == list(text.encode("utf-8"))
    assert TOKENIZER.decode(ids) == text


def test_special_tokens_follow_the_bytes() -> None:
    assert len(TOKENIZER) == 256 + 7
    assert TOKENIZER("a<|im_end|>\n", add_special_tokens=False)["input_ids"] == [97, 258, 10]
    assert Qwen25VLFamily.token_ids(TOKENIZER) == {"image": 261, "video": 262, "vision_start": 259, "vision_end": 260,
                                            "bos": 256, "eos": 258, "pad": 256}


def test_the_template_is_that_of_the_model() -> None:
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "\nWhat? "},
                                             {"type": "image"}]},
                {"role": "assistant", "content": "A cat."}]
    assert TOKENIZER.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>\nWhat? "
        "<|vision_start|><|image_pad|><|vision_end|><|im_end|>\n"
        "<|im_start|>assistant\nA cat.<|im_end|>\n<|im_start|>assistant\n"
    )
    own = [{"role": "system", "content": "Be brief."},
           {"role": "user", "content": [{"type": "video"}, {"type": "text", "text": "?"}]}]
    assert TOKENIZER.apply_chat_template(own, tokenize=False, add_vision_id=True) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nVideo 1: "
        "<|vision_start|><|video_pad|><|vision_end|>?<|im_end|>\n"
    )


def test_a_saved_tokenizer_loads_as_the_same(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    TOKENIZER.save_pretrained(tmp_path)
    # With a model's config.json beside it, AutoTokenizer chooses a class by the model's type.
    (tmp_path / "config.json").write_text(
        '{"model_type": "qwen2_5_vl", "architectures": ["Qwen2_5_VLForConditionalGeneration"]}'
    )
    loaded = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    text = "<|im_start|>user\nGrüße,  zwei   Leerzeichen\t"
    text += "<|vision_start|><|image_pad|><|vision_end|> it's 1234<|im_end|>\n"
    assert loaded(text)["input_ids"] == TOKENIZER(text)["input_ids"]
    assert Qwen25VLFamily.token_ids(loaded) == Qwen25VLFamily.token_ids(TOKENIZER)
    assert loaded.chat_template == TOKENIZER.chat_template
    assert (loaded.eos_token, loaded.pad_token) == ("<|im_end|>", "<|endoftext|>")


def test_a_tokenizer_without_image_token_is_refused() -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    other = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(vocab={"a": 0}, merges=[])))
    with pytest.raises(DataError, match=r"no token <\|image_pad\|>"):
        Qwen25VLFamily.token_ids(other)
