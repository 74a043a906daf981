"""The three documents of oneCCL's `sparse_allreduce`: each name, each sentence that can be held.

The first has a request, the second a completion callback in the call attributes, the third a
communicator, a stream, dependencies and an event. What is held elsewhere:

| claim | where |
|---|---|
| one interface, several approaches beneath | tests/sparse/test_algorithms.py: each gives the same |
| averaging gradients of an embedding | tests/ddp |
| counts; types of reduction; the ranks of a communicator | test_oneccl_faces.py |
| a callback that is missing, or returns another status | test_oneccl_faces.py |
| names of dtypes | test_oneccl_device.py, test_oneccl_buffers.py |
| another dtype than the buffers'; what does not fit | test_oneccl_request.py |
| buffers of the size of what is sent | test_oneccl_request.py: in place |
| contexts are passed; an operation comes after its `deps` | test_oneccl_event.py |
| oneCCL's own example, which the second document links to | test_oneccl_example.py |
"""

from __future__ import annotations

import inspect

import pytest
import torch

import weft
from weft.compat.oneccl import callback, event, request
from weft.testing import spmd

BUFFERS = "send_ind_buf send_ind_count send_val_buf send_val_count"
BUFFERS += " recv_ind_buf recv_ind_count recv_val_buf recv_val_count"
PARAMETERS = {
    request: f"{BUFFERS} index_dtype value_dtype reduction attributes",
    callback: f"{BUFFERS} index_dtype value_dtype reduction attributes",
    event: f"{BUFFERS} ind_dtype val_dtype rtype comm stream attr deps",
}


@pytest.mark.parametrize("module", PARAMETERS)
def test_the_parameters_and_their_order(module):
    """Lists of parameters; the third document's declaration."""
    parameters = inspect.signature(module.sparse_allreduce).parameters.values()
    documented = PARAMETERS[module].split()
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == documented
    required = documented[:8]
    assert all(p.default is p.empty for p in parameters if p.name in required)


def test_what_may_be_left_out():
    """Attributes are optional; the third document declares two defaults."""
    for module in (request, callback):
        assert inspect.signature(module.sparse_allreduce).parameters["attributes"].default is None
    last = inspect.signature(event.sparse_allreduce).parameters
    assert last["attr"].default is event.default_sparse_allreduce_attr
    assert not last["deps"].default
    assert last["stream"].default is None


NAMES = {
    request: "sparse_allreduce Request",
    callback: "sparse_allreduce Attributes ccl_status_t ccl_fn_context_t ccl_datatype_t",
    event: "sparse_allreduce Event Communicator SparseAllreduceAttr",
}


@pytest.mark.parametrize("module", NAMES)
def test_the_names(module):
    assert all(callable(getattr(module, name)) for name in NAMES[module].split())


def test_the_fields_of_attributes():
    """Each may be set when they are made and afterwards."""
    made = callback.Attributes(
        sparse_allreduce_completion_fn=print, sparse_allreduce_completion_ctx=7
    )
    made.sparse_allreduce_completion_fn = made.sparse_allreduce_completion_ctx = None
    attr = event.SparseAllreduceAttr(completion_fn=print, alloc_fn=None, fn_ctx=7)
    attr.completion_fn = attr.alloc_fn = attr.fn_ctx = None
    assert isinstance(event.default_sparse_allreduce_attr, event.SparseAllreduceAttr)
    assert isinstance(callback.ccl_status_success, callback.ccl_status_t)
    assert int(callback.ccl_status_success) == 0
    assert isinstance(torch.int64, callback.ccl_datatype_t)


def rows_of(rank):
    """Indices that repeat on a rank and between ranks, in no order; two values a row."""
    indices = torch.tensor([7, 2, 7, 10 + rank])
    return indices, torch.arange(8.0).view(4, 2) + rank


def expected(size):
    found = {}
    for rank in range(size):
        for index, row in zip(rows_of(rank)[0].tolist(), rows_of(rank)[1], strict=True):
            found[index] = found[index] + row if index in found else row
    return sorted(found), torch.cat([found[index] for index in sorted(found)]).tolist()


def sending(rank):
    indices, values = rows_of(rank)
    return indices, indices.numel(), values, values.numel()


class Kept:
    """A user's context: what a callback copies goes here."""

    def __init__(self):
        self.calls, self.indices, self.values = 0, None, None

    def copy(self, indices, values):
        self.calls += 1
        self.indices, self.values = indices.clone(), values.clone()

    def result(self):
        assert self.calls == 1
        return self.indices.view(-1).tolist(), self.values.view(-1).tolist()


def completed(indices, count, dtype, values, value_count, value_dtype, fn_ctx, user_ctx):
    """As the second document declares it."""
    assert (indices.numel(), indices.dtype) == (count, dtype)
    assert (values.numel(), values.dtype) == (value_count, value_dtype)
    assert isinstance(dtype, callback.ccl_datatype_t)
    assert isinstance(fn_ctx, callback.ccl_fn_context_t)
    user_ctx.copy(indices, values)
    return callback.ccl_status_success


