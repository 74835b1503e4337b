"""A worker of an evaluation: it holds the whole model, as transformers loads it, and answers one sample at a time."""

from __future__ import annotations

from functools import cached_property, lru_cache
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForImageTextToText

from dhp_ray.comm.device import choose
from dhp_ray.config import Config
from dhp_ray.data.errors import RowError
from dhp_ray.data.families.base import Medium
from dhp_ray.data.formats import read_rows
from dhp_ray.data.formats.stored_rows import Row
from dhp_ray.data.fragments import Fragment
from dhp_ray.data.processor import IGNORE, Encoded, Processor, ProcessorSpec
from dhp_ray.data.questions import Question, question_of
from dhp_ray.data.reader import reason_of
from dhp_ray.errors import first_line
from dhp_ray.model.build import quieten
from dhp_ray.runtime.evaluate.answer import Answer
from dhp_ray.runtime.messages import RunError
from dhp_ray.runtime.worker.prefetch import decodings

KEPT_FRAGMENTS = 2


class Evaluator:
    """An actor of Ray that holds the model of `model.path`, in fp32 on the CPU and in bf16 elsewhere. One that Ray has
    started anew loads it with its first sample.
    """

    def __init__(self, config: Config, image_root: str) -> None:
        self.config, self.image_root = config, image_root

    @cached_property
    def device(self) -> torch.device:
        accelerator = choose(self.config.cluster.device)
        accelerator.activate()
        return accelerator.torch_device()

    @cached_property
    def processor(self) -> Processor:
        return ProcessorSpec.of(self.config.model, self.config.data).load()

    @cached_property
    def module(self) -> Any:
        dtype = torch.float32 if self.device.type == "cpu" else torch.bfloat16
        return load_model(self.config.model.path, dtype, self.device)

    def load(self) -> None:
        """Load everything.

        Raises:
            RunError: the folder's weights are not those of its configuration.
            ValueError: the node lacks the device, or something of the model's folder.
        """
        torch.set_num_threads(max(1, int(self.config.cluster.cpus_per_worker)))
        assert self.processor
        assert self.module

    def answer(self, number: int, fragment: Fragment, offset: int) -> Answer:
        """Evaluate row `offset` of a fragment, which is sample `number` of the file. A sample that cannot be used gives
        an answer with the reason.
        """
        self.load()
        try:
            row = rows_of(fragment)[offset]
        except Exception as error:  # the file is gone or damaged, and readers raise errors of many kinds
            return Answer(number, f"{fragment.path}:{fragment.first_row + offset + 1}", reason_of(error))
        try:
            question = question_of(row, self.processor, self.image_root)
            self._check_length(question)
            media = media_in(question, self.processor)
        except Exception as error:  # foreign rows and images fail in ways that no list names
            return Answer(number, row.id, reason_of(error))
        try:
            loss_sum, count = self.loss(question.whole, media)
            prediction = self.generate(question.prompt, media) if self.config.eval.generate else None
        except torch.OutOfMemoryError as error:
            return Answer(number, row.id, f"{len(question.whole.input_ids)} tokens: {first_line(error)}")
        return Answer(number, row.id, "", question.prompt_text, question.references, prediction, loss_sum, count)

    @torch.inference_mode()
    def loss(self, encoded: Encoded, media: list[Medium]) -> tuple[float, int]:
        """Sum of the cross entropy over the valid tokens of a sequence, in fp32, and their number."""
        labels = torch.from_numpy(encoded.labels[1:].astype(np.int64)).to(self.device)
        valid = (labels != IGNORE).nonzero()[:, 0]
        if not len(valid):
            return 0.0, 0
        logits = self.module(**self._inputs(encoded, media), logits_to_keep=valid, use_cache=False).logits[0]
        return F.cross_entropy(logits.float(), labels[valid], reduction="sum").item(), len(valid)

    @torch.inference_mode()
    def generate(self, prompt: Encoded, media: list[Medium]) -> str:
        """The text that the model's own `generate` gives, greedily. What else generation_config.json says holds."""
        inputs = self._inputs(prompt, media)
        found = self.module.generate(**inputs, max_new_tokens=self.config.eval.max_new_tokens, do_sample=False,
                                     num_beams=1, temperature=None, top_p=None, top_k=None)
        new = found[0, inputs["input_ids"].shape[1]:]
        text: str = self.processor.tokenizer.decode(new, skip_special_tokens=True)
        return text

    def _inputs(self, encoded: Encoded, media: list[Medium]) -> dict[str, Tensor]:
        """What transformers' model takes of a sequence, a batch of one; `media` may go on behind it."""
        shown = media[:len(set(encoded.media))]
        ids = encoded.input_ids.astype(np.int64)[None]
        arrays = {"input_ids": ids, "attention_mask": np.ones_like(ids),
                  **self.processor.family.model_inputs(ids[0], shown, self.processor.token_ids, self.processor.bounds)}
        return {name: torch.from_numpy(array).to(self.device) for name, array in arrays.items()}

    @cached_property
    def _longest(self) -> int:
        """Tokens of a sequence at most, with the answer: as many as the model has positions."""
        limit = self.config.planner.max_sequence_tokens
        positions = int(self.module.config.get_text_config().max_position_embeddings)
        return min(limit, positions) if limit else positions

    def _check_length(self, question: Question) -> None:
        room = self.config.eval.max_new_tokens if self.config.eval.generate else 0
        needed = max(len(question.whole.input_ids), len(question.prompt.input_ids) + room)
        if needed > self._longest:
            raise RowError(f"{needed} tokens with the answer; allowed: at most {self._longest}")


@lru_cache(maxsize=KEPT_FRAGMENTS)
def rows_of(fragment: Fragment) -> list[Row]:
    """The rows of a fragment; kept, since most often the next sample is of the same one."""
    return read_rows(fragment)


def load_model(path: str, dtype: torch.dtype, device: torch.device) -> Any:
    """The model of a folder, by transformers alone. Nothing is fetched and no code in it is run.

    Raises:
        RunError: its weights are not those of its configuration.
    """
    quieten()
    try:
        loaded: Any = AutoModelForImageTextToText.from_pretrained(
            path, dtype=dtype, local_files_only=True, trust_remote_code=False, use_safetensors=True,
            output_loading_info=True)
    except Exception as error:  # transformers' checks of files and values raise errors of many kinds
        raise RunError(f"model.path: {path} does not load: {first_line(error)}") from None
    module, report = loaded
    if missing := sorted(report["missing_keys"]):
        raise RunError(f"model.path: {path} lacks {len(missing)} weights of its model, such as {missing[0]}")
    return module.eval().to(device)


def media_in(question: Question, processor: Processor) -> list[Medium]:
    """The images and videos of a question, decoded, each whole. Raises whatever decoders raise on foreign bytes."""
    whole = question.whole
    row = {"media": whole.media, "seconds": whole.seconds, "grids": whole.grids, "images": question.images}
    patches = [part for decode in decodings(row, [True] * len(whole.grids), processor) for part in decode()]
    pieces = zip(whole.media, patches, whole.grids, whole.seconds, strict=True)
    found = []
    for _, group in groupby(pieces, key=lambda piece: piece[0]):
        _, parts, grids, seconds = zip(*group)
        grid = (sum(time for time, _, _ in grids), *grids[0][1:])
        found.append(Medium(np.concatenate(parts), grid, seconds[0]))
    return found
