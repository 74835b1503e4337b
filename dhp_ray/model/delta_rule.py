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

All that takes ten times the memory of q, k and v. So a run of chunks (`pieces.py`) keeps what it is given alone, its
tokens and the states before it. The backward pass takes the runs from the last to the first and computes the chunks of
each again, of one run at a time. What was exchanged is kept. If the layer itself is recomputed, a run may keep what it
gave (`recomputation.py`): the layer's second run then computes no chunk.

On CUDA, flash-linear-attention computes a run where it can: all its pieces at once, in bf16 with states in fp32. To it
M is K further columns of the state, which are one at the start, and of values that are 0:

    [E | M] = state at the end of a piece, from [0 | 1] at its start and [v | 0] for each token's v
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from itertools import accumulate, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from dhp_ray.comm.pack_communicator import PackCommunicator, Tag
from dhp_ray.model.kernels import cuda
from dhp_ray.model.pieces import Counts, Pieces
from dhp_ray.model.recomputation import attention_once
from dhp_ray.planner.memory.model import STATE_CHUNK as CHUNK

EPSILON = 1e-6  # of the norm of queries and keys


class Group(NamedTuple):
    """A group of pieces (`pieces.py`), and of each of its runs the queries, keys, values, decays and betas, (C, T, ...)
    for C chunks.
    """

    runs: tuple[Counts, ...]
    inputs: list[tuple[Tensor, ...]]

    @property
    def num_pieces(self) -> int:
        return self.runs[0][0]


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
    whole, first, middle, last = _groups((q, k, v, g, beta), pieces)
    wide, num_heads, num_keys = torch.promote_types(v.dtype, torch.float32), v.shape[1], k.shape[2]
    zeros = v.new_zeros(num_heads, num_keys, v.shape[2], dtype=wide)
    outputs = [out for group in whole for out in _scan(group, zeros.expand(group.num_pieces, -1, -1, -1))[0]]
    if pieces.exchanges_states:
        one = torch.eye(num_keys, dtype=wide, device=v.device).expand(num_heads, -1, -1)
        zeros_and_one = torch.cat((zeros, one), 2)
        told = [zeros_and_one.new_empty(0, *zeros_and_one.shape)]
        for group in first:
            found, added = _scan(group, zeros.expand(group.num_pieces, -1, -1, -1))
            outputs += found
            told.append(F.pad(added, (0, num_keys)))
        told += [_scan(group, zeros_and_one.expand(group.num_pieces, -1, -1, -1), False)[1] for group in middle]
        sent = torch.cat(told)
        anchor = torch.zeros((), requires_grad=True) if differentiable and not sent.requires_grad else None
        assert link is not None
        states: Tensor = _PassStates.apply(sent, anchor, v.shape[2], pieces, link)
        receiving = [*middle, *last]
        for group, before in zip(receiving, states.split([group.num_pieces for group in receiving])):
            outputs += _scan(group, before)[0]
        # also without a piece that receives one, so that the backward pass of the exchange runs on all members
        outputs.append(states[:0, :, :1].transpose(1, 2).expand(-1, CHUNK, -1, -1).to(v.dtype))
    return torch.cat(outputs).flatten(0, 1).index_select(0, pieces.token_places)


def _groups(inputs: Sequence[Tensor], pieces: Pieces) -> list[list[Group]]:
    """The groups of each kind of pieces, with their tokens of all inputs (L, ...)."""
    sizes = [sum(counts) for groups in pieces.runs for runs in groups for counts in runs]
    chunked = []
    for rows in inputs:
        padded = torch.cat((rows.new_zeros(1, *rows.shape[1:]), rows))
        chunked.append(padded.index_select(0, pieces.chunk_rows.flatten()).unflatten(0, (-1, CHUNK)).split(sizes))
    of_runs = zip(*chunked)
    return [[Group(runs, list(islice(of_runs, len(runs)))) for runs in groups] for groups in pieces.runs]


def _scan(group: Group, states: Tensor, reads: bool = True) -> tuple[list[Tensor], Tensor]:
    """The outputs (C, T, H, values) of a group's runs, if they are wanted, and the states after its pieces, (pieces, H,
    keys, values), from those before them.
    """
    outputs, ended = list[Tensor](), list[Tensor]()
    for counts, inputs in zip(group.runs, group.inputs):
        states = _end(states, counts[0], ended)
        states, *found = _Run.apply(counts, reads, *inputs, states)
        outputs += found
    return outputs, torch.cat((states, *reversed(ended)))


