"""The gated delta rule over pieces of sequences, beside its definition, token by token.

flash-linear-attention's kernel runs on CUDA alone. Here it is in plain torch, by its definition and behind its own
signature (tests/contracts); on a CUDA device where it is installed its own is compared.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from functools import cache
from importlib.util import find_spec
from itertools import accumulate, pairwise, product
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dhp_ray.comm.device import CPU
from dhp_ray.comm.transport import Transport
from dhp_ray.model import delta_rule
from dhp_ray.model.delta_rule import CHUNK, gated_delta_rule
from dhp_ray.model.kernels import cuda
from dhp_ray.model.layout import PackLayout, zigzag, zigzag_of_all
from dhp_ray.model.pieces import pieces_of
from tests.contracts.fla_operators import fla_ops
from tests.ranks import run_ranks

TIMEOUT = timedelta(seconds=60)
PACKS: tuple[tuple[int, ...], ...] = ((200,), (1,), (3, 2, 1), (70, 2, 129, 64, 1, 65), (450, 11))
LONG = (2300, 130)
"""On two ranks, and on one, of several runs."""
HEADS, KEY_HEADS, KEYS, VALUES = 4, 2, 6, 5


def inputs_of(lengths: tuple[int, ...]) -> list[Tensor]:
    """Queries, keys, values, decays and betas of a pack, in fp64, with gradients, and the gradient of the outputs."""
    generator, total = torch.Generator().manual_seed(sum(lengths)), sum(lengths)

    def draw(*shape: int) -> Tensor:
        return torch.randn(total, *shape, generator=generator, dtype=torch.float64)

    found = [draw(KEY_HEADS, KEYS), draw(KEY_HEADS, KEYS), draw(HEADS, VALUES),
             -torch.nn.functional.softplus(draw(HEADS)), draw(HEADS).sigmoid()]
    return [*(tensor.requires_grad_() for tensor in found), draw(HEADS, VALUES)]


def one_by_one(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """The outputs of one sequence, by the definition."""
    q, k = ((x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)).repeat_interleave(HEADS // KEY_HEADS, 1)
            for x in (q, k))
    state, outputs = v.new_zeros(HEADS, KEYS, VALUES), []
    for query, key, value, decay, share in zip(q * KEYS ** -0.5, k, v, g, beta):
        state = state * decay.exp()[:, None, None]
        seen = torch.einsum("hkv,hk->hv", state, key)
        state = state + torch.einsum("hk,hv->hkv", key, share[:, None] * (value - seen))
        outputs.append(torch.einsum("hkv,hk->hv", state, query))
    return torch.stack(outputs)


@cache
def reference(lengths: tuple[int, ...]) -> list[Tensor]:
    """The outputs of a pack and the gradients of its inputs, sequence by sequence."""
    *inputs, gradient = inputs_of(lengths)
    bounds = (0, *accumulate(lengths))
    out = torch.cat([one_by_one(*(tensor[first:last] for tensor in inputs)) for first, last in pairwise(bounds)])
    return [out.detach(), *torch.autograd.grad(out, inputs, gradient)]


def worst_error(layout: PackLayout, member: int, link: object, wanted: list[Tensor]) -> float:
    """The largest difference of a member's outputs and gradients from the reference's."""
    index = layout.index(member)
    *inputs, gradient = (tensor.detach()[index] for tensor in inputs_of(layout.lengths))
    mine = [tensor.requires_grad_() for tensor in inputs]
    if not len(index):
        mine = [tensor.new_zeros(1, *tensor.shape[1:]).requires_grad_() for tensor in mine]
    out = gated_delta_rule(*mine, pieces_of(layout, member, 3), link)  # type: ignore[arg-type]
    if not len(index):
        return 0.0
    found = [out.detach()]
    out.backward(gradient)
    found += [tensor.grad for tensor in mine if tensor.grad is not None]
    return max(float((here - whole[index]).abs().max()) for here, whole in zip(found, wanted))


def take_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of flash-linear-attention, in plain torch, where `import` finds it."""
    for name, module in (("fla", ModuleType("fla")), ("fla.ops", ModuleType("fla.ops")),
                         ("fla.ops.gated_delta_rule", fla_ops())):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(delta_rule, "_kernel_computes", lambda v: True)


