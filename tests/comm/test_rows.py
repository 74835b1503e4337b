from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dhp_ray.comm.device import CPU
from dhp_ray.comm.pack_communicator import PackCommunicator, exchange_rows, return_rows, send_rows
from dhp_ray.comm.transport import Transport
from tests.ranks import run_ranks

TIMEOUT = timedelta(seconds=20)
WIDTH = 5


def random_needs(num_members: int, seed: int) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Rows of every owner, and needs[owner][reader], the same on all ranks; some own or need nothing, some rows go to
    many.
    """
    generator = torch.Generator().manual_seed(seed)
    counts = [0 if owner == seed % num_members and num_members > 1 else 3 + owner for owner in range(num_members)]
    rows = [torch.randn(count, WIDTH, generator=generator) for count in counts]

    def need(count: int) -> Tensor:
        size = int(torch.randint(0, 6, (), generator=generator)) if count else 0
        return torch.randint(0, max(count, 1), (size,), generator=generator)

    return rows, [[need(count) for _ in range(num_members)] for count in counts]


def errors_of_exchange(rank: int, transport_name: str, recompute: bool) -> list[float]:
    """Errors of the result and of the rows' gradient against indexing the whole matrix."""
    world = dist.get_world_size()
    transport = Transport(transport_name, rank, world, CPU, 2, TIMEOUT)
    ranks = tuple(reversed(range(world)))
    transport.prepare([ranks])
    errors = []
    for seed in range(6):
        link = transport.link(ranks, seed)
        me = link.index
        rows, needs = random_needs(world, seed)
        generator = torch.Generator().manual_seed(100 + seed)
        whole = [x.clone().requires_grad_() for x in rows]
        results = [torch.cat([whole[owner][needs[owner][reader]] for owner in range(world)]) for reader in range(world)]
        weights = [torch.randn(x.shape, generator=generator) for x in results]
        sum((x * weight).sum() for x, weight in zip(results, weights)).backward()

        mine = rows[me].clone().requires_grad_()
        counts = [len(needs[owner][me]) for owner in range(world)]

        def run(
            x: Tensor, link: PackCommunicator = link, index: list[Tensor] = needs[me], counts: list[int] = counts
        ) -> Tensor:
            return exchange_rows(x * 2 / 2, index, counts, link) * 1

        out = checkpoint(run, mine, use_reentrant=False) if recompute else run(mine)
        (out * weights[me]).sum().backward()
        assert out.shape == (sum(counts), WIDTH)
        assert mine.grad is not None
        assert whole[me].grad is not None
        errors += [float((a - b).abs().max()) for a, b in ((out, results[me]), (mine.grad, whole[me].grad))
                   if a.numel()]
    transport.close()
    return errors


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("transport_name", ["pool", "parent"])
def test_exchange_equals_indexing_the_whole(num_ranks: int, transport_name: str) -> None:
    for errors in run_ranks(errors_of_exchange, num_ranks, transport_name, False):
        assert len(errors) >= 6
        assert max(errors) < 1e-6


def uneven_needs(num_members: int, seed: int) -> tuple[list[Tensor], list[list[Tensor]]]:
    """As `random_needs`: by turns one member owns nothing and another needs nothing, one does neither, and all do both.
    """
    generator, member = torch.Generator().manual_seed(seed), seed // 3 % num_members
    owns_none, needs_none = [(member, (member + 1) % num_members), (member, member), (-1, -1)][seed % 3]
    rows = [torch.randn(0 if owner == owns_none else 3 + owner, WIDTH, generator=generator)
            for owner in range(num_members)]
    sizes = torch.randint(1, 6, (num_members, num_members), generator=generator).tolist()
    return rows, [[torch.randint(0, max(1, len(owned)), (
        size if len(owned) and reader != needs_none else 0,), generator=generator)
        for reader, size in enumerate(of_owner)] for owned, of_owner in zip(rows, sizes)]