class _Run(torch.autograd.Function):
    """`_run`, which for its backward pass keeps what it is given alone."""

    @staticmethod
    def forward(ctx: Any, counts: Counts, reads: bool, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*inputs)
        ctx.counts, ctx.reads = counts, reads
        return attention_once(partial(_run, counts, reads, *inputs))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        wanted = ctx.needs_input_grad[2:]
        inputs = [tensor.detach().requires_grad_(wants) for tensor, wants in zip(ctx.saved_tensors, wanted)]
        with torch.enable_grad():
            found = _run(ctx.counts, ctx.reads, *inputs)
        of_inputs = iter(torch.autograd.grad(found, [tensor for tensor in inputs if tensor.requires_grad], gradients,
                                             materialize_grads=True))
        return None, None, *(next(of_inputs) if wants else None for wants in wanted)


def _run(
    counts: Counts, reads: bool, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: Tensor
) -> tuple[Tensor, ...]:
    """The states after a run, and its outputs if they are wanted."""
    if _kernel_computes(v):
        return _run_of_kernel(counts, reads, q, k, v, g, beta, states)
    chunks, outputs, ended = _chunks(q, k, v, g, beta), list[Tensor](), list[Tensor]()
    if states.shape[3] > v.shape[3]:
        chunks = chunks._replace(stored=F.pad(chunks.stored, (0, states.shape[3] - v.shape[3])))
    for here in chunks.split(counts):
        states = _end(states, len(here.stored), ended)
        new = here.stored - here.read @ states
        if reads:
            outputs.append(here.queries @ states + here.scores @ new)
        states = here.decay * states + here.keys.transpose(2, 3) @ new
    found = [torch.cat(outputs).transpose(1, 2).to(v.dtype)] if reads else []
    return torch.cat((states, *reversed(ended))), *found


def _kernel_computes(v: Tensor) -> bool:
    """Not in a deterministic run: its block sizes, and with them the order of sums, are those that ran fastest."""
    return (v.is_cuda and v.dtype == torch.bfloat16 and cuda.has_gated_delta_rule()
            and not torch.are_deterministic_algorithms_enabled())


def _run_of_kernel(
    counts: Counts, reads: bool, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: Tensor
) -> tuple[Tensor, ...]:
    order, places, offsets, chunks = _by_piece(counts, v.device)
    v = F.pad(v, (0, states.shape[3] - v.shape[3]))
    q, k, v, g, beta = (rows.index_select(0, order).flatten(0, 1) for rows in (q, k, v, g, beta))
    out, after = cuda.gated_delta_rule(q, k, v, g, beta, states, offsets, chunks)
    return after, *([out.unflatten(0, (-1, CHUNK)).index_select(0, places)] if reads else [])


@cache  # of at most as many as there are ways to write RUN_CHUNKS or less as a sum
def _by_piece(counts: Counts, device: torch.device) -> list[Tensor]:
    """Of a run's chunks, which lie step by step: their order piece by piece, and their places in it, (C,); the token at
    which each piece then begins, and the last one ends, (pieces + 1,); and of each chunk its piece and step, (C, 2).
    """
    starts = (0, *accumulate(counts))
    chunks = sorted((piece, step) for step, count in enumerate(counts) for piece in range(count))
    order = [starts[step] + piece for piece, step in chunks]
    places = sorted(range(len(order)), key=order.__getitem__)
    offsets = [0, *accumulate(CHUNK * sum(count > piece for count in counts) for piece in range(counts[0]))]
    return [torch.tensor(rows).to(device, non_blocking=True) for rows in (order, places, offsets, chunks)]


def _end(states: Tensor, count: int, ended: list[Tensor]) -> Tensor:
    """The first `count` states; the others, of pieces that have no further chunk, go to `ended`."""
    if count == len(states):
        return states
    states, others = states.split([count, len(states) - count])
    ended.append(others)
    return states


def _chunks(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Chunks:
    wide, repeats = torch.promote_types(v.dtype, torch.float32), v.shape[2] // k.shape[2]
    queries, keys = (_normed(rows.to(wide)).repeat_interleave(repeats, 2).transpose(1, 2) for rows in (q, k))
    values, logs, betas = (rows.to(wide).transpose(1, 2) for rows in (v, g, beta[..., None]))
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
    stored, read = solved.split((v.shape[3], k.shape[3]), 3)
    queries = queries * k.shape[3] ** -0.5
    return Chunks(stored, read, queries @ keys.transpose(2, 3) * between, queries * since_start,
                  keys * between[..., -1, :, None], since_start[..., -1:, :])


def _normed(rows: Tensor) -> Tensor:
    return rows * torch.rsqrt(rows.square().sum(-1, keepdim=True) + EPSILON)


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
