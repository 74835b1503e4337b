"""The gated delta rule (arXiv 2412.06464) over sequences whose pieces are on several ranks.

A state S (keys x values) goes from token to token: it decays, forgets what it has stored under the token's key, as far
as beta says, and stores the token's value there:

    S <- e^g S        S <- S + beta k (v - k S)'        o = q S

A token changes the state by a linear map, so a piece of a sequence does too. What its tokens add to a state of zeros,
E, and what they multiply a state with, M, tell all of it: S_out = M S_in + E. So ranks compute E and M of their pieces
at the same time, tell them all others, and each folds the pieces before its own:

    pieces     0 (first)     1            2                 3 (last)
    S_in       0             E0           M1 E0 + E1        M2 (M1 E0 + E1) + E2
    backward   dS_out of a piece = dS_in of the next, by its tokens, + M_next' dS_out of the next

E and M are `heads x keys x (values + keys)` numbers, however long the piece is. In the backward pass dS_in travels from
the other end in the same way. (flash-linear-attention passes states alike; Megatron exchanges heads for tokens.)

Within a piece, chunks of CHUNK tokens are computed by products (section 3.3 of the paper). With the decay from token j
to a later one i of the chunk, D_ij = e^(g_j+1 + ... + g_i), and A_ij = beta_i k_i k_j' D_ij below the diagonal, tokens
store the values (1 + A)^-1 (beta V - beta e^G K S), for the state S at the chunk's start and e^G, the decay since.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dhp_ray.comm.pack_communicator import PackCommunicator, Tag
from dhp_ray.model.pieces import Pieces
from dhp_ray.planner.memory.model import STATE_CHUNK as CHUNK

EPSILON = 1e-6  # of the norm of queries and keys


class Chunks(NamedTuple):
    """What is the same for any state at a chunk's start: C chunks, each for H heads and T = CHUNK tokens.

    stored: (C, H, T, values), what tokens store if the state is zero; read: (C, H, T, keys), what of it the state takes
    away; scores: (C, H, T, T), of queries with keys; queries and keys: (C, H, T, keys), the queries decayed from the
    chunk's start, the keys to its end; decay: (C, H, 1, 1), of the whole chunk.
    """

    stored: Tensor
    read: Tensor
    scores: Tensor
    queries: Tensor
    keys: Tensor
    decay: Tensor

    def split(self, sizes: Sequence[int]) -> list[Chunks]:
        """So many chunks each. (Of slices, every one would have a gradient as large as the whole.)"""
        return [Chunks(*parts) for parts in zip(*(tensor.split(list(sizes)) for tensor in self))]


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, pieces: Pieces, link: PackCommunicator | None = None,
    differentiable: bool = True,
) -> Tensor:
    """The outputs (L, H, values) of a member's L tokens, in the type of v. All members of the pack must call this,
    forward and backward.

    q and k: (L, Hk, keys), before they are normed, with H a multiple of Hk; v: (L, H, values); g: (L, H), the logarithm
    of the decay, at most 0; beta: (L, H). differentiable: whether any member's backward pass runs through this.
    """
    chunks = _chunks(q, k, v, g, beta, pieces)
    whole, first, middle, last = chunks.split([sum(counts) for counts in pieces.with_chunk])
    of_whole, of_first, of_middle, of_last = pieces.with_chunk
    outputs, _ = _scan(whole, of_whole, _zeros(whole, of_whole))
    found = [outputs]
    if pieces.exchanges_states:
        outputs, added = _scan(first, of_first, _zeros(first, of_first))
        found.append(outputs)
        sent = torch.cat((torch.cat((added, added.new_zeros(*added.shape[:3], k.shape[2])), 3),
                          _transition(middle, of_middle)))
        anchor = torch.zeros((), requires_grad=True) if differentiable and not sent.requires_grad else None
        assert link is not None
        states: Tensor = _PassStates.apply(sent, anchor, v.shape[2], pieces, link)
        count = of_middle[0] if of_middle else 0
        found += [_scan(of_kind, counts, before)[0] for of_kind, counts, before in zip(
            (middle, last), (of_middle, of_last), states.split([count, len(states) - count]))]
    rows = torch.cat(found).transpose(1, 2).flatten(0, 1)
    return rows.index_select(0, pieces.token_places).to(v.dtype)


def _chunks(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, pieces: Pieces) -> Chunks:
    wide, repeats = torch.promote_types(v.dtype, torch.float32), v.shape[1] // k.shape[1]

    def chunked(rows: Tensor) -> Tensor:
        """(L, H, ...) as (C, H, T, ...), in fp32 or wider, zeros where there is no token."""
        padded = torch.cat((rows.new_zeros(1, *rows.shape[1:]), rows))
        found = padded.index_select(0, pieces.chunk_rows.flatten()).to(wide)
        return found.unflatten(0, (-1, CHUNK)).transpose(1, 2)

    queries, keys = (chunked(rows).repeat_interleave(repeats, 1) for rows in (_normed(q, wide), _normed(k, wide)))
    values, logs, betas = chunked(v), chunked(g), chunked(beta)[..., None]
    # sums of the tokens between alone: a difference of two sums since the chunk's start would lose digits. As products:
    # sums along a dimension are not deterministic on CUDA.
    until = torch.ones(CHUNK, CHUNK, dtype=wide, device=v.device).tril()
    not_after = until.t() > 0
    between = until @ logs[..., None].masked_fill(not_after, 0.0)
    between = between.masked_fill(not_after.triu(1), float("-inf")).exp()
    since_start = (until @ logs[..., None]).exp()
    system = (betas * keys) @ keys.transpose(2, 3) * between
    solved = torch.linalg.solve_triangular(
        system, torch.cat((betas * values, betas * since_start * keys), 3), upper=False, unitriangular=True)
    stored, read = solved.split((v.shape[2], k.shape[2]), 3)
    queries = queries * k.shape[2] ** -0.5
    return Chunks(stored, read, queries @ keys.transpose(2, 3) * between, queries * since_start,
                  keys * between[..., -1, :, None], since_start[..., -1:, :])


def _normed(rows: Tensor, wide: torch.dtype) -> Tensor:
    rows = rows.to(wide)
    return rows * torch.rsqrt(rows.square().sum(-1, keepdim=True) + EPSILON)


def _zeros(chunks: Chunks, with_chunk: tuple[int, ...]) -> Tensor:
    """States of zeros before the pieces of a kind: (pieces, H, keys, values)."""
    return chunks.stored.new_zeros(with_chunk[0] if with_chunk else 0, chunks.stored.shape[1], chunks.keys.shape[3],
                                   chunks.stored.shape[3])


def _scan(chunks: Chunks, with_chunk: tuple[int, ...], states: Tensor) -> tuple[Tensor, Tensor]:
    """The outputs (C, H, T, values) of the pieces of a kind, and the states after them, from those before them."""
    # also without a piece, the outputs depend on the states, so that their backward pass runs on all members
    outputs, ended = [chunks.queries[:0] @ states[:0]], list[Tensor]()
    for here in chunks.split(with_chunk):
        states = _end(states, len(here.stored), ended)
        new = here.stored - here.read @ states
        outputs.append(here.queries @ states + here.scores @ new)
        states = here.decay * states + here.keys.transpose(2, 3) @ new
    return torch.cat(outputs), torch.cat((states, *reversed(ended)))


def _transition(chunks: Chunks, with_chunk: tuple[int, ...]) -> Tensor:
    """What the pieces of a kind add to a state, and what they multiply it with: (pieces, H, keys, values + keys)."""
    states, num_keys = _zeros(chunks, with_chunk), chunks.keys.shape[3]
    one = torch.eye(num_keys, dtype=states.dtype, device=states.device).expand(*states.shape[:2], -1, -1)
    with_zeros = chunks._replace(stored=torch.nn.functional.pad(chunks.stored, (0, num_keys)))
    states, ended = torch.cat((states, one), 3), list[Tensor]()
    for here in with_zeros.split(with_chunk):
        states = _end(states, len(here.stored), ended)
        states = here.decay * states + here.keys.transpose(2, 3) @ (here.stored - here.read @ states)
    return torch.cat((states, *reversed(ended)))


def _end(states: Tensor, count: int, ended: list[Tensor]) -> Tensor:
    """The first `count` states; the others, of pieces that have no further chunk, go to `ended`."""
    if count == len(states):
        return states
    states, others = states.split([count, len(states) - count])
    ended.append(others)
    return states


class _PassStates(torch.autograd.Function):
    """What this member's pieces add to states and multiply them with, (sent, H, keys, values + keys) -> the states that
    it receives, (received, H, keys, values).
    """

    @staticmethod
    def forward(
        ctx: Any, sent: Tensor, anchor: Tensor | None, num_values: int, pieces: Pieces, link: PackCommunicator
    ) -> Tensor:
        # also to members that receive none: the backward pass needs what later pieces multiply with
        receivers = tuple(map(sum, zip(pieces.sent, pieces.received)))
        found = _gathered(sent.contiguous(), pieces.sent, receivers, pieces, link, Tag.STATES_FORWARD)
        received = sent.new_empty(pieces.received[pieces.member], *sent.shape[1:3], num_values)
        before = torch.zeros_like(sent[..., :num_values])  # the states before the pieces of which states are sent
        for chain in pieces.chains:
            state = None
            for place, here in enumerate(chain):
                if here.member == pieces.member and state is not None:
                    received[here.received] = state
                    if here.sent >= 0:
                        before[here.sent] = state
                if not any(later.member == pieces.member for later in chain[place + 1:]):
                    break
                added, factor = found[here.member][here.sent].split((num_values, sent.shape[2]), 2)
                state = added if state is None else added + factor @ state
        ctx.pieces, ctx.link = pieces, link
        # for the states that this member sends; without the rest of what was received
        kept = [each[..., num_values:].contiguous() for each in found] if len(sent) else []
        ctx.save_for_backward(before, *kept)
        return received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        before, *factors = ctx.saved_tensors
        pieces: Pieces = ctx.pieces
        found = _gathered(gradient.contiguous(), pieces.received, pieces.sent, pieces, ctx.link, Tag.STATES_BACKWARD)
        added = torch.zeros_like(before)  # gradients of the states that are sent
        for chain in pieces.chains:
            state = None
            for place, here in reversed(list(enumerate(chain))):
                if here.member == pieces.member and state is not None:
                    added[here.sent] = state
                if not any(earlier.member == pieces.member for earlier in chain[:place]):
                    break
                own = found[here.member][here.received]
                state = own if state is None else own + factors[here.member][here.sent].transpose(1, 2) @ state
        return torch.cat((added, added @ before.transpose(2, 3)), 3), None, None, None, None


def _gathered(
    mine: Tensor, counts: tuple[int, ...], receivers: tuple[int, ...], pieces: Pieces, link: PackCommunicator, tag: Tag
) -> list[Tensor]:
    """What every member has: `counts[member]` tensors like those of `mine` (counts[own], ...). They go to members whose
    entry in `receivers` is not 0; for others they are empty.
    """
    found = [mine if member == pieces.member else
             mine.new_empty(count * (receivers[pieces.member] > 0), *mine.shape[1:])
             for member, count in enumerate(counts)]
    link.exchange([(mine, member) for member, count in enumerate(receivers) if count and member != pieces.member],
                  [(each, member) for member, each in enumerate(found) if member != pieces.member], tag).wait()
    return found
