"""What the three generations have alike, through each of them; and the second's callback."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import torch
import torch.distributed as dist

import weft
from weft.compat.oneccl import callback, event, request
from weft.testing import spmd

FACES = ["request", "callback", "event"]
UNUSED = [np.full(3, -7), object(), "anything", -4]  # what the last two ignore


def reduced(face, sent, op="sum", dtype=torch.float32, index_dtype=torch.int64, comm=None):
    """The result of one call: indices, values. `sent` is two buffers, each with its count."""
    kept = []

    def complete(indices, count, told, values, *rest):
        assert indices.dtype == told == index_dtype
        kept.extend((indices.tolist(), values.tolist()))

    asked = index_dtype, dtype, op
    if face == "request":
        ind, val = torch.zeros(64, dtype=index_dtype), torch.zeros(64, dtype=dtype)
        counts = torch.zeros(2, 1, dtype=torch.int64)
        request.sparse_allreduce(*sent, ind, counts[0], val, counts[1], *asked, comm=comm).wait()
        return ind[: counts[0].item()].tolist(), val[: counts[1].item()].tolist()
    if face == "callback":
        attributes = callback.Attributes(sparse_allreduce_completion_fn=complete)
        callback.sparse_allreduce(*sent, *UNUSED, *asked, attributes, comm=comm).wait()
    else:
        attr = event.create_sparse_allreduce_attr(completion_fn=complete)
        event.sparse_allreduce(*sent, *UNUSED, *asked, comm, attr=attr).wait()
    return tuple(kept)


@pytest.mark.parametrize("face", FACES)
@spmd(2, on=("threads",))
def test_counts_say_how_much_of_a_buffer_is_sent(group, face):
    indices, values = torch.tensor([5, 2, 5, -9, 99]), torch.arange(10.0)
    values[6:] = 1e9
    assert reduced(face, (indices, 3, values, 6)) == ([2, 5], [4.0, 6.0, 8.0, 12.0])
    assert reduced(face, (indices, 1, values, 3)) == ([5], [0.0, 2.0, 4.0])
    assert reduced(face, (indices, 0, values, 0)) == ([], [])


@pytest.mark.parametrize("face", FACES)
@spmd(3, on=("threads",))
def test_buffers_of_a_rank_without_rows_may_be_none(group, face):
    sent = (None, 0, None, 0) if group.rank == 1 else (torch.tensor([3]), 1, torch.ones(2), 2)
    assert reduced(face, sent) == ([3], [2.0, 2.0])
    assert reduced(face, (None, 0, None, 0)) == ([], [])


@spmd(2, on=("threads",))
def test_attributes_are_set_one_by_one_and_read_when_they_are_used(group):
    kept = {"first": [], "second": []}

    def complete(indices, index_count, index_dtype, values, value_count, value_dtype, *context):
        kept[context[-1]].append((indices.tolist(), values.tolist()))

    sent = torch.tensor([3]), 1, torch.ones(1), 1, *UNUSED, torch.int64, torch.float32, "sum"
    attr = event.create_sparse_allreduce_attr()
    attr.completion_fn = complete
    attr.fn_ctx = "first"
    made = event.sparse_allreduce(*sent, group, attr=attr)
    attr.completion_fn = attr.fn_ctx = None  # of what was started nothing changes
    made.wait()
    attributes = callback.Attributes()
    attributes.sparse_allreduce_completion_fn = complete
    attributes.sparse_allreduce_completion_ctx = "second"
    attributes.match_id = "table"
    started = callback.sparse_allreduce(*sent, attributes, comm=group)
    attributes.sparse_allreduce_completion_fn = print
    started.wait()
    assert kept == {"first": [([3], [2.0])], "second": [([3], [2.0])]}
    with pytest.raises(AttributeError, match="matchid"):
        attributes.matchid = "a name that there is not"


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
def test_every_reduction_of_wefts_and_its_reduce_op(group, face, op):
    same, both = OPS[op]
    dtype = torch.float32 if op == "avg" else torch.int32
    indices = torch.tensor([3, 4 + group.rank])
    values = torch.tensor([3 if group.rank else 6, 8], dtype=dtype)
    alone = 4 if op == "avg" else 8  # a mean is over all ranks
    for name in (op, same):
        found = reduced(face, (indices, 2, values, 2), name, dtype)
        assert found == ([3, 4, 5], [both, alone, alone])


@pytest.mark.parametrize("face", FACES)
@spmd(3, on=("threads",))
def test_a_call_is_among_the_ranks_of_a_group(group, face):
    parts = group.split([1]), group.split([0, 2])
    part = event.create_communicator(parts[group.rank != 1])
    for comm in (part, part.group):
        found = reduced(face, (torch.tensor([3]), 1, torch.ones(1), 1), comm=comm)
        assert found == ([3], [part.size()])
    part.group.close()


@pytest.mark.parametrize("face", FACES)
@spmd(2, on=("threads",))
def test_a_function_reduces(group, face):
    sent = torch.tensor([1, 1 + group.rank]), 2, torch.ones(2), 2
    assert reduced(face, sent, torch.add) == ([1, 2], [3.0, 1.0])


INDICES = [getattr(torch, name) for name in ("int8", "int16", "int32", "uint8", "uint16", "uint32")]


@pytest.mark.parametrize("face", FACES)
@spmd(2, on=("threads",))
def test_narrow_indices_come_back_as_they_were(group, face):
    """Widened to int64 on the way; what does not fit on one rank is an error on all."""
    for dtype in INDICES:
        highest = torch.iinfo(dtype).max
        indices = torch.tensor([highest, 5, highest - group.rank], dtype=dtype)
        assert narrow(face, indices) == [5, highest - 1, highest]
    indices = torch.tensor([300, 1]) if group.rank else torch.tensor([7, 1], dtype=torch.int8)
    text = r"^rank 0: index 300 of another rank does not fit torch.int8: pass indices of one dtype"
    with pytest.raises(weft.WeftError, match=text):
        narrow(face, indices)
    assert narrow(face, indices.clamp(max=3).to(torch.int8)) == [1, 3]


@pytest.mark.parametrize("face", FACES)
@spmd(2, on=("threads",))
def test_negative_indices_are_refused(group, face):
    """oneCCL 2021.3 took them, and they came out last."""
    for dtype in (torch.int8, torch.int64):
        indices = torch.tensor([3, -2 if group.rank else 2], dtype=dtype)
        with pytest.raises(weft.WeftError, match="rank 1: index -2 is negative"):
            narrow(face, indices)
    assert narrow(face, torch.tensor([2])) == [2]


def narrow(face, indices):
    """The indices of a result, in the dtype in which they were sent."""
    count = len(indices)
    sent = indices, count, torch.ones(count), count
    return reduced(face, sent, index_dtype=indices.dtype)[0]


def by_callback(fn, match_id="", **changed):
    """A call as the second generation's document writes it."""
    attributes = callback.Attributes(
        sparse_allreduce_completion_fn=fn, sparse_allreduce_completion_ctx="mine", match_id=match_id
    )
    sent = torch.tensor([7, 2, 7]), 3, torch.tensor([1.0, 2.0, 4.0]), 3
    given = [*sent, *UNUSED, "int64", "float32", "sum", attributes]
    names = list(inspect.signature(callback.sparse_allreduce).parameters)
    return callback.sparse_allreduce(*(dict(zip(names, given, strict=False)) | changed).values())


