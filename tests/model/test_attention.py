"""Ring attention on real ranks against attention on one, written out from its definition."""

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dhp_ray.comm.device import CPU
from dhp_ray.comm.transport import Transport
from dhp_ray.model.attention import PackContext, register, ring_attention
from dhp_ray.model.layout import PackLayout, TokenInterval
from tests.ranks import run_ranks

HEADS, KEY_HEADS, WIDTH = 4, 2, 16
SCALE = 0.3
TIMEOUT = timedelta(seconds=30)
PACKS = [(70, 33, 1, 20), (3,), (1, 2, 1), (128,), (5, 64, 9, 17)]


def packed_inputs(lengths: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """q, k, v and the gradient of the output of the whole pack, the same on all ranks: (L, heads, width)."""
    generator = torch.Generator().manual_seed(sum(lengths))
    shapes = [(sum(lengths), heads, WIDTH) for heads in (HEADS, KEY_HEADS, KEY_HEADS, HEADS)]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def one_rank(lengths: tuple[int, ...], inputs: list[Tensor]) -> list[Tensor]:
    """Output and gradients of q, k, v by definition, in fp64: within each sequence."""
    q, k, v = (x.double().requires_grad_() for x in inputs[:3])
    outs = []
    for a, b, c in zip(q.split(lengths), k.split(lengths), v.split(lengths)):
        b, c = (x.repeat_interleave(HEADS // KEY_HEADS, 1) for x in (b, c))
        scores = SCALE * torch.einsum("qhd,khd->hqk", a, b)
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
        outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), c))
    out = torch.cat(outs)
    out.backward(inputs[3].double())
    return [out.detach(), *(x.grad for x in (q, k, v) if x.grad is not None)]


def run_pack(context: PackContext, recompute: bool = False, dtype: torch.dtype = torch.float32) -> float:
    """Largest error of this member's output and gradients, each relative to the largest value of its kind."""
    lengths, index = context.layout.lengths, context.layout.index(context.member)
    inputs = packed_inputs(lengths, dtype)
    expected = one_rank(lengths, inputs)
    # Twice the input, so that there is something before attention to recompute.
    leaves = [x[index].transpose(0, 1)[None].clone().requires_grad_() for x in inputs[:3]]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ring_attention(q * 2 / 2, k * 2 / 2, v * 2 / 2, SCALE, context) * 1

    out = checkpoint(attend, *leaves, use_reentrant=False) if recompute else attend(*leaves)
    assert out.shape == (1, len(index), HEADS, WIDTH)
    assert out.dtype == dtype
    out.backward(inputs[3][index][None])
    found = [out.detach()[0], *(x.grad[0].transpose(0, 1) for x in leaves if x.grad is not None)]
    assert len(found) == 4
    errors = [(mine.double() - whole[index]).abs().max() / whole.abs().max() for mine, whole in zip(found, expected)
              if len(index)]
    return max((float(error) for error in errors), default=0.0)


def ring_of_all_ranks(rank: int, transport_name: str, recompute: bool) -> list[float]:
    world = dist.get_world_size()
    transport = Transport(transport_name, rank, world, CPU, 4, TIMEOUT)
    ranks = tuple((place + 1) % world for place in range(world))  # ring order is the plan's, not the ranks' order
    transport.prepare([ranks])
    errors = []
    for pack_index, lengths in enumerate(PACKS):
        link = transport.link(ranks, pack_index)
        errors.append(run_pack(PackContext(PackLayout(lengths, world), link if world > 1 else None), recompute))
    transport.close()
    return errors


