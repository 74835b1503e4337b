"""vLLM's greedy answers to the questions of a file, about a model's folder; run by an interpreter that has vLLM.

    python tests/judge.py MODEL_FOLDER QUESTIONS.json ANSWERS.json

A question: {"messages": of the folder's chat template, "images": file names, "videos": [{"frames": a .npy file of the
frames that are shown, "numbers": theirs in the clip, "num_frames": and "rate": of the clip}]}. An answer: token ids.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}


def main(folder: str, questions: str, answers: str, num_tokens: int = 8) -> None:
    from vllm import LLM, SamplingParams
    from vllm.model_executor.models.qwen3_vl import Qwen3VLMultiModalProcessor

    # Beside transformers 5.10 or newer it keeps the template's tokens around a clip. The weights were trained without,
    # as it has it beside an older one.
    Qwen3VLMultiModalProcessor._expands_only_video_token = staticmethod(lambda processor: False)
    engine = LLM(model=folder, dtype="float32", max_model_len=4096, enforce_eager=True, seed=0,
                 limit_mm_per_prompt={"image": 4, "video": 2})
    tokenizer = engine.get_tokenizer()
    kind = json.loads(Path(folder, "config.json").read_text(encoding="utf-8"))["model_type"]
    asked = json.loads(Path(questions).read_text(encoding="utf-8"))
    prompts = [prompt_of(question, tokenizer, kind) for question in asked]
    found = engine.generate(prompts, SamplingParams(temperature=0, max_tokens=num_tokens), use_tqdm=False)
    ids = [list(output.outputs[0].token_ids) for output in found]
    Path(answers).write_text(json.dumps(ids), encoding="utf-8")


def prompt_of(question: dict[str, Any], tokenizer: Any, kind: str) -> dict[str, Any]:
    """A prompt with the decoded images and the sampled frames, and the times of these frames."""
    media: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    if question["images"]:
        media["image"] = [Image.open(name).convert("RGB") for name in question["images"]]
    if question["videos"]:
        media["video"] = [(np.load(video["frames"]), metadata(video)) for video in question["videos"]]
        settings = {"do_sample_frames": False}
        if kind == "internvl":  # which takes frames alone
            media["video"] = [frames for frames, _ in media["video"]]
    return {"prompt": tokenizer.apply_chat_template(question["messages"], tokenize=False, add_generation_prompt=True),
            "multi_modal_data": media, "mm_processor_kwargs": settings}


def metadata(video: dict[str, Any]) -> dict[str, Any]:
    return {"fps": video["rate"], "total_num_frames": video["num_frames"], "frames_indices": video["numbers"],
            "duration": video["num_frames"] / video["rate"], "video_backend": "opencv", "do_sample_frames": False}


if __name__ == "__main__":
    main(*sys.argv[1:4])