def completion_fn(indices, count, dtype, values, value_count, value_dtype, user_context):
    """As the third document declares it: it returns nothing."""
    assert (indices.numel(), indices.dtype) == (count, dtype)
    assert (values.numel(), values.dtype) == (value_count, value_dtype)
    user_context.copy(indices, values)


def alloc_fn(count, dtype, value_count, value_dtype, user_context):
    """As the third document declares it; its two out-parameters are what it returns."""
    user_context.calls += 1
    user_context.indices = torch.empty(count, dtype=dtype)
    user_context.values = torch.empty(value_count, dtype=value_dtype)
    return user_context.indices, user_context.values


UNUSED = [None, 0, None, 0]


def by_request(sent, index, value, op):
    room = torch.zeros(64, dtype=index), torch.zeros(64, dtype=value)
    counts = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    made = request.sparse_allreduce(*sent, room[0], counts[0], room[1], counts[1], index, value, op)
    made.wait()
    assert isinstance(made, request.Request) and made.test()
    return [part[: count.item()].tolist() for part, count in zip(room, counts, strict=True)]


def by_callback(sent, index, value, op, unused=UNUSED):
    kept = Kept()
    attributes = callback.Attributes(
        sparse_allreduce_completion_fn=completed, sparse_allreduce_completion_ctx=kept
    )
    made = callback.sparse_allreduce(*sent, *unused, index, value, op, attributes)
    made.wait()
    assert made.test()
    return [*kept.result()]


def by_completion_fn(sent, index, value, op, unused=UNUSED):
    kept = Kept()
    attr = event.SparseAllreduceAttr(completion_fn=completion_fn, fn_ctx=kept)
    made = event.sparse_allreduce(*sent, *unused, index, value, op, attr=attr)
    made.wait()
    assert isinstance(made, event.Event) and made.test()
    return [*kept.result()]


def by_alloc_fn(sent, index, value, op, unused=UNUSED):
    kept = Kept()
    attr = event.SparseAllreduceAttr(alloc_fn=alloc_fn, fn_ctx=kept)
    event.sparse_allreduce(*sent, *unused, index, value, op, attr=attr).wait()
    return [*kept.result()]


FACES = [by_request, by_callback, by_completion_fn, by_alloc_fn]
IGNORING = FACES[1:]


@pytest.mark.parametrize("face", FACES)
@spmd(1, 2, 3, 4)
def test_the_rows_of_all_ranks_are_reduced_and_given_to_all(group, face):
    """Third document, second paragraph; two tensors stand for a sparse one."""
    found = face(sending(group.rank), torch.int64, torch.float32, "sum")
    assert found == [*expected(group.size)]


@pytest.mark.parametrize("face", FACES)
@spmd(2, on=("threads",))
def test_dtypes_are_those_of_what_is_sent_and_received(group, face):
    indices, values = rows_of(group.rank)
    for index in (torch.int32, torch.int64):
        for value in (torch.float64, torch.bfloat16, torch.int32):
            sent = indices.to(index), 4, values.to(value), 8
            assert face(sent, index, value, "sum") == [*expected(2)]  # exact in all of these


@pytest.mark.parametrize("face", IGNORING)
@spmd(2, on=("threads",))
def test_buffers_to_receive_are_ignored_since_the_second_document(group, face):
    untouched = torch.full((3,), -7)
    for unused in (UNUSED, [untouched, object(), "anything", -4]):
        found = face(sending(group.rank), torch.int64, torch.float32, "sum", unused)
        assert found == [*expected(2)]
    assert untouched.tolist() == [-7] * 3


@spmd(2, on=("threads",))
def test_one_of_two_callbacks_is_required_by_the_third_document(group):
    """The declared default of `attr` has neither."""
    sent = *sending(group.rank), *UNUSED, torch.int64, torch.float32, "sum", group, None
    with pytest.raises(weft.WeftError, match=r"^rank \d: attr has neither"):
        event.sparse_allreduce(*sent).wait()


class Stream:
    def __init__(self, write):
        self.synchronize = write


@spmd(2, on=("threads",))
def test_an_operation_is_of_a_stream_if_one_is_given(group):
    """What is queued there is written before weft reads it."""
    indices, values = rows_of(group.rank)
    late, kept = torch.zeros_like(values), Kept()
    attr = event.SparseAllreduceAttr(completion_fn=completion_fn, fn_ctx=kept)
    sent = indices, 4, late, 8, *UNUSED, torch.int64, torch.float32, "sum"
    event.sparse_allreduce(*sent, group, Stream(lambda: late.copy_(values)), attr).wait()
    assert [*kept.result()] == [*expected(2)]


@spmd(4, on=("threads",))
def test_rows_that_ranks_have_in_common_need_less_than_a_gather(group):
    """Motivation: ranks that have the same rows need no gather; one call has other ways."""
    rows, sent = (torch.arange(4000), torch.ones(4000, 4)), {}
    for algorithm in ("gather", "split"):
        before = group.traffic.bytes
        weft.sparse_all_reduce(rows, algorithm=algorithm)
        sent[algorithm] = group.traffic.bytes - before
    assert sent["split"] < 0.75 * sent["gather"]
