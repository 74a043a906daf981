"""Some of a group's ranks, as a group."""

from __future__ import annotations

import threading

import pytest
import torch

import weft
from weft.schedules import dense_all_reduce
from weft.testing import contract, run, spmd

PAIRS = (contract.channels, contract.shorter, contract.empty, contract.leases)
ANY = (
    contract.exchange,
    contract.keep_order,
    contract.gather_small,
    contract.reduce_exactly,
    contract.reduce_nan,
    contract.reduce_beside_messages,
)


@spmd(3, 5)
def test_a_part_does_what_wires_do(group):
    """Backwards, while a rank that has no part in it looks on."""
    ranks = list(range(group.size - 2, -1, -1))
    if group.rank in ranks:
        part = group.subset(ranks)
        assert (part.rank, part.size) == (ranks.index(group.rank), len(ranks))
        for body in (*ANY, *(PAIRS if part.size == 2 else ())):
            body(part)
        part.close()
    contract.exchange(group)


@spmd(5, on=("threads",))
def test_the_wire_counts_what_its_parts_send(group):
    before = group.traffic.messages, group.traffic.bytes
    if group.rank in (2, 4):
        part = group.subset([4, 2])
        peer = 1 - part.rank
        part.post([(peer, torch.zeros(4))], [(peer, 16)]).wait()
        part.post([(peer, torch.zeros(2))], [(peer, 8)], 1).wait()
        assert part.traffic is group.traffic
        assert group.traffic.messages == before[0] + 2
        assert group.traffic.bytes == before[1] + 24
        assert group.traffic.to[6 - group.rank] == 24
    else:
        assert (group.traffic.messages, group.traffic.bytes) == before


@spmd(4, on=("threads",))
def test_a_failure_in_a_part_is_everybodys(group):
    if group.rank == 3:
        group.subset([3, 1]).abort("out of memory")
        return
    with pytest.raises(weft.WireError, match="rank 3 gave up: out of memory") as caught:
        if group.rank == 1:
            group.subset([3, 1]).post((), [(0, 8)]).wait()
        else:
            group.post((), [(2 - group.rank, 8)]).wait()
    assert caught.value.culprit == 3


@spmd(5, on=("threads",))
def test_a_part_of_a_part(group):
    if group.rank == 0:
        with pytest.raises(weft.WeftError, match=r"rank 0 is none of the ranks \[4, 2\]"):
            group.subset([4, 2])
        for wrong in ([0, 0], [0, 5]):
            with pytest.raises(weft.WeftError, match="are not distinct ranks of 5"):
                group.subset(wrong)
        return
    inner = group.subset([4, 3, 2, 1]).split([2, 0])
    assert (inner is None) == (group.rank in (1, 3))
    if inner is not None:
        assert inner.rank == (2, 4).index(group.rank)
        contract.exchange(inner)


def test_errors_of_a_call_of_some_ranks_name_them_by_their_numbers_among_all():
    has_left = threading.Event()  # rank 1, the barrier

    def program(group):
        if group.rank == 0:
            return
        some = group.subset([1, 2])
        model = torch.nn.Linear(2, 1 + group.rank)
        with pytest.raises(weft.WeftError, match=r"\(2,\) on rank 1, and .* \(3,\) on rank 2"):
            weft.sync_params(model, group=some)

        inputs = [torch.ones(2, requires_grad=True)] * 2
        with (
            torch.set_grad_enabled(group.rank == 1),
            pytest.raises(weft.WeftError, match=r"rank 1 records gradients .*, rank 2 is under"),
        ):
            weft.all_to_all(inputs, group=some)

        with pytest.raises(weft.WeftError, match=rf"^rank {group.rank}: "):
            dense_all_reduce(some, torch.ones(2), "no such op")

        if group.rank == 2:
            has_left.wait(30)
        else:
            with pytest.raises(weft.WeftError, match=r"^rank 1: rank 2 has not come to the barr"):
                weft.barrier(timeout=0.01, group=some)
            has_left.set()
        weft.barrier(group=some)

    run(3, program)
