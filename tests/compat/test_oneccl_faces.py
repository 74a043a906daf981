"""What the three generations have alike, through each of them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import weft
from weft.compat.oneccl import callback, event, request
from weft.testing import run, spmd

FACES = ["request", "callback", "event"]
UNUSED = [None] * 4


def reduced(face, sent, op="sum", dtype=torch.float32, **named):
    """The result of one call: indices, values. `sent` is two buffers, each with its count."""
    kept = []

    def complete(indices, count, index_dtype, values, *rest):
        kept.extend((indices.tolist(), values.tolist()))

    if face == "request":
        ind, val = torch.zeros(64, dtype=torch.int64), torch.zeros(64, dtype=dtype)
        made = request.sparse_allreduce(
            *sent, ind, None, val, None, torch.int64, dtype, op, **named
        )
        made.wait()
        return ind[: made.recv_ind_count].tolist(), val[: made.recv_val_count].tolist()
    if face == "callback":
        attributes = callback.Attributes(sparse_allreduce_completion_fn=complete)
        callback.sparse_allreduce(
            *sent, *UNUSED, torch.int64, dtype, op, attributes, **named
        ).wait()
    else:
        attr = event.create_sparse_allreduce_attr(completion_fn=complete)
        event.sparse_allreduce(*sent, *UNUSED, torch.int64, dtype, op, attr=attr, **named).wait()
    return tuple(kept)


@pytest.mark.parametrize("face", FACES)
@spmd(2, on=("threads",))
def test_counts_say_how_much_of_a_buffer_is_sent(wire, face):
    indices, values = torch.tensor([5, 2, 5, -9, 99]), torch.arange(10.0)
    values[6:] = 1e9
    assert reduced(face, (indices, 3, values, 6)) == ([2, 5], [4.0, 6.0, 8.0, 12.0])
    assert reduced(face, (indices, 1, values, 3)) == ([5], [0.0, 2.0, 4.0])
    assert reduced(face, (indices, 0, values, 0)) == ([], [])


@pytest.mark.parametrize("face", FACES)
@spmd(3, on=("threads",))
def test_buffers_of_a_rank_without_rows_may_be_none(wire, face):
    sent = (None, 0, None, 0) if wire.rank == 1 else (torch.tensor([3]), 1, torch.ones(2), 2)
    assert reduced(face, sent) == ([3], [2.0, 2.0])
    assert reduced(face, (None, 0, None, 0)) == ([], [])


OPS = {
    # of 6 and 3, the rows that two ranks have
    "avg": (dist.ReduceOp.AVG, 4.5),
    "band": (dist.ReduceOp.BAND, 2),
    "bor": (dist.ReduceOp.BOR, 7),
    "bxor": (dist.ReduceOp.BXOR, 5),
    "sum": (dist.ReduceOp.SUM, 9),
    "prod": (dist.ReduceOp.PRODUCT, 18),
    "min": (dist.ReduceOp.MIN, 3),
    "max": (dist.ReduceOp.MAX, 6),
}


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("face", FACES)
@spmd(2, on=("threads",))
def test_every_reduction_of_wefts_and_its_reduce_op(wire, face, op):
    same, both = OPS[op]
    dtype = torch.float32 if op == "avg" else torch.int32
    indices = torch.tensor([3, 4 + wire.rank])
    values = torch.tensor([3 if wire.rank else 6, 8], dtype=dtype)
    alone = 4 if op == "avg" else 8  # a mean is over all ranks
    for name in (op, same):
        found = reduced(face, (indices, 2, values, 2), name, dtype)
        assert found == ([3, 4, 5], [both, alone, alone])


@pytest.mark.parametrize("face", FACES)
@spmd(3, on=("threads",))
def test_a_call_is_among_the_ranks_of_a_group(wire, face):
    with event.Communicator(wire).split(wire.rank == 1) as part:
        for group in (part, part.wire):
            found = reduced(face, (torch.tensor([3]), 1, torch.ones(1), 1), comm=group)
            assert found == ([3], [part.size()])


REFUSED = {
    "ring": "op is a function, which needs its operands in the order of ranks",
    "mask": "op is a function, which has no neutral element",
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("face", FACES)
def test_a_function_with_an_algorithm_that_cannot_serve_it(monkeypatch, face, name):
    """Where rows do not meet in rank order, or a row that is missing would take part."""
    monkeypatch.setenv("CCL_SPARSE_ALLREDUCE", name)

    def program(wire):
        sent = torch.tensor([1, 1 + wire.rank]), 2, torch.ones(2), 2
        text = f"algorithm {name} cannot serve this call: {REFUSED[name]}"
        with pytest.raises(weft.WeftError, match=text):
            reduced(face, sent, torch.add)
        return reduced(face, sent)

    assert run(2, program) == [([1, 2], [3.0, 1.0])] * 2