def exact_ways(rank: int, transport_name: str, dtype: torch.dtype, num_seeds: int) -> set[tuple[bool, bool]]:
    """Rows and their gradients are, bit for bit, those of the whole matrix; members that exchange nothing are in
    neither map. Returns the kinds of part that this rank had: (sends to others, receives of others).
    """
    world, kinds = dist.get_world_size(), set()
    transport = Transport(transport_name, rank, world, CPU, 2, TIMEOUT)
    ranks = tuple((place + 1) % world for place in range(world))
    transport.prepare([ranks])
    for seed in range(num_seeds):
        link = transport.link(ranks, seed)
        me = link.index
        rows, needs = uneven_needs(world, seed)
        rows = [owned.to(dtype) for owned in rows]
        send = {reader: index for reader, index in enumerate(needs[me]) if len(index)}
        counts = {owner: len(needs[owner][me]) for owner in range(world) if len(needs[owner][me])}
        kinds.add((any(reader != me for reader in send), any(owner != me for owner in counts)))
        places = torch.tensor([0, *map(len, rows)]).cumsum(0)[:-1]
        wanted = [torch.cat([needs[owner][reader] + places[owner] for owner in range(world)])
                  for reader in range(world)]
        received = send_rows(rows[me], send, counts, link)
        assert torch.equal(received, torch.cat(rows)[wanted[me]])
        generator = torch.Generator().manual_seed(seed)
        gradients = [torch.randn(len(index), WIDTH, generator=generator).to(dtype) for index in wanted]
        total = torch.zeros_like(torch.cat(rows))
        for index, gradient in zip(wanted, gradients):
            total.index_add_(0, index, gradient)
        found = return_rows(gradients[me], send, counts, len(rows[me]), link)
        assert torch.equal(found, total.split([len(owned) for owned in rows])[me])
    transport.close()
    return kinds


@pytest.mark.parametrize(("num_ranks", "transport_name", "dtype"), [
    (1, "parent", torch.float32), (2, "pool", torch.float32), (3, "parent", torch.bfloat16),
    (5, "pool", torch.bfloat16), *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        (2, "parent", torch.bfloat16), (3, "pool", torch.float32), (5, "parent", torch.float32)))])
def test_both_ways_equal_indexing_the_whole_bit_for_bit(
    num_ranks: int, transport_name: str, dtype: torch.dtype
) -> None:
    found = run_ranks(exact_ways, num_ranks, transport_name, dtype, 12)
    kinds = {(False, False)} if num_ranks == 1 else {(True, True), (True, False), (False, True), (False, False)}
    assert set().union(*found) == kinds


def two_of_three(rank: int) -> list[float]:
    """Rank 2 is in no map of the others, nor they in its own: it does not call, and nobody waits for it."""
    transport = Transport("parent", rank, 3, CPU, 2, TIMEOUT)
    received = torch.zeros(0, WIDTH)
    if rank < 2:
        link, index = transport.link(range(3), 0), {1 - rank: torch.tensor([1, 1])}
        received = send_rows(torch.full((2, WIDTH), float(rank)), index, {1 - rank: 2}, link)
        received = torch.cat([received, return_rows(received, index, {1 - rank: 2}, 2, link)])
    transport.close()
    return received[:, 0].tolist()


def test_a_rank_that_exchanges_nothing_need_not_call() -> None:
    assert run_ranks(two_of_three, 3) == [[1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 2.0], []]


def test_exchange_recomputed_in_the_backward() -> None:
    assert max(max(errors) for errors in run_ranks(errors_of_exchange, 3, "pool", True)) < 1e-6


def one_owner(rank: int) -> list[float]:
    """Rank 0 owns all rows, rank 1 needs two of them, rank 2 none: every backward runs, or rank 0 would wait for ever.
    """
    rows = torch.ones(4, WIDTH, requires_grad=True) if rank == 0 else torch.zeros(0, WIDTH)
    send_index = [torch.tensor(wanted if rank == 0 else [], dtype=torch.long) for wanted in ([3], [1, 3], [])]
    link = PackCommunicator((0, 1, 2), rank, dist.group.WORLD)
    out = exchange_rows(rows, send_index, [len([[3], [1, 3], []][rank]), 0, 0], link)
    assert out.requires_grad
    (out.sum() * (rank + 1)).backward()
    return rows.grad[:, 0].tolist() if rows.grad is not None else []


def test_members_without_rows_take_part_in_the_backward() -> None:
    assert run_ranks(one_owner, 3) == [[0.0, 2.0, 0.0, 3.0], [], []]


def frozen_rows(rank: int, dtype: torch.dtype) -> tuple[bool, list[float], torch.dtype]:
    rows = torch.full((1, WIDTH), float(rank)).to(dtype)
    index = [torch.zeros(1, dtype=torch.long)] * 2
    out = exchange_rows(rows, index, [1, 1], PackCommunicator((0, 1), rank, dist.group.WORLD), differentiable=False)
    return out.requires_grad, out[:, 0].tolist(), out.dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_nobody_trains_have_no_backward(dtype: torch.dtype) -> None:
    assert run_ranks(frozen_rows, 2, dtype) == [(False, [0.0, 1.0], dtype)] * 2
