"""`weft.schedules.chain`: memory that goes along a chain of ranks."""

from __future__ import annotations

import torch

from weft.schedules import Chain, chain
from weft.testing import spmd


def numbers(rank: int, count: int) -> torch.Tensor:
    return torch.arange(count) + 1000 * rank


@spmd(1, 2, 4)
def test_the_memory_of_the_first_reaches_all(group):
    ranks = [*range(1, group.size), 0]
    memory = numbers(group.rank, 100_000)
    assert Chain(group, ranks, memory).start().wait()[0] is memory
    assert torch.equal(memory, numbers(ranks[0], 100_000))


@spmd(1, 2, 4)
def test_a_sum_grows_on_its_way(group):
    memory = torch.full((100_000,), -1)
    Chain(group, range(group.size), memory, numbers(group.rank, 100_000)).start().wait()
    before = [numbers(rank, 100_000) for rank in range(group.rank + 1)]
    assert torch.equal(memory, torch.stack(before).sum(0))


@spmd(3)
def test_a_chain_that_is_not_started_sends_nothing(group):
    memory = numbers(group.rank, 10)
    before = group.traffic.messages
    chain_of_all = Chain(group, range(3), memory, numbers(group.rank, 10))
    assert group.traffic.messages == before
    assert torch.equal(memory, numbers(group.rank, 10))
    chain_of_all.start().wait()
    assert group.traffic.messages - before == (group.rank < 2)


@spmd(3)
def test_to_wait_again_changes_nothing(group):
    memory = torch.empty(10, dtype=torch.int64)
    started = Chain(group, range(3), memory, numbers(group.rank, 10)).start()
    started.wait()
    total = memory.clone()
    messages = group.traffic.messages
    assert started.wait()[0] is memory
    assert torch.equal(memory, total) and group.traffic.messages == messages


@spmd(2)
def test_several_are_under_way_at_once(group):
    count = 3 * chain.CHUNKS[1]
    memories = [torch.full((count,), 10 * group.rank + i, dtype=torch.uint8) for i in range(3)]
    started = [Chain(group, range(2), memory).start() for memory in memories]
    for i, each in enumerate(started):
        each.wait()
        assert bool((memories[i] == i).all())
