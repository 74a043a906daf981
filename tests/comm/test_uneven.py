"""all_gather_v, reduce_scatter_v: parts of known sizes, of any dtype, over wire and verbs."""

from __future__ import annotations

import functools

import pytest
import torch

import weft
from weft.testing import run, spmd
from weft.verbs.carrier import verbs_of

EVERYWHERE = ("threads", "verbs", "processes", "gloo")
KINDS = {
    "even": lambda ranks: [3] * ranks,
    "uneven": lambda ranks: [(2 * rank) % 5 for rank in range(ranks)],
    "one has all": lambda ranks: [0] * (ranks - 1) + [7],
    "none": lambda ranks: [0] * ranks,
    "large": lambda ranks: [(rank % 3) * 9000 for rank in range(ranks)],
}
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint16, torch.complex64)


def rows_of(rank, size, dtype):
    numbers = torch.arange(2 * size).view(size, 2) % 7 + rank
    return numbers.to(dtype)


@pytest.mark.parametrize("kind", KINDS)
@spmd(1, 2, 3, 4, 7, on=EVERYWHERE)
def test_every_rank_has_the_rows_of_all(group, kind):
    sizes = KINDS[kind](group.size)
    for dtype in DTYPES:
        mine = rows_of(group.rank, sizes[group.rank], dtype)
        found = weft.all_gather_v(mine, sizes)
        wanted = [rows_of(rank, size, dtype) for rank, size in enumerate(sizes)]
        assert found.dtype == dtype and torch.equal(found, torch.cat(wanted)), dtype


@pytest.mark.parametrize("kind", KINDS)
@spmd(1, 2, 3, 4, 7, on=EVERYWHERE)
def test_each_rank_has_its_part_reduced(group, kind):
    sizes = KINDS[kind](group.size)
    first = sum(sizes[: group.rank])
    for dtype, op in ((torch.float32, "sum"), (torch.bfloat16, "avg"), (torch.int64, "max")):
        given = [rows_of(rank, sum(sizes), dtype) for rank in range(group.size)]
        found = weft.reduce_scatter_v(given[group.rank], sizes, op)
        whole = weft.all_reduce(given[group.rank], op)
        assert torch.equal(found, whole[first : first + sizes[group.rank]]), dtype


@spmd(3, on=EVERYWHERE)
def test_sums_are_in_rank_order(group):
    """So a large part of a tensor, in chunks, has the bits of a small one."""
    for count in (10, 100_000):
        given = [
            torch.randn(3 * count, generator=torch.Generator().manual_seed(rank))
            for rank in range(3)
        ]
        found = weft.reduce_scatter_v(given[group.rank], [count, 2 * count, 0])
        wanted = functools.reduce(torch.add, given).split([count, 2 * count, 0])[group.rank]
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("op", ["sum", "avg"])
@spmd(1, 3, on=EVERYWHERE)
def test_each_is_the_adjoint_of_the_other(group, op):
    sizes = [2, 0, 3][: group.size]
    mine = rows_of(group.rank, sizes[group.rank], torch.float64).requires_grad_()
    whole = rows_of(group.rank, sum(sizes), torch.float64).requires_grad_(group.rank == 0)
    weights = [rows_of(3 + rank, sum(sizes), torch.float64) for rank in range(group.size)]
    (gathered,) = torch.autograd.grad(
        weft.all_gather_v(mine, sizes), mine, weights[group.rank], create_graph=True
    )
    assert torch.equal(gathered, sum(weights).split(sizes)[group.rank])
    part = weft.reduce_scatter_v(whole, sizes, op)
    assert part.requires_grad  # on all ranks, since on one
    part.backward(mine.detach())
    if group.rank == 0:
        wanted = weft.all_gather_v(mine.detach(), sizes)
        assert torch.equal(whole.grad, wanted / (group.size if op == "avg" else 1))
    else:
        weft.all_gather_v(mine.detach(), sizes)


def test_the_gradient_of_a_gradient():
    def program(group):
        x = torch.full((group.rank + 1,), 2.0, dtype=torch.float64, requires_grad=True)
        found = weft.all_gather_v(x, [1, 2])
        (first,) = torch.autograd.grad(found.pow(3).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
        return first.tolist(), second.tolist()

    assert run(2, program) == [([24.0], [24.0]), ([24.0] * 2, [24.0] * 2)]


@spmd(4, on=("threads",))
def test_what_is_sent_has_no_padding(group):
    """A part of each, to all others, from its memory."""
    sizes = [0, 100_000, 50_000, 0]
    mine = torch.ones(sizes[group.rank])
    weft.barrier()
    group.traffic.reset()
    weft.all_gather_v(mine, sizes)
    assert 0 <= group.traffic.bytes - 3 * mine.nbytes < 5000
    whole = torch.ones(sum(sizes))
    group.traffic.reset()
    weft.reduce_scatter_v(whole, sizes)
    others = whole.nbytes - 4 * sizes[group.rank]
    assert 0 <= group.traffic.bytes - others < 5000


def noted(verbs, began):
    for name in ("all_gather", "exchange"):
        verb = getattr(verbs, name)

        def called(*given, name=name, verb=verb):
            began.append(name)
            return verb(*given)

        setattr(verbs, name, called)


@spmd(4, on=("verbs", "gloo"))
def test_each_is_one_verb_and_what_is_too_uneven_is_not_padded(group):
    began = []
    noted(group.worker.call("verbs", lambda: verbs_of(group, torch.device("cpu"))), began)
    for sizes in ([2, 2, 2, 2], [4, 2, 2, 2], [9, 0, 0, 0]):
        weft.all_gather_v(torch.ones(sizes[group.rank]), sizes)
    weft.reduce_scatter_v(torch.ones(9), [9, 0, 0, 0])
    weft.all_gather_v(torch.ones(0, 2), [0] * 4)
    assert began == ["all_gather", "all_gather", "exchange", "exchange"]


@spmd(2, on=("threads",))
def test_sizes_that_differ_or_do_not_fit_are_told_to_all(group):
    mine = torch.ones(1 + group.rank)
    calls = {
        r"ranks differ in sizes: ": lambda: weft.all_gather_v(mine, [1 + group.rank, 2]),
        r"rank 0: tensor has 1 rows, and sizes\[0\] is 4": lambda: weft.all_gather_v(mine, [4, 2]),
        r"rank 0: sizes has 1 numbers for 2 ranks": lambda: weft.all_gather_v(mine, [3]),
        r"rank 0: sizes\[1\] is no number of rows": lambda: weft.all_gather_v(mine, [1, -2]),
        r"rank 0: tensor has 1 rows, and the sum of sizes is 3": lambda: weft.reduce_scatter_v(
            mine[:1], [1, 2]
        ),
        r"rank 0: op max has no gradient here": lambda: weft.reduce_scatter_v(
            torch.ones(3, requires_grad=True), [1, 2], "max"
        ),
        r"ranks differ in op: rank 0 has sum, rank 1 has max": lambda: weft.reduce_scatter_v(
            torch.ones(3), [1, 2], ("sum", "max")[group.rank]
        ),
    }
    for text, call in calls.items():
        with pytest.raises(weft.WeftError, match=text):
            call()
        assert weft.all_gather_v(mine, [1, 2]).tolist() == [1.0] * 3