@pytest.mark.parametrize("degree", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("transport_name", ["pool", "parent"])
def test_ring_equals_one_rank(degree: int, transport_name: str) -> None:
    errors = torch.tensor(run_ranks(ring_of_all_ranks, degree, transport_name, False))
    assert errors.max() < 1e-5, errors


@pytest.mark.parametrize("degree", [1, 3])
def test_ring_recomputed_in_the_backward_equals_one_rank(degree: int) -> None:
    errors = torch.tensor(run_ranks(ring_of_all_ranks, degree, "pool", True))
    assert errors.max() < 1e-5, errors


def ring_in_bf16(rank: int) -> float:
    transport = Transport("parent", rank, 3, CPU, 0, TIMEOUT)
    return run_pack(PackContext(PackLayout((40, 9), 3), transport.link((0, 1, 2), 0)), dtype=torch.bfloat16)


def test_ring_in_bf16() -> None:
    assert max(run_ranks(ring_in_bf16, 3)) < 2e-2


def ring_over_other_layout(rank: int) -> float:
    """Nothing in the ring assumes chunks: whole blocks of tokens may go to any member, and see some keys more than
    once.
    """
    shards = ((TokenInterval(0, 4, 8), TokenInterval(0, 12, 31), TokenInterval(1, 0, 4)),
              (TokenInterval(0, 0, 2), TokenInterval(0, 8, 12), TokenInterval(1, 4, 5)),
              (TokenInterval(0, 2, 4),))
    assert PackLayout((31, 5), 3, shards).blocks(0, 1).keys == (slice(0, 2), slice(0, 6))
    transport = Transport("parent", rank, 3, CPU, 0, TIMEOUT)
    return run_pack(PackContext(PackLayout((31, 5), 3, shards), transport.link((2, 0, 1), 0)))


def test_ring_over_intervals_of_no_pattern() -> None:
    assert max(run_ranks(ring_over_other_layout, 3)) < 1e-5


WALKS = [((0, 1, 2), (90, 31)), ((3,), (12,)), ((1, 2), (40,)), ((0,), (25, 3)), ((2, 3), (51, 2)), ((0, 3), (18,)),
         ((3, 1), (2,)), ((0, 1, 2, 3), (64, 1))]


def walk_plan(rank: int, transport_name: str, capacity: int, num_steps: int) -> tuple[float, dict[str, int]]:
    """Each rank walks its own packs in plan order, at a pace of its own; nothing else keeps them in step."""
    transport = Transport(transport_name, rank, 4, CPU, capacity, TIMEOUT)
    worst = 0.0
    for step in range(num_steps):
        transport.prepare([ranks for ranks, _ in WALKS])
        for pack_index, (ranks, lengths) in enumerate(WALKS):
            if rank in ranks:
                time.sleep(0.02 * ((rank + pack_index + step) % 3))
                link = transport.link(ranks, pack_index) if len(ranks) > 1 else None
                worst = max(worst, run_pack(PackContext(PackLayout(lengths, len(ranks)), link),
                                            recompute=pack_index % 2 == 0))
    counters = transport.counters()
    transport.close()
    return worst, counters


@pytest.mark.parametrize(("transport_name", "capacity"), [("pool", 6), ("pool", 3), ("pool", 0), ("parent", 0)])
def test_free_running_ranks_share_overlapping_groups(transport_name: str, capacity: int) -> None:
    results = run_ranks(walk_plan, 4, transport_name, capacity, 2)
    assert max(error for error, _ in results) < 1e-5
    counters = results[0][1]
    assert all(other == counters for _, other in results)
    expected = {"hits": capacity, "creations": capacity, "evictions": 0, "overflows": 2 * (6 - capacity)}
    assert counters == (expected if transport_name == "pool" else {})


def one_member_requires_no_gradient(rank: int) -> float:
    """Only member 1's keys are trainable; the others' backward must run all the same, or member 1 waits for ever."""
    transport = Transport("parent", rank, 3, CPU, 0, TIMEOUT)
    context = PackContext(PackLayout((20,), 3), transport.link((0, 1, 2), 0))
    index = context.layout.index(rank)
    inputs = packed_inputs((20,))
    expected = one_rank((20,), inputs)[2]
    q, k, v = (x[index].transpose(0, 1)[None] for x in inputs[:3])
    k = k.clone().requires_grad_(rank == 1)
    ring_attention(q, k, v, SCALE, context).backward(inputs[3][index][None])
    return float((k.grad[0].transpose(0, 1) - expected[index]).abs().max()) if k.grad is not None else 0.0


def test_all_members_take_part_in_the_backward() -> None:
    errors = run_ranks(one_member_requires_no_gradient, 3)
    assert errors[1] > 0.0
    assert max(errors) < 1e-5


def test_a_gradient_without_memory_of_its_own() -> None:
    """The gradient of a sum is one number, expanded: kernels must not read it as if it were laid out."""
    inputs = packed_inputs((9, 4))
    context = PackContext(PackLayout((9, 4), 1))
    gradients = []
    for weight in (torch.ones(()).expand(1, 13, HEADS, WIDTH), torch.ones(1, 13, HEADS, WIDTH)):
        leaves = [x.transpose(0, 1)[None].clone().requires_grad_() for x in inputs[:3]]
        ring_attention(*leaves, SCALE, context).backward(weight)
        gradients.append(leaves[1].grad)
    assert torch.equal(*gradients)


def forward_without_gradient(rank: int) -> bool:
    transport = Transport("parent", rank, 2, CPU, 0, TIMEOUT)
    context = PackContext(PackLayout((9,), 2), transport.link((0, 1), 0), differentiable=False)
    q, k, v = (x[context.layout.index(rank)].transpose(0, 1)[None] for x in packed_inputs((9,))[:3])
    return ring_attention(q, k, v, SCALE, context).requires_grad


def test_a_pack_that_nobody_trains_has_no_backward() -> None:
    assert run_ranks(forward_without_gradient, 2) == [False, False]


def decoder_layers(rank: int, recompute: bool) -> list[float]:
    """transformers' own decoder, the pack passed by `context=`, against its sdpa attention on the whole sequences."""
    from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLTextConfig
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLTextModel

    register()
    lengths = (21, 2, 13)
    world = dist.get_world_size()
    transport = Transport("pool", rank, world, CPU, 2, TIMEOUT)
    ranks = tuple(range(world))
    transport.prepare([ranks])
    config = Qwen2_5_VLTextConfig(vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                                  num_attention_heads=4, num_key_value_heads=2,
                                  rope_parameters={"rope_type": "default", "rope_theta": 1e4,
                                                   "mrope_section": [2, 1, 1]})
    torch.manual_seed(0)
    model = Qwen2_5_VLTextModel(config).train()
    embeddings = torch.randn(1, sum(lengths), 32)
    positions = torch.cat([torch.arange(length) for length in lengths]).expand(3, 1, -1)
    weights = torch.randn(1, sum(lengths), 32)

    model.set_attn_implementation("sdpa")
    for part, place, weight in zip(embeddings.split(lengths, 1), positions.split(lengths, 2),
                                   weights.split(lengths, 1)):
        hidden = model(inputs_embeds=part, position_ids=place, use_cache=False).last_hidden_state
        (hidden * weight).sum().backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()
                if parameter.grad is not None}
    model.zero_grad(set_to_none=True)

    model.set_attn_implementation("dhp_ring")
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    context = PackContext(PackLayout(lengths, world), transport.link(ranks, 0))
    index = context.layout.index(rank)
    hidden = model(inputs_embeds=embeddings[:, index], position_ids=positions[..., index],
                   attention_mask={"full_attention": None},
                   use_cache=False, context=context).last_hidden_state
    (hidden * weights[:, index]).sum().backward()
    errors = []
    for name, parameter in model.named_parameters():
        if name in expected:
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            errors.append(float((parameter.grad - expected[name]).abs().max() / expected[name].abs().max()))
    assert len(errors) > 10
    return errors