def all_packs(
    rank: int, transport_name: str, packs: dict[tuple[int, ...], list[Tensor]], by_kernel: bool = False
) -> list[float]:
    if by_kernel:
        take_kernel(pytest.MonkeyPatch())
    world = dist.get_world_size()
    transport = Transport(transport_name, rank, world, CPU, 4, TIMEOUT)
    ranks = tuple((place + 1) % world for place in range(world))
    transport.prepare([ranks])
    errors = []
    for number, (lengths, intervals) in enumerate(product(packs, (zigzag, zigzag_of_all))):
        link = transport.link(ranks, number)
        layout = PackLayout(lengths, world, intervals(lengths, world))
        errors.append(worst_error(layout, link.index, link, packs[lengths]))
    transport.close()
    return errors


@pytest.mark.parametrize("lengths", [*PACKS, LONG])
def test_one_rank_computes_the_definition(lengths: tuple[int, ...]) -> None:
    assert worst_error(PackLayout(lengths, 1), 0, None, reference(lengths)) < 1e-9


@pytest.mark.parametrize("degree", [2, 5, *(pytest.param(degree, marks=pytest.mark.slow) for degree in (3, 4, 6, 7))])
def test_any_degree_computes_the_definition(degree: int) -> None:
    packs = {lengths: reference(lengths) for lengths in ((*PACKS, LONG) if degree == 2 else PACKS)}
    errors = torch.tensor(run_ranks(all_packs, degree, "parent", packs))
    assert errors.max() < 1e-9, errors


def test_runs_are_of_neighbouring_pieces_and_successive_chunks() -> None:
    """Of 21, 20 and 1 chunks; and of one chunk each."""
    long, short = ((4, 2, 2, 2, 2, 2, 2), (2,) * 8, (2, 2, 2, 2, 2, 1)), (((16,),), ((2,),))
    assert pieces_of(PackLayout((1290, 1, 1280, 64), 1), 0, 3).runs == ((long,), (), (), ())
    assert pieces_of(PackLayout((64, 7) * 9, 1), 0, 3).runs == (short, (), (), ())


