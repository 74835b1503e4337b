"""Greedy answers from the ranks' own passes over packs, for any degrees and any sharding of parameters; keys and values
are not kept.

A sequence is planned with room for its answer. Attention is causal, so a pass over it finds at each position the token
that follows the tokens up to it:

    tokens       p p p p g g g g      prompt, and a guess of the answer
    found              a b c d        at the prompt's last token, and at each of the answer but the last

The tokens that one pass finds are the guess for the next (Jacobi decoding, arXiv 2305.10427): after k passes the first
k tokens are those of greedy decoding, and all are once a pass changes nothing. Every pass encodes the images of the
prompts again. Every rank has the table of all answers, so that all ranks run equally many passes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dhp_ray.comm.ranks import sums_of_counts
from dhp_ray.planner.plan.types import Pack
from dhp_ray.train.collate import PackInputs
from dhp_ray.train.rank_step import RankStep
from dhp_ray.train.step_inputs import StepInputs


@dataclass(frozen=True)
class AnswerPlaces:
    """How a rank's tokens of a pack map to the table of answers (N, M): `found` (2, K), row and column of what its K
    valid tokens predict; `written` (2, W), row and column of its W answer tokens, whose local positions are `tokens`
    (W,).
    """

    found: Tensor
    written: Tensor
    tokens: Tensor


def greedy_answers(
    step: RankStep, inputs: StepInputs, sample_ids: Sequence[str], num_tokens: int, end_ids: Sequence[int], filler: int
) -> list[list[int]]:
    """Return the token ids of the answers to `sample_ids`, the samples of all ranks, up to the first of `end_ids` and
    without it, at most `num_tokens` each. Every rank calls this and returns the same.

    Every sequence ends with `num_tokens` fillers, whose labels are the only ones that count. The answer to a
    placeholder means nothing.
    """
    rows = {name: row for row, name in enumerate(sample_ids)}
    places = [answer_places(pack, own, rows, num_tokens) for pack, own in zip(inputs.packs, inputs.inputs, strict=True)]
    guess, progress = torch.full((len(rows), num_tokens), filler), step.engine.progress
    for _ in range(num_tokens):
        guessed = [replace(own, predicts=True, token_ids=own.token_ids.index_copy(0, place.tokens,
                                                                                  guess[tuple(place.written)]))
                   for own, place in zip(inputs.inputs, places)]
        table = torch.zeros_like(guess)
        for place, predicted in zip(places, step.predictions(replace(inputs, inputs=guessed))):
            table[tuple(place.found)] = torch.tensor(progress.read(predicted), dtype=torch.int64)
        summed = sums_of_counts(table.flatten().tolist(), step.world, progress)
        table = torch.tensor(summed, dtype=torch.int64).view_as(guess)
        ends = torch.isin(table, torch.tensor(end_ids, dtype=torch.int64))
        table[ends.cumsum(1) - ends.long() > 0] = filler  # after the end, where tokens would go on changing
        if torch.equal(table, guess):
            break
        guess = table
    return [answer[:next((place for place, token in enumerate(answer) if token in end_ids), None)]
            for answer in guess.tolist()]


def answer_places(pack: Pack, inputs: PackInputs, rows: Mapping[str, int], num_tokens: int) -> AnswerPlaces:
    """Return the places of a pack whose sequences end with `num_tokens` answer tokens each; none for an idle pack."""
    if pack.index < 0:
        nowhere = torch.empty(2, 0, dtype=torch.int64)
        return AnswerPlaces(nowhere, nowhere, nowhere[0])
    mine = inputs.layout.index(inputs.member)
    stops = torch.tensor([sample.num_tokens for sample in pack.samples]).cumsum(0)
    sequence = torch.searchsorted(stops, mine, right=True)
    columns = mine - stops[sequence] + num_tokens  # below 0: of the prompt
    places = torch.stack([torch.tensor([rows[sample.id] for sample in pack.samples])[sequence], columns])
    tokens = (columns >= 0).nonzero()[:, 0]
    following = places[:, inputs.valid_index]
    following[1] += 1
    return AnswerPlaces(following, places[:, tokens], tokens)