@spmd(1, 3)
def test_a_completion_callback_is_told_all_there_is(group):
    calls = []
    made = by_callback(lambda *arguments: calls.append(arguments), "table")
    made.wait()
    assert made.test()
    ((indices, count, index_dtype, values, value_count, value_dtype, fn_ctx, user_ctx),) = calls
    assert (indices.tolist(), values.tolist()) == ([2, 7], [2.0 * group.size, 5.0 * group.size])
    assert (count, value_count) == (2, 2)
    assert (index_dtype, value_dtype) == (torch.int64, torch.float32)
    assert fn_ctx == callback.FnContext(match_id="table")
    assert user_ctx == "mine"


def fails(*_):
    return 1


def raises(*_):
    raise MemoryError("no room")


def having(complete=None):
    return {"attributes": callback.Attributes(sparse_allreduce_completion_fn=complete)}


CALLBACK = {
    "no attributes": ({"attributes": None}, "attributes is None: pass callback.Attributes"),
    "no callback": (having(), "attributes has no sparse_allreduce_completion_fn: the result goes"),
    "no function": (having(complete=7), "sparse_allreduce_completion_fn is a int"),
    "a status": (
        having(complete=fails),
        "sparse_allreduce_completion_fn returned status 1: return Status.success",
    ),
    "another status": (
        having(complete=lambda *_: "bad"),
        "sparse_allreduce_completion_fn returned status 'bad'",
    ),
    "a tensor": (
        having(complete=lambda *_: torch.zeros(1)),
        r"sparse_allreduce_completion_fn returned status tensor\(\[0.\]\)",
    ),
    "an exception": (having(complete=raises), "MemoryError: no room"),
}


@pytest.mark.parametrize("what", CALLBACK)
@spmd(1, 3, on=("threads",))
def test_a_completion_callback_that_fails_on_one_rank_is_told_to_all(group, what):
    changed, text = CALLBACK[what]
    last = group.size - 1
    with pytest.raises(weft.WeftError, match=text) as caught:
        by_callback(lambda *_: 0, **(changed if group.rank == last else {})).wait()
    assert str(caught.value).startswith(f"rank {last}: ")
    if what == "an exception" and group.rank == last:
        assert isinstance(caught.value.__cause__, MemoryError)  # with the place where it was raised
    result = []
    by_callback(lambda *all: result.append(all)).wait()
    assert len(result) == 1


@spmd(2, on=("threads",))
def test_the_callback_must_not_call_the_group(group):
    def again(*_):
        weft.sparse_all_reduce((torch.tensor([1]), torch.ones(1)), group=group)

    with pytest.raises(weft.WeftError, match=r"^rank 0: sparse_all_reduce was called from inside"):
        by_callback(again).wait()
