"""An evaluation worker: it loads the model with transformers, whole or a shard of it, and answers one sample at a time.

    whole     from_pretrained
    parts     each layer of the language model is gathered (FSDP2) when it is used and freed afterwards; encoder,
              embedding and head stay whole once they have been used
"""

from __future__ import annotations

from datetime import timedelta
from functools import cached_property, lru_cache
from itertools import groupby
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from dhp_ray.comm.device import choose
from dhp_ray.comm.world import init_world
from dhp_ray.data.errors import RowError
from dhp_ray.data.evaluation import Question, read_question
from dhp_ray.data.families.base import Medium
from dhp_ray.data.formats import read_rows
from dhp_ray.data.formats.rows import Row
from dhp_ray.data.fragments import Fragment
from dhp_ray.data.processor import IGNORE, Encoded, Processor, ProcessorSpec
from dhp_ray.data.reader import bad_row_reason
from dhp_ray.errors import first_line
from dhp_ray.model.build import quieten, read_config, without_weights
from dhp_ray.model.families import FAMILIES
from dhp_ray.model.files import weight_files
from dhp_ray.runtime.evaluate.predictions import Answer
from dhp_ray.runtime.messages import RunError
from dhp_ray.runtime.worker.prefetch import decodings
from dhp_ray.schema import Evaluation
from dhp_ray.train.sharded_engine import first_element, narrow_frozen, read_shards

KEPT_FRAGMENTS = 2
NOTHING = Encoded(np.zeros(2, np.int32), np.full(2, IGNORE, np.int32), (), 0, (), ())  # tokens without a valid label


class Evaluator:
    """A Ray actor that holds the model of `model.path`, in fp32 on the CPU, else bf16. Actors that `join` a group each
    hold a shard of every layer and run in lockstep; those without a sample take part in the others' passes.
    """

    def __init__(self, config: Evaluation, image_root: str) -> None:
        self.config, self.image_root = config, image_root
        self.group: dist.ProcessGroup | None = None

    def join(self, number: int, rank: int, store: tuple[str, int]) -> None:
        """Become one of the `eval.ranks_per_model` ranks of group `number`, which meet at `store`."""
        accelerator, timeout = choose(self.config.cluster.device), timedelta(seconds=self.config.comm.timeout_s)
        assert self.device
        init_world(dist.TCPStore(*store, is_master=False, timeout=timeout), number, rank,
                   self.config.eval.ranks_per_model, accelerator, timeout)
        self.group = dist.group.WORLD

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
        if self.group is not None:
            return load_part(self.config.model.path, dtype, self.device, self.group)
        return load_model(self.config.model.path, dtype, self.device)

    def load(self) -> None:
        torch.set_num_threads(max(1, int(self.config.cluster.cpus_per_worker)))
        assert self.processor
        assert self.module

    def answer(self, number: int, fragment: Fragment, offset: int) -> Answer:
        """Evaluate row `offset` of a fragment, sample `number` of the file; the answer may be why it cannot be used."""
        self.load()
        try:
            row = rows_of(fragment, self.processor.family.limits.max_file_bytes)[offset]
        except Exception as error:  # the file is gone or damaged, and readers raise errors of many kinds
            return self._left_out(number, f"{fragment.path}:{fragment.first_row + offset + 1}", bad_row_reason(error))
        try:
            question = read_question(row, self.processor, self.image_root)
            self._check_length(question)
            media = media_in(question, self.processor)
        except Exception as error:  # foreign rows and images fail in ways that cannot be listed
            return self._left_out(number, row.id, bad_row_reason(error))
        try:
            loss_sum, count = self.loss(question.whole, media)
            prediction = self.generate(question.prompt, media) if self.config.eval.generate else None
        except torch.OutOfMemoryError as error:
            said = f"{len(question.whole.input_ids)} tokens: {first_line(error)}"
            if self.group is not None:  # the others wait in the middle of a pass
                raise RunError(f"eval.path: sample {row.id}: {said}") from None
            return Answer(number, row.id, said)
        return Answer(number, row.id, "", question.prompt_text, question.references, prediction, loss_sum, count)

    def take_part(self) -> None:
        """Take part in the passes of the other ranks of the group, without a sample."""
        self.load()
        if self.group is None:
            return
        self.loss(NOTHING, [])
        if self.config.eval.generate:
            self.generate(NOTHING, [])

    def _left_out(self, number: int, name: str, reason: str) -> Answer:
        self.take_part()
        return Answer(number, name, reason)

    @torch.no_grad()
    def loss(self, encoded: Encoded, media: list[Medium]) -> tuple[float, int]:
        """Return the cross entropy summed over the valid tokens of a sequence, in fp32, and their number."""
        labels = torch.from_numpy(encoded.labels[1:].astype(np.int64)).to(self.device)
        valid = (labels != IGNORE).nonzero()[:, 0]
        if not len(valid) and self.group is None:
            return 0.0, 0
        logits = self.module(**self._inputs(encoded, media), logits_to_keep=valid, use_cache=False).logits[0]
        return F.cross_entropy(logits.float(), labels[valid], reduction="sum").item(), len(valid)

    @torch.no_grad()
    def generate(self, prompt: Encoded, media: list[Medium]) -> str:
        """Return what the model's own `generate` produces with greedy decoding, up to the end of the turn."""
        inputs, named = self._inputs(prompt, media), self.module.generation_config.eos_token_id
        found = self.module.generate(**inputs, max_new_tokens=self.config.eval.max_new_tokens, do_sample=False,
                                     num_beams=1, temperature=None, top_p=None, top_k=None,
                                     eos_token_id=self.processor.end_ids(named), synced_gpus=self.group is not None)
        return self.processor.text_of(found[0, inputs["input_ids"].shape[1]:].tolist())

    def _inputs(self, encoded: Encoded, media: list[Medium]) -> dict[str, Tensor]:
        """Return the transformers model's inputs for one sequence, to which the first entries of `media` belong."""
        shown, config = media[:len(set(encoded.media))], self.module.config
        ids, family = torch.from_numpy(encoded.input_ids.astype(np.int64)), FAMILIES[config.model_type]
        # with the positions of training, which differ from those of transformers behind a video
        positions = family.positions_of(config, ids, torch.tensor([medium.grid for medium in shown]).view(-1, 3),
                                        torch.tensor([medium.seconds for medium in shown]))
        inputs = {"input_ids": ids[None], "attention_mask": torch.ones_like(ids)[None],
                  "position_ids": family.position_ids(positions)}
        arrays = self.processor.family.model_inputs(shown)
        inputs |= {name: torch.from_numpy(array) for name, array in arrays.items()}
        return {name: values.to(self.device) for name, values in inputs.items()}

    @cached_property
    def _longest(self) -> int:
        """The most tokens with the answer: the model's positions, or `planner.max_sequence_tokens` if that is less."""
        limit = self.config.planner.max_sequence_tokens
        positions = int(self.module.config.get_text_config().max_position_embeddings)
        return min(limit, positions) if limit else positions

    def _check_length(self, question: Question) -> None:
        room = self.config.eval.max_new_tokens if self.config.eval.generate else 0
        needed = max(len(question.whole.input_ids), len(question.prompt.input_ids) + room)
        if needed > self._longest:
            raise RowError(f"{needed} tokens with the answer; allowed: at most {self._longest}")


