import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dhp_ray.model.layout import Blocks, PackLayout, TokenInterval, zigzag, zigzag_of_all

lengths_of_packs = st.lists(st.integers(1, 60), min_size=1, max_size=12).map(tuple)


@st.composite
def random_layouts(draw: st.DrawFn) -> PackLayout:
    """Layouts of no pattern: each sequence cut anywhere, each piece on any member."""
    lengths, degree = draw(lengths_of_packs), draw(st.integers(1, 6))
    shards: list[list[TokenInterval]] = [[] for _ in range(degree)]
    for sequence, length in enumerate(lengths):
        cuts = sorted({0, length, *draw(st.lists(st.integers(1, max(1, length - 1)), max_size=8))})
        for start, stop in itertools.pairwise(cuts):
            shards[draw(st.integers(0, degree - 1))].append(TokenInterval(sequence, start, stop))
    return PackLayout(lengths, degree, tuple(tuple(shard) for shard in shards))


layouts = st.one_of(st.builds(PackLayout, lengths_of_packs, st.integers(1, 9)), random_layouts())


def test_zigzag_of_one_sequence() -> None:
    layout = PackLayout((12,), 3)
    assert layout.shards == (
        (TokenInterval(0, 0, 2), TokenInterval(0, 10, 12)),
        (TokenInterval(0, 2, 4), TokenInterval(0, 8, 10)),
        (TokenInterval(0, 4, 8),))
    assert layout.index(1).tolist() == [2, 3, 8, 9]


def test_zigzag_of_packed_sequences_crosses_no_boundary() -> None:
    layout = PackLayout((4, 8), 2)
    assert layout.shards[0] == (TokenInterval(0, 0, 1), TokenInterval(0, 3, 4), TokenInterval(1, 0, 2),
                                   TokenInterval(1, 6, 8))
    assert layout.shards[1] == (TokenInterval(0, 1, 3), TokenInterval(1, 2, 6))
    assert layout.index(0).tolist() == [0, 3, 4, 5, 10, 11]


def test_blocks_of_zigzag() -> None:
    layout = PackLayout((4, 8), 2)
    assert layout.blocks(0, 0) == Blocks((slice(0, 2), slice(2, 6)), (slice(0, 2), slice(2, 6)), causal=True)
    # Member 0's late chunks see all of member 1's, its early chunks see nothing of them.
    assert layout.blocks(0, 1) == Blocks((slice(1, 2), slice(4, 6)), (slice(0, 2), slice(2, 6)), causal=False)
    # All of member 1's queries see member 0's early chunks: one block a sequence.
    assert layout.blocks(1, 0) == Blocks((slice(0, 2), slice(2, 6)), (slice(0, 1), slice(2, 4)), causal=False)


def test_sequences_shorter_than_the_members() -> None:
    layout = PackLayout((1, 1), 4)
    assert [layout.num_tokens(member) for member in range(4)] == [1, 1, 0, 0]
    assert layout.index(3).tolist() == []
    assert layout.blocks(3, 0).queries == layout.blocks(0, 3).queries == layout.blocks(0, 1).queries == ()


@given(layouts)
@settings(max_examples=100, deadline=None)
def test_every_token_lies_on_one_member(layout: PackLayout) -> None:
    positions = torch.cat([layout.index(member) for member in range(layout.degree)])
    assert sorted(positions.tolist()) == list(range(sum(layout.lengths)))
    for member in range(layout.degree):
        assert layout.num_tokens(member) == len(layout.index(member))
        assert layout.index(member).tolist() == sorted(layout.index(member).tolist())
        for interval in layout.shards[member]:
            assert 0 <= interval.start < interval.stop <= layout.lengths[interval.sequence]


@given(layouts)
@settings(max_examples=100, deadline=None)
@pytest.mark.seconds
def test_blocks_are_the_mask(layout: PackLayout) -> None:
    """The scores that blocks compute, over all pairs of members, are those of the mask: none missing, none twice."""
    sequence_of = torch.repeat_interleave(torch.arange(len(layout.lengths)), torch.tensor(layout.lengths))
    total = len(sequence_of)
    wanted = (sequence_of[:, None] == sequence_of[None, :]).tril()
    computed = torch.zeros(total, total, dtype=torch.long)
    for query_member in range(layout.degree):
        for key_member in range(layout.degree):
            blocks = layout.blocks(query_member, key_member)
            assert len(blocks.queries) == len(blocks.keys)
            for queries, keys in zip(blocks.queries, blocks.keys):
                rows, columns = layout.index(query_member)[queries], layout.index(key_member)[keys]
                assert len(rows) > 0
                assert len(columns) > 0
                mask = torch.ones(len(rows), len(columns), dtype=torch.long)
                computed[rows[:, None], columns[None, :]] += mask.tril() if blocks.causal else mask
    assert torch.equal(computed, wanted.long())


@given(lengths_of_packs, st.integers(1, 9))
@settings(max_examples=150, deadline=None)
def test_zigzag_balances_tokens(lengths: tuple[int, ...], degree: int) -> None:
    layout = PackLayout(lengths, degree)
    tokens = [layout.num_tokens(member) for member in range(degree)]
    assert max(tokens) - min(tokens) <= 1


@given(lengths_of_packs, st.integers(1, 9))
@settings(max_examples=100, deadline=None)
def test_zigzag_of_all_cuts_a_pack_as_one_sequence(lengths: tuple[int, ...], degree: int) -> None:
    layout = PackLayout(lengths, degree, zigzag_of_all(lengths, degree))
    tokens = [layout.num_tokens(member) for member in range(degree)]
    assert max(tokens) - min(tokens) <= 1
    assert torch.cat([layout.index(member) for member in range(degree)]).sort().values.tolist() == list(
        range(sum(lengths)))
    assert sum(map(len, layout.shards)) <= len(lengths) + 2 * degree - 1
    assert zigzag_of_all(lengths[:1], degree) == zigzag(lengths[:1], degree)


@given(lengths_of_packs, st.integers(1, 9))
@settings(max_examples=100, deadline=None)
def test_zigzag_needs_one_block_a_sequence(lengths: tuple[int, ...], degree: int) -> None:
    layout = PackLayout(lengths, degree)
    for query_member in range(degree):
        for key_member in range(degree):
            assert len(layout.blocks(query_member, key_member).queries) <= len(lengths)


@given(st.lists(st.integers(1000, 20000), min_size=1, max_size=4).map(tuple), st.integers(2, 9))
@settings(max_examples=25, deadline=None)
def test_zigzag_balances_work(lengths: tuple[int, ...], degree: int) -> None:
    layout = PackLayout(lengths, degree)
    work = [sum((piece.stop * (piece.stop + 1) - piece.start * (piece.start + 1)) // 2
                for piece in layout.shards[member]) for member in range(degree)]
    assert max(work) / min(work) < 1.02


@pytest.mark.parametrize(
    ("lengths", "degree", "message"),
    [
        ((4,), 0, "degree 0"),
        ((), 1, "at least 1"),
        ((3, 0), 2, "at least 1"),
    ],
)
def test_a_wrong_layout_is_refused(lengths: tuple[int, ...], degree: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PackLayout(lengths, degree)
