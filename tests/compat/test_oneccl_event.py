"""The third generation: every parameter of its document, and both callbacks."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

import weft
from weft.compat.oneccl import event
from weft.testing import expected, run, spmd

WIDTH = 2
UNUSED = [None] * 4
DTYPES = torch.int64, torch.float32


def part(rank, dtype=torch.float32):
    """Unequal counts, none from rank 4 on, repeated indices, no order."""
    draw = torch.Generator().manual_seed(rank)
    count = max(0, 8 - 2 * rank)
    indices = torch.randint(9, (count,), generator=draw)
    return weft.Rows(indices, torch.randint(-4, 5, (count, WIDTH), generator=draw).to(dtype))


def parts(size, dtype=torch.float32):
    return [part(rank, dtype) for rank in range(size)]


class Kept:
    """A callback of either kind, and what it was called with."""

    def __init__(self):
        self.calls, self.buffers = [], None

    def complete(self, *arguments):
        self.calls.append(arguments)

    def allocate(self, *arguments):
        self.calls.append(arguments)
        idx_count, idx_dtype, val_count, val_dtype, _ = arguments
        self.buffers = (
            torch.zeros(idx_count, dtype=idx_dtype),
            torch.zeros(val_count, dtype=val_dtype),
        )
        return self.buffers

    def attr(self, how="complete", ctx=None):
        name = {"complete": "completion_fn", "allocate": "alloc_fn"}[how]
        return event.create_sparse_allreduce_attr(fn_ctx=ctx, **{name: getattr(self, how)})

    def result(self):
        (call,) = self.calls
        idx, val = (call[0], call[3]) if self.buffers is None else self.buffers
        return idx.tolist(), val.tolist()


def flat(rows):
    return rows.indices.tolist(), rows.values.view(-1).tolist()


def sent(rows):
    buffers = rows.indices, rows.indices.numel(), rows.values, rows.values.numel()
    return [*buffers, *UNUSED, rows.indices.dtype, rows.values.dtype]


@spmd(1, 2, 3, 4, 7, 8)
def test_either_callback_with_every_parameter(group):
    comm, rows = event.create_communicator(), part(group.rank)
    assert (comm.rank(), comm.size()) == (group.rank, group.size)
    want = expected(parts(group.size))
    for how in ("complete", "allocate"):
        kept = Kept()
        attr = kept.attr(how, ctx="mine")
        made = event.sparse_allreduce(*sent(rows), "sum", comm, None, attr, [])
        made.wait()
        assert made.test()
        assert kept.result() == flat(want)
        sizes = (len(want), torch.int64), (len(want) * WIDTH, torch.float32)
        if how == "complete":
            (call,) = kept.calls
            assert (call[1:3], call[4:6]) == sizes
        else:
            assert kept.calls == [(*sizes[0], *sizes[1], "mine")]
        assert kept.calls[0][-1] == "mine"


GIVEN = {
    "numpy": lambda n, m: (np.zeros(n, np.int64), np.zeros(m, np.float32)),
    "more than enough": lambda n, m: (np.zeros(n + 3, np.int64), torch.zeros(m + 5)),
    "of other shapes": lambda n, m: [torch.zeros(n, 1).long(), torch.zeros(n, m // n)],
}


@pytest.mark.parametrize("what", GIVEN)
def test_what_alloc_fn_may_give(what):
    def program(group):
        made = []

        def allocate(n, _, m, *rest):
            made.extend(GIVEN[what if group.rank else "numpy"](n, m))
            return made

        attr = event.create_sparse_allreduce_attr(alloc_fn=allocate)
        event.sparse_allreduce(*sent(part(group.rank)), "sum", group, attr=attr).wait()
        want = flat(expected(parts(group.size)))
        for buffer, numbers in zip(made, want, strict=True):
            held = np.asarray(buffer).ravel()
            assert held[: len(numbers)].tolist() == numbers
            assert not held[len(numbers) :].any()  # nothing is written beyond the counts

    run(2, program)


@spmd(4, on=("threads",))
def test_half_precision_adds_in_float32(group):
    """256 + 1 + 1 + 1 is 259, a tie that bfloat16 rounds to 260; added one by one in bfloat16, 256
    would stay 256."""
    kept, values = Kept(), torch.tensor([1.0 if group.rank else 256.0], dtype=torch.bfloat16)
    rows = weft.Rows(torch.tensor([3]), values)
    event.sparse_allreduce(*sent(rows), "sum", group, attr=kept.attr()).wait()
    assert kept.result() == ([3], [260.0])


@pytest.mark.parametrize("deps", [{}, [], ()])
@spmd(2, on=("threads",))
def test_no_deps_are_written_in_any_way(group, deps):
    """`{}` is the document's."""
    kept = Kept()
    event.sparse_allreduce(*sent(part(group.rank)), "sum", group, None, kept.attr(), deps).wait()
    assert kept.result()[0]


@spmd(2, on=("threads",))
def test_deps_are_waited_for(group):
    """Buffers are read when what they depend on is done, not before: here it writes them."""
    rows, kept, gate, other = part(group.rank), Kept(), threading.Event(), group.split([0, 1])
    values = torch.full_like(rows.values, float("nan"))

    def write(*_):
        gate.wait(20)
        values.copy_(rows.values)

    attr = event.create_sparse_allreduce_attr(completion_fn=write)
    before = event.sparse_allreduce(*sent(rows), "sum", other, attr=attr)
    given = sent(weft.Rows(rows.indices, values))
    made = event.sparse_allreduce(*given, "sum", group, None, kept.attr(), [before, before])
    assert not made.test() and not before.test()
    with pytest.raises(weft.StillRunning):
        made.wait(timeout=0.01)
    gate.set()
    made.wait()
    assert made.test()
    assert kept.result() == flat(expected(parts(group.size)))
    other.close()
