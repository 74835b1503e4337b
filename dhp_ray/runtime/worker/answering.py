"""Answers that the ranks of a run generate to held-out prompts, as text."""

from __future__ import annotations

from collections.abc import Sequence

from dhp_ray.data.processor import Processor
from dhp_ray.model.adapter import ModelAdapter
from dhp_ray.runtime.worker.rank import Rank
from dhp_ray.train.greedy import greedy_answers
from dhp_ray.train.step_inputs import StepInputs


def answers(rank: Rank, inputs: StepInputs, sample_ids: Sequence[str], processor: Processor) -> list[str]:
    """Return the answer text of each of `sample_ids`, the samples of all ranks. Every rank calls this and returns the
    same.
    """
    filler = processor.token_ids["pad"]
    found = greedy_answers(rank.stepper, inputs, sample_ids, rank.config.eval.max_new_tokens,
                           end_ids_of(rank.adapter, processor), filler)
    return [processor.tokenizer.decode(tokens, skip_special_tokens=True) for tokens in found]


def end_ids_of(adapter: ModelAdapter, processor: Processor) -> list[int]:
    """Return the tokens that end an answer: as in generation_config.json, else the processor's token at the end of a
    turn.
    """
    named = getattr(adapter.module.generation_config, "eos_token_id", None)
    if named is None:
        return [processor.token_ids["eos"]]
    return list(named) if isinstance(named, (list, tuple)) else [int(named)]
