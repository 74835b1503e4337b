"""torch_npu's fused operators in plain torch, behind the operators' own schemas: torch checks each call's arguments.

It refuses what the documentation rules out (torch_npu.yaml), and lays its softmax statistics out as that says.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import yaml
from torch import Tensor

TABLE: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "torch_npu.yaml").read_text(encoding="utf-8"))
MAX_LENGTHS, MAX_TOKENS = 1024, 2**20


@cache
def torch_npu() -> SimpleNamespace:
    """What `import torch_npu` gives on a machine with an NPU, as far as our kernels use it."""
    library = torch.library.Library("npu", "DEF")
    for schema in TABLE["operators"]:
        library.define(schema)
    library.impl("npu_grouped_matmul", _grouped_matmul, "CompositeExplicitAutograd")
    library.impl("npu_fusion_attention", _forward, "CompositeExplicitAutograd")
    library.impl("npu_fusion_attention_grad", _backward, "CompositeExplicitAutograd")
    for name, operator in (("npu_rms_norm", _rms_norm), ("npu_rotary_mul", _rotary_mul), ("npu_swiglu", _swiglu)):
        library.impl(name, operator, "CompositeImplicitAutograd")
    names = [torch._C.parse_schema(schema).name for schema in TABLE["operators"]]
    return SimpleNamespace(library=library, **{name: getattr(torch.ops.npu, name) for name in names})


def _grouped_matmul(
    x: list[Tensor], weight: list[Tensor], *, group_list: Tensor, split_item: int, group_type: int,
    group_list_type: int = 0, **others: Any
) -> list[Tensor]:
    """Of one x (R, M) and the weights (E, M, N) of E groups, or with group_type 2 of x (M, R) and one weight (R, N)."""
    assert not any(value is not None for value in others.values()), others
    [left], [right], ends = x, weight, group_list.tolist()
    if group_list.dtype != torch.int64 or split_item != 3 or group_list_type or ends != sorted(ends):
        raise RuntimeError(f"npu_grouped_matmul: got {group_list}, split_item {split_item}, {group_list_type}")
    groups = [slice(*pair) for pair in pairwise((0, *ends))]
    if group_type == 2:
        return [torch.stack([left[:, rows] @ right[rows] for rows in groups])]
    assert group_type == 0
    return [torch.cat([left[rows] @ matrix for rows, matrix in zip(groups, right, strict=True)])]


def _rms_norm(x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    if not 2 <= x.ndim <= 8 or x.dtype != gamma.dtype:
        raise RuntimeError(f"npu_rms_norm: got {x.ndim} axes, {x.dtype} and {gamma.dtype}")
    inverse = (x.float().square().mean(-1, keepdim=True) + epsilon).rsqrt()
    return (x.float() * inverse * gamma.float()).to(x.dtype), inverse


def _rotary_mul(x: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half") -> Tensor:
    """In the layout BSND, that is (1, S, N, D), with r1 and r2 (1, S, 1, D)."""
    wanted = (1, x.shape[1], 1, x.shape[3])
    if x.shape[3] >= 896 or x.shape[3] % 2 or x.shape[2] >= 1000 or not r1.shape == r2.shape == wanted:
        raise RuntimeError(f"npu_rotary_mul: got {tuple(x.shape)} with {tuple(r1.shape)} and {tuple(r2.shape)}")
    if not x.dtype == r1.dtype == r2.dtype or max(r1.abs().max(), r2.abs().max()) > 1:
        raise RuntimeError(f"npu_rotary_mul: got {x.dtype}, {r1.dtype} and {r2.dtype}, up to {r1.abs().max()}")
    assert rotary_mode == "half"
    first, second = x.chunk(2, -1)
    return r1 * x + r2 * torch.cat((-second, first), -1)


def _swiglu(x: Tensor, dim: int = -1) -> Tensor:
    gate, up = x.chunk(2, dim)
    return gate * gate.sigmoid() * up


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = 2147483647,
    next_tockens: int = 2147483647,
    inner_precise: int = 0,
    prefix: list[int] | None = None,
    actual_seq_qlen: list[int] | None = None,
    actual_seq_kvlen: list[int] | None = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
    softmax_layout: str = "",
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int, int]:
    assert actual_seq_qlen is not None
    assert actual_seq_kvlen is not None
    _check(query, key, value, head_num, input_layout, atten_mask, actual_seq_qlen, actual_seq_kvlen, sparse_mode)
    out = torch.empty_like(query)
    maximum, total = query.new_empty((2, *query.shape[:2], 8), dtype=torch.float32)
    for rows, key_rows in _sequences(actual_seq_qlen, actual_seq_kvlen):
        scores = _scores(query[rows], key[key_rows], scale, sparse_mode)
        largest = scores.amax(-1)  # (N, S)
        weights = (scores - largest[..., None]).exp()
        out[rows] = torch.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdim=True),
                                 _per_head(value[key_rows], head_num)).to(query.dtype)
        _statistics(maximum, rows, softmax_layout).copy_(largest[..., None])
        _statistics(total, rows, softmax_layout).copy_(weights.sum(-1)[..., None])
    return out, maximum, total, query.new_empty(0), 0, 0, 0


def _backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dy: Tensor,
    head_num: int,
    input_layout: str,
    *,
    atten_mask: Tensor | None = None,
    softmax_max: Tensor,
    softmax_sum: Tensor,
    attention_in: Tensor,
    scale_value: float = 1.0,
    actual_seq_qlen: list[int],
    actual_seq_kvlen: list[int],
    sparse_mode: int = 0,
    softmax_layout: str = "",
    **_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    _check(query, key, value, head_num, input_layout, atten_mask, actual_seq_qlen, actual_seq_kvlen, sparse_mode)
    assert all(x.is_contiguous() for x in (dy, softmax_max, softmax_sum, attention_in))
    d_q, d_k, d_v = (torch.empty_like(x) for x in (query, key, value))
    for rows, key_rows in _sequences(actual_seq_qlen, actual_seq_kvlen):
        maximum, total = (_statistics(x, rows, softmax_layout)[..., :1] for x in (softmax_max, softmax_sum))
        weights = (_scores(query[rows], key[key_rows], scale_value, sparse_mode) - maximum).exp() / total
        gradient, keys, values = dy[rows].float(), _per_head(key[key_rows], head_num), _per_head(value[key_rows],
                                                                                              head_num)
        delta = (gradient * attention_in[rows].float()).sum(-1).t()[..., None]
        slope = weights * (torch.einsum("qhd,khd->hqk", gradient, values) - delta) * scale_value
        d_q[rows] = torch.einsum("hqk,khd->qhd", slope, keys).to(query.dtype)
        d_k[key_rows] = _of_group(torch.einsum("hqk,qhd->khd", slope, query[rows].float()), key)
        d_v[key_rows] = _of_group(torch.einsum("hqk,qhd->khd", weights, gradient), value)
    return d_q, d_k, d_v, query.new_empty(0), query.new_empty(0)


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    mask: Tensor | None,
    query_ends: list[int],
    key_ends: list[int],
    sparse_mode: int,
) -> None:
    if max(len(query_ends), len(key_ends)) > MAX_LENGTHS:
        raise RuntimeError(f"npu_fusion_attention: {len(query_ends)} lengths in TND; supported: 1 to {MAX_LENGTHS}")
    if max(len(query), len(key)) > MAX_TOKENS:
        raise RuntimeError(f"npu_fusion_attention: {max(len(query), len(key))} tokens; supported: 1 to {MAX_TOKENS}")
    if query.dtype not in (torch.float16, torch.bfloat16, torch.float32) or not query.dtype == key.dtype == value.dtype:
        raise RuntimeError(f"npu_fusion_attention: got {query.dtype}, {key.dtype} and {value.dtype}")
    assert (input_layout, head_num, key.shape) == ("TND", query.shape[1], value.shape)
    assert (query_ends[-1], key_ends[-1]) == (len(query), len(key))
    assert sparse_mode in (0, 3)
    if sparse_mode == 3:
        assert mask is not None
        assert torch.equal(mask, torch.ones(2048, 2048, dtype=torch.bool).triu(1))
    else:
        assert mask is None


def _sequences(query_ends: list[int], key_ends: list[int]) -> Iterator[tuple[slice, slice]]:
    for queries, keys in zip(pairwise([0, *query_ends]), pairwise([0, *key_ends]), strict=True):
        yield slice(*queries), slice(*keys)


def _scores(query: Tensor, key: Tensor, scale: float, sparse_mode: int) -> Tensor:
    """(N, S, K) of one sequence, -inf where the last query's diagonal hides a key."""
    scores = scale * torch.einsum("qhd,khd->hqk", query.float(), _per_head(key, query.shape[1]))
    if sparse_mode == 3:
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1 + len(key) - len(query))
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores


def _per_head(x: Tensor, num_heads: int) -> Tensor:
    """(K, Nk, D) -> (K, N, D) in fp32: heads of a group share their keys and values."""
    return x.float().repeat_interleave(num_heads // x.shape[1], 1)


def _of_group(gradient: Tensor, x: Tensor) -> Tensor:
    """(K, N, D) -> (K, Nk, D), summed over the heads of a group."""
    return gradient.unflatten(1, (x.shape[1], -1)).sum(2).to(x.dtype)


def _statistics(whole: Tensor, rows: slice, layout: str) -> Tensor:
    """The (N, S, 8) of one sequence within (T, N, 8); without the layout TND, each sequence's lies there as it is."""
    if layout == "TND":
        return whole[rows].transpose(0, 1)
    num_heads = whole.shape[1]
    return whole.view(-1, 8)[rows.start * num_heads:rows.stop * num_heads].view(num_heads, -1, 8)