@pytest.mark.parametrize("lengths", [(2048,), (512,) * 4, (64,) * 32])
def test_the_backward_pass_keeps_the_inputs_and_a_state_a_run(lengths: tuple[int, ...]) -> None:
    *inputs, _ = inputs_of(lengths)
    kept = dict[int, int]()

    def note(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    pieces = pieces_of(PackLayout(lengths, 1), 0, 3)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        out = gated_delta_rule(*inputs, pieces)
    assert out.requires_grad
    states = sum(counts[0] for group in pieces.runs[0] for counts in group[1:]) * HEADS * KEYS * VALUES * 8
    rows = pieces.chunk_rows.nbytes + pieces.token_places.nbytes + HEADS * KEYS * VALUES * 8
    assert sum(kept.values()) <= sum(tensor.nbytes for tensor in inputs) + states + rows


def test_bf16_is_computed_in_fp32() -> None:
    lengths = (200, 3)
    *inputs, _ = inputs_of(lengths)
    narrow = [tensor.detach().bfloat16() for tensor in inputs]
    out = gated_delta_rule(*narrow, pieces_of(PackLayout(lengths, 1), 0, 3))
    wide = gated_delta_rule(*(tensor.float() for tensor in narrow), pieces_of(PackLayout(lengths, 1), 0, 3))
    assert torch.equal(out, wide.bfloat16())
    assert float((out - reference(lengths)[0]).abs().max()) < 2e-2


def without_gradients(rank: int) -> float:
    """An evaluation: nobody's backward pass runs."""
    lengths = (130, 9)
    wanted = reference(lengths)[0]
    transport = Transport("parent", rank, 2, CPU, 0, TIMEOUT)
    link, layout = transport.link((0, 1), 0), PackLayout(lengths, 2)
    index = layout.index(link.index)
    mine = (tensor.detach()[index] for tensor in inputs_of(lengths)[:-1])
    out = gated_delta_rule(*mine, pieces_of(layout, link.index, 3), link, differentiable=False)
    assert not out.requires_grad
    return float((out - wanted[index]).abs().max())


def test_an_evaluation_has_no_backward_pass() -> None:
    assert max(run_ranks(without_gradients, 2)) < 1e-9


def bytes_sent(rank: int, length: int) -> int:
    """By a member, for the states of one sequence, forward and backward."""
    transport = Transport("parent", rank, 3, CPU, 0, TIMEOUT)
    link, layout, total = transport.link((0, 1, 2), 0), PackLayout((length,), 3), 0
    exchange = link.exchange

    def counted(sends: list[tuple[Tensor, int]], *others: object) -> object:
        nonlocal total
        total += sum(tensor.nbytes for tensor, _ in sends)
        return exchange(sends, *others)  # type: ignore[arg-type]

    link.exchange = counted  # type: ignore
    index = layout.index(link.index)
    *inputs, gradient = (tensor.detach()[index] for tensor in inputs_of(layout.lengths))
    gated_delta_rule(*(tensor.requires_grad_() for tensor in inputs), pieces_of(layout, link.index, 3),
                     link).backward(gradient)
    return total


def test_bytes_exchanged_do_not_depend_on_the_length() -> None:
    """Of five pieces in zigzag four send a state, with what multiplies it, and four have the gradient of one."""
    state = HEADS * KEYS * VALUES * 8
    to_both_others = 2 * 4 * (state * (VALUES + KEYS) // VALUES + state)
    assert [sum(run_ranks(bytes_sent, 3, length)) for length in (300, 3000)] == [to_both_others] * 2


@pytest.mark.parametrize("lengths", [PACKS[0], PACKS[3], (1100, 130, 70)])
def test_the_kernel_computes_the_definition_on_one_rank(
    monkeypatch: pytest.MonkeyPatch, lengths: tuple[int, ...]
) -> None:
    take_kernel(monkeypatch)
    assert worst_error(PackLayout(lengths, 1), 0, None, reference(lengths)) < 1e-9


@pytest.mark.parametrize("degree", [2, *(pytest.param(degree, marks=pytest.mark.slow) for degree in (3, 5))])
def test_the_kernel_computes_the_definition_at_any_degree(degree: int) -> None:
    packs = {lengths: reference(lengths) for lengths in PACKS[2:4]}
    errors = torch.tensor(run_ranks(all_packs, degree, "parent", packs, True))
    assert errors.max() < 1e-9, errors


def run_and_gradients(counts: tuple[int, ...], told: bool, inputs: list[Tensor]) -> list[Tensor]:
    """A run's states and, unless it tells what it adds, outputs; and the gradients of all that it is given."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    found = delta_rule._run(counts, not told, *leaves)  # type: ignore[arg-type]
    slopes = [torch.linspace(-1, 2, each.numel(), device=each.device).view_as(each).to(each.dtype) for each in found]
    return [*(each.detach() for each in found), *torch.autograd.grad(found, leaves, slopes, materialize_grads=True)]


@pytest.mark.parametrize("told", [False, True], ids=["outputs", "told"])
@pytest.mark.parametrize("counts", [(3, 2, 2, 1), (1,) * 5, (4,)], ids=str)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[
    pytest.mark.gpu, pytest.mark.skipif(not find_spec("fla"), reason="needs flash-linear-attention")])])
def test_a_run_of_the_kernel_is_that_of_products(
    monkeypatch: pytest.MonkeyPatch, device: str, counts: tuple[int, ...], told: bool
) -> None:
    """In fp64, or on a device in bf16 against fp64. `told`: what pieces add to a state and multiply it with."""
    generator = torch.Generator().manual_seed(0)
    keys, values = (KEYS, VALUES) if device == "cpu" else (128, 128)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device)

    shape = (sum(counts), CHUNK)
    states: Any = draw(counts[0], HEADS, keys, values)
    if told:
        states = torch.cat((torch.zeros_like(states), torch.eye(keys).to(states).expand(counts[0], HEADS, -1, -1)), 3)
    inputs = [draw(*shape, KEY_HEADS, keys), draw(*shape, KEY_HEADS, keys), draw(*shape, HEADS, values),
              -torch.nn.functional.softplus(draw(*shape, HEADS)) / 8, draw(*shape, HEADS).sigmoid(), states]
    if device == "cuda":
        assert cuda.has_gated_delta_rule(), "a device that it runs on"
        types = (*(torch.bfloat16,) * 3, torch.float32, torch.bfloat16, torch.float32)
        inputs = [tensor.to(dtype) for tensor, dtype in zip(inputs, types)]
    wanted = run_and_gradients(counts, told, [tensor.double() for tensor in inputs])
    if device == "cpu":
        take_kernel(monkeypatch)
    found = run_and_gradients(counts, told, inputs)
    for here, there in zip(found, wanted, strict=True):
        assert float((here - there).norm()) <= (1e-9 if device == "cpu" else 2e-2) * float(there.norm())