@lru_cache(maxsize=KEPT_FRAGMENTS)
def rows_of(fragment: Fragment, max_bytes: int) -> list[Row]:
    """Return the rows of a fragment; cached, because the next sample is usually in the same fragment."""
    return list(read_rows(fragment, max_bytes=max_bytes))


def media_in(question: Question, processor: Processor) -> list[Medium]:
    """Return the decoded images and videos of a question, each whole. Raises what decoders raise on foreign bytes."""
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


def load_model(path: str, dtype: torch.dtype, device: torch.device) -> Any:
    """Load the model of a folder by transformers alone, without downloads or code of the folder. ModelError: it is no
    model, has no weights, or several sets of them. RunError: it does not load, or weights are missing.
    """
    weight_files(path)
    model_class = FAMILIES[read_config(path).model_type].model_class
    quieten()
    try:
        loaded: Any = model_class.from_pretrained(
            path, dtype=dtype, local_files_only=True, trust_remote_code=False, use_safetensors=True,
            output_loading_info=True)
    except Exception as error:  # transformers' checks of files and values raise errors of many kinds
        raise RunError(f"model.path: {path} does not load: {first_line(error)}") from None
    module, report = loaded
    if missing := sorted(report["missing_keys"]):
        raise RunError(f"model.path: {path} lacks {len(missing)} weights of its model, such as {missing[0]}")
    return module.eval().to(device)


def load_part(path: str, dtype: torch.dtype, device: torch.device, group: dist.ProcessGroup) -> Any:
    """Load the model of a folder; this rank of `group` reads only its own rows. All ranks of the group must call this,
    and then the model, in the same way.
    """
    quieten()
    model, weights = without_weights(path)
    module: Any = model.eval().requires_grad_(False)
    narrow_frozen(module, dtype)
    mesh = DeviceMesh.from_group(group, device.type)
    for layer in module.get_decoder().layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh, reshard_after_forward=False)
    read_shards(module, dict(module.named_parameters()), weights, device,
                lambda name, parameter: first_element(parameter, group.rank(), group.size()))
    return module