@pytest.mark.parametrize("recompute", [False, True])
def test_transformers_runs_on_shards(recompute: bool) -> None:
    assert max(max(errors) for errors in run_ranks(decoder_layers, 3, recompute)) < 1e-5


def test_transformers_without_a_pack_is_refused() -> None:
    from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLTextConfig
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLTextModel

    register()
    config = Qwen2_5_VLTextConfig(vocab_size=8, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                                  num_attention_heads=2, num_key_value_heads=1,
                                  rope_parameters={"rope_type": "default", "rope_theta": 1e4,
                                                   "mrope_section": [2, 1, 1]})
    model = Qwen2_5_VLTextModel(config)
    model.set_attn_implementation("dhp_ring")
    with pytest.raises(ValueError, match="without context=PackContext"):
        model(inputs_embeds=torch.randn(1, 4, 16), use_cache=False)


def test_tokens_that_are_not_the_layouts_are_refused() -> None:
    with pytest.raises(ValueError, match=r"wanted \(1, heads, 6, width\)"):
        ring_attention(torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8), 1.0,
                       PackContext(PackLayout((6,), 1)))


def test_a_layout_needs_a_link_of_its_degree() -> None:
    with pytest.raises(ValueError, match="degree 2 and a link of 1"):
        PackContext(PackLayout((6,), 2))
