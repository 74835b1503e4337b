"""Dropout by sample, position and step: its hash beside plain integers, its shares, its products beside a mask."""

from __future__ import annotations

import hashlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dhp_ray.model.lora import DroppedProduct, kept, layer_key, token_keys

MASK = 2**32 - 1


def plain_kept(keys: list[int], layer: int, width: int, rate: float) -> list[list[bool]]:
    """`kept`, one value after the other in integers without a sign."""
    rows = []
    for key in keys:
        row = []
        for value in range(width):
            x = ((key + layer) & MASK) ^ (value // 2 * 0x9E3779B9 & MASK)
            x = (x ^ x >> 16) * 0x7FEB352D & MASK
            x = (x ^ x >> 15) * 0x846CA68B & MASK
            x ^= x >> 16
            half = x >> 16 if value % 2 else x & 0xFFFF
            row.append(half - (half >> 15 << 16) >= round(rate * 2**16) - 2**15)  # a half has a sign
        rows.append(row)
    return rows


@settings(max_examples=50, deadline=None)
@given(keys=st.lists(st.integers(-2**31, 2**31 - 1), min_size=1, max_size=9), layer=st.integers(-2**31, 2**31 - 1),
       width=st.integers(1, 70), rate=st.floats(0, 0.999))
def test_what_is_kept_is_what_plain_integers_say(keys: list[int], layer: int, width: int, rate: float) -> None:
    found = kept(torch.tensor(keys, dtype=torch.int32), layer, width, rate)
    assert found.tolist() == plain_kept(keys, layer, width, rate)


def test_keys_of_tokens_are_what_plain_integers_say() -> None:
    x = int.from_bytes(hashlib.blake2b(b"7 3 a sample", digest_size=8).digest(), "little") + 2 * 0x9E3779B97F4A7C15
    x &= 2**64 - 1
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & 2**64 - 1
    x = (x ^ x >> 27) * 0x94D049BB133111EB & 2**64 - 1
    keys = token_keys(7, 3, "a sample", 5)
    assert keys.dtype == torch.int32
    assert int(keys[2]) & MASK == x >> 32
    assert torch.equal(token_keys(7, 3, "a sample", 3), keys[:3])


@pytest.mark.parametrize("rate", [0.0, 0.05, 0.5, 0.999])
def test_shares(rate: float) -> None:
    """Of all values, of each token, and of each place, within five standard deviations."""
    found = kept(token_keys(0, 1, "a", 1000), layer_key("q"), 500, rate).double()
    deviation = (rate * (1 - rate)) ** 0.5
    assert abs(found.mean() - (1 - rate)) <= 5 * deviation / 500_000 ** 0.5 + 2**-16
    assert (found.mean(0) - (1 - rate)).abs().max() <= 5 * deviation / 1000 ** 0.5 + 2**-16
    assert (found.mean(1) - (1 - rate)).abs().max() <= 5 * deviation / 500 ** 0.5 + 2**-16


def test_drawn_apart() -> None:
    """Another seed, step, sample, layer, token or place drops others: as many are alike as of two random draws."""
    def values(seed: int = 0, step: int = 1, sample: str = "a", layer: str = "q") -> torch.Tensor:
        return kept(token_keys(seed, step, sample, 600), layer_key(layer), 600, 0.5)

    first = values()
    others = [values(seed=1), values(step=2), values(sample="b"), values(layer="k"), first.roll(1, 0), first.roll(1, 1),
              first.roll(2, 1), first.t(), values(step=0)]
    for other in others:
        assert abs((first == other).double().mean() - 0.5) < 5 * 0.5 / 600
    assert torch.equal(first, values())


@pytest.mark.parametrize(("wants_x", "wants_weight"), [(True, True), (True, False), (False, True)])
def test_a_product_and_its_gradients(wants_x: bool, wants_weight: bool) -> None:
    torch.manual_seed(0)
    keys = token_keys(0, 0, "a", 6)
    x = torch.randn(1, 6, 11, dtype=torch.float64, requires_grad=wants_x)
    weight = torch.randn(3, 11, dtype=torch.float64, requires_grad=wants_weight)
    wanted = (x * kept(keys, 5, 11, 0.3)) @ weight.t()
    assert torch.equal(DroppedProduct.apply(x, weight, keys, 5, 0.3), wanted)
    assert torch.autograd.gradcheck(lambda x, weight: DroppedProduct.apply(x, weight, keys, 5, 0.3), (x, weight))


def test_a_product_keeps_its_input_alone() -> None:
    kinds: list[torch.Tensor] = []
    x, weight = torch.randn(40, 30, requires_grad=True), torch.randn(3, 30, requires_grad=True)
    keys = token_keys(0, 0, "a", 40)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kinds.append(tensor) or tensor, lambda tensor: tensor):
        DroppedProduct.apply(x, weight, keys, 1, 0.1)
    assert sorted(tensor.data_ptr() for tensor in kinds) == sorted(tensor.data_ptr() for tensor in (x, weight, keys))
