"""The second generation: every parameter of its document; results come by callback."""

from __future__ import annotations

import inspect
import threading

import numpy as np
import pytest
import torch

import weft
from weft.compat.oneccl import callback
from weft.testing import expected, spmd

WIDTH = 2


def part(rank):
    """Unequal counts, none from rank 4 on, repeated indices, no order."""
    draw = torch.Generator().manual_seed(rank)
    count = max(0, 8 - 2 * rank)
    indices = torch.randint(9, (count,), generator=draw)
    return weft.Rows(indices, torch.randint(-4, 5, (count, WIDTH), generator=draw).float())


def started(rank, fn, ctx=None, match_id="", **changed):
    indices, values = part(rank).indices.numpy(), part(rank).values.numpy()
    given = {
        "send_ind_buf": indices,
        "send_ind_count": indices.size,
        "send_val_buf": values,
        "send_val_count": values.size,
        "recv_ind_buf": None,
        "recv_ind_count": None,
        "recv_val_buf": None,
        "recv_val_count": None,
        "index_dtype": "int64",
        "value_dtype": "float",
        "reduction": "sum",
        "attributes": callback.Attributes(
            sparse_allreduce_completion_fn=fn,
            sparse_allreduce_completion_ctx=ctx,
            match_id=match_id,
        ),
    }
    assert list(given) == list(inspect.signature(callback.sparse_allreduce).parameters)[:12]
    return callback.sparse_allreduce(*(given | changed).values())


@spmd(1, 2, 3, 4, 7, 8)
def test_the_callback_gets_the_result(wire):
    calls = []

    def done(*arguments):
        calls.append(arguments)
        return callback.Status.success

    made = started(wire.rank, done, ctx="mine", match_id="table")
    made.wait()
    want = expected([part(rank) for rank in range(wire.size)])
    ((indices, count, index_dtype, values, value_count, value_dtype, fn_ctx, user_ctx),) = calls
    assert made.test()
    assert indices.tolist() == want.indices.tolist()
    assert values.tolist() == want.values.view(-1).tolist()
    assert (count, value_count) == (len(want), want.values.numel())
    assert (index_dtype, value_dtype) == (torch.int64, torch.float32)
    assert fn_ctx == callback.FnContext(match_id="table", offset=0)
    assert user_ctx == "mine"


turn = threading.Event()


@spmd(2, on=("threads",))
def test_the_call_returns_at_once(wire):
    calls = []
    if wire.rank == 0:
        made = started(0, lambda *all: calls.append(all))
        assert not made.test() and not calls  # the other rank has not called yet
        with pytest.raises(weft.StillRunning):
            made.wait(0.02)
        turn.set()
    else:
        turn.wait(10)
        made = started(1, lambda *all: calls.append(all))
    made.wait()
    assert len(calls) == 1


@spmd(2, on=("threads",))
def test_recv_parameters_are_ignored(wire):
    calls = []
    mine = {
        "recv_ind_buf": np.full(1, -7),
        "recv_ind_count": 3,
        "recv_val_buf": "anything",
        "recv_val_count": object(),
    }
    started(wire.rank, lambda *all: calls.append(all), **mine).wait()
    assert len(calls) == 1
    assert mine["recv_ind_buf"].tolist() == [-7]


@spmd(2, on=("threads",))
def test_every_reduction_and_the_common_attributes(wire):
    def add(in_buf, in_count, inout_buf, out_count, dtype, context):
        assert context == callback.FnContext(match_id="table", offset=0)
        inout_buf += in_buf
        return 0

    def negate(in_buf, in_count, in_dtype, out_buf, out_count, out_dtype, context):
        out_buf.copy_(-in_buf)

    parts = [part(rank) for rank in range(wire.size)]
    for reduction, ours, given, sign in (
        ("prod", "prod", {}, 1),
        ("min", "min", {"priority": 7, "to_cache": 1}, 1),
        ("max", "max", {"synchronous": 1}, 1),
        ("custom", "sum", {"reduction_fn": add, "match_id": "table"}, 1),
        ("sum", "sum", {"prologue_fn": lambda b, *_: -b}, -1),
        ("sum", "sum", {"epilogue_fn": negate}, -1),
    ):
        result = []
        attributes = callback.Attributes(
            sparse_allreduce_completion_fn=lambda *all: all[-1].append(all[3].tolist()),
            sparse_allreduce_completion_ctx=result,
            **given,
        )
        made = started(wire.rank, None, reduction=reduction, attributes=attributes)
        if given.get("synchronous"):
            assert made.test()
        made.wait()
        assert result == [(sign * expected(parts, ours).values.view(-1)).tolist()]


def fails(*_):
    return callback.Status.out_of_resource


def raises(*_):
    raise MemoryError("no room")


WRONG = {
    "no attributes": ({"attributes": None}, "attributes is None: pass callback.Attributes"),
    "no callback": (
        {"attributes": callback.Attributes()},
        "sparse_allreduce_completion_fn is not set: results go to it alone",
    ),
    "no function": (
        {"attributes": callback.Attributes(sparse_allreduce_completion_fn=7)},
        "sparse_allreduce_completion_fn is a int",
    ),
    "a status": (
        {"attributes": callback.Attributes(sparse_allreduce_completion_fn=fails)},
        "sparse_allreduce_completion_fn returned status <Status.out_of_resource: 1>",
    ),
    "another status": (
        {"attributes": callback.Attributes(sparse_allreduce_completion_fn=lambda *_: "bad")},
        "sparse_allreduce_completion_fn returned status 'bad'",
    ),
    "an exception": (
        {"attributes": callback.Attributes(sparse_allreduce_completion_fn=raises)},
        "MemoryError: no room",
    ),
}


@pytest.mark.parametrize("what", WRONG)
@spmd(1, 3, on=("threads",))
def test_one_rank_errs_and_all_are_told(wire, what):
    changed, text = WRONG[what]
    last = wire.size - 1
    with pytest.raises(weft.WeftError, match=text) as caught:
        started(wire.rank, lambda *_: 0, **(changed if wire.rank == last else {})).wait()
    assert str(caught.value).startswith(f"rank {last}: ")
    if what == "an exception" and wire.rank == last:
        assert isinstance(caught.value.__cause__, MemoryError)  # with the place where it was raised
    result = []
    started(wire.rank, lambda *all: result.append(all)).wait()
    assert len(result) == 1


@spmd(2, on=("threads",))
def test_the_callback_must_not_call_the_group(wire):
    def again(*_):
        weft.sparse_all_reduce((torch.tensor([1]), torch.ones(1)), group=wire)

    with pytest.raises(weft.WeftError, match=r"^rank 0: sparse_all_reduce was called from inside"):
        started(wire.rank, again).wait()
