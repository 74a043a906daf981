"""The first generation: every parameter of its document, and every attribute."""

from __future__ import annotations

import ctypes
import inspect
import logging
import threading
from datetime import timedelta

import pytest
import torch

import weft
from weft.compat.oneccl import callback, request
from weft.compat.oneccl.operation import ONECCL
from weft.kernels.ops import DTYPES
from weft.sparse import last_call
from weft.testing import expected, run, spmd

WIDTH = 3


def part(rank):
    """Unequal counts, none from rank 5 on, repeated indices, no order."""
    draw = torch.Generator().manual_seed(rank)
    count = max(0, 9 - 2 * rank)
    indices = torch.randint(12, (count,), generator=draw)
    return weft.Rows(indices, torch.randint(-4, 5, (count, WIDTH), generator=draw).float())


def arguments(rank, **changed):
    indices, values = part(rank).indices, part(rank).values
    given = {
        "send_ind_buf": indices,
        "send_ind_count": indices.numel(),
        "send_val_buf": values,
        "send_val_count": values.numel(),
        "recv_ind_buf": torch.full((20,), -7),
        "recv_ind_count": torch.tensor([-1]),
        "recv_val_buf": torch.full((20, WIDTH), -7.0),
        "recv_val_count": torch.tensor([-1]),
        "index_dtype": torch.int64,
        "value_dtype": torch.float32,
        "reduction": "sum",
        "attributes": None,
    }
    assert list(given) == list(inspect.signature(request.sparse_allreduce).parameters)[:12]
    return given | changed


def started(given):
    return request.sparse_allreduce(*given.values())  # by position, in the document's order


def check(group, made, given, op="sum", scale=1):
    want = expected([part(rank) for rank in range(group.size)], op)
    made.wait()
    assert made.test()
    assert (made.recv_ind_count, made.recv_val_count) == (len(want), want.values.numel())
    found, sums = (
        torch.as_tensor(given[name]).view(-1) for name in ("recv_ind_buf", "recv_val_buf")
    )
    assert int(given["recv_ind_count"][0]) == len(want)
    assert int(given["recv_val_count"][0]) == want.values.numel()
    assert found[: len(want)].tolist() == want.indices.tolist()
    assert sums[: want.values.numel()].tolist() == (want.values * scale).view(-1).tolist()
    assert found[len(want) :].eq(-7).all()  # nothing is written beyond the counts
    assert sums[want.values.numel() :].eq(-7).all()


@spmd(1, 2, 3, 4, 7, 8)
def test_buffers_and_counts_are_filled(group):
    given = arguments(group.rank)
    check(group, started(given), given)


INDICES = [getattr(torch, f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)]


TYPES = [(index, torch.float32) for index in INDICES] + [(torch.int64, each) for each in DTYPES]


@pytest.mark.parametrize("index, values", TYPES, ids=str)
@spmd(2, on=("threads",))
def test_every_type_of_indices_and_values(group, index, values):
    highest = torch.iinfo(index).max
    there = [highest, 5, highest - 1 - group.rank]
    sent = torch.tensor([[1, 0], [1, 1], [0, 1]]).to(values)
    given = arguments(
        group.rank,
        send_ind_buf=torch.tensor(there, dtype=index),
        send_ind_count=3,
        send_val_buf=sent,
        send_val_count=6,
        recv_ind_buf=torch.zeros(4).to(index),
        recv_val_buf=torch.zeros(8).to(values),
        index_dtype=index,
        value_dtype=values,
        reduction="max",
    )
    made = started(given)
    made.wait()
    assert given["recv_ind_buf"].tolist() == [5, highest - 2, highest - 1, highest]
    assert given["recv_val_buf"].tolist() == [1, 1, 0, 1, 0, 1, 1, 0]
    assert (made.recv_ind_count, made.recv_val_count) == (4, 8)


@spmd(2, on=("threads",))
def test_the_request_tracks_the_call(group):
    given = arguments(group.rank)
    if group.rank == 0:
        made = started(given)
        assert not made.test()  # the other rank has not called yet
        assert not made
        assert made.recv_ind_count is None
        assert not made.cancel()
        for timeout in (0.02, timedelta(milliseconds=20)):
            with pytest.raises(weft.StillRunning):
                made.wait(timeout)
        turn.set()
    else:
        turn.wait(10)
        made = started(given)
    check(group, made, given)


turn = threading.Event()


@spmd(1, 2, on=("threads",))
def test_in_place_where_it_fits(group):
    """The document's own case: buffers of the dimension of what is sent."""
    indices, values = torch.tensor([5, 2, 5, 1]), torch.arange(4.0)
    given = arguments(
        group.rank,
        send_ind_buf=indices,
        send_ind_count=4,
        send_val_buf=values,
        send_val_count=4,
        recv_ind_buf=indices.data_ptr(),
        recv_val_buf=ctypes.c_void_p(values.data_ptr()),
    )
    made = started(given)
    made.wait()
    assert made.recv_ind_count == made.recv_val_count == 3
    assert indices.tolist() == [1, 2, 5, 1]
    assert values.tolist() == [3.0 * group.size, 1.0 * group.size, 2.0 * group.size, 3.0]


RESULT = "the result has {} indices and {} values: pass buffers of that size"
TIGHT = {
    "recv_ind_buf": (torch.full((4,), -7), f"holds 4 elements and recv_val_buf .*, {RESULT}"),
    "recv_val_buf": (torch.full((7,), -7.0), f"and recv_val_buf 7, {RESULT}"),
    "recv_val_count": (torch.zeros(1, dtype=torch.int8), "a count of torch.int8 cannot be {1}"),
}


@pytest.mark.parametrize("name", TIGHT)
@spmd(1, 3, on=("threads",))
def test_what_does_not_fit_is_told_to_all_and_nothing_is_written(group, name):
    small, text = TIGHT[name]
    values = part(group.rank).values.repeat(1, 60)  # so many that an int8 cannot count them
    given = arguments(
        group.rank,
        send_val_buf=values,
        send_val_count=values.numel(),
        recv_val_buf=torch.full((20 * WIDTH * 60,), -7.0),
    )
    tight = group.size - 1
    given |= {name: small.clone()} if group.rank == tight else {}
    want = expected([part(rank) for rank in range(group.size)])
    made = started(given)
    told = text.format(len(want), want.values.numel() * 60)
    with pytest.raises(weft.WeftError, match=f"^rank {tight}: .*{told}"):
        made.wait()
    assert made.test()
    assert made.recv_ind_count is made.recv_val_count is None
    assert all(given[end].eq(-7).all() for end in ("recv_ind_buf", "recv_val_buf"))
    assert given["recv_ind_count"].tolist() == [-1]
    given = arguments(group.rank)
    check(group, started(given), given)


@spmd(1, 2, on=("threads",))
def test_attributes(group):
    seen = []

    def half(in_buf, in_count, in_dtype, context):
        seen.append((in_buf.numel(), in_count, in_dtype, context))
        return in_buf.to(torch.float64) / 2

    def back(in_buf, in_count, in_dtype, out_buf, out_count, out_dtype, context):
        seen.append((in_dtype, out_dtype, context.match_id))
        out_buf.copy_(in_buf * 4)
        assert out_count.tolist() == [in_count] == [out_buf.numel()]
        return request.Status.success

    def reduce(in_buf, in_count, inout_buf, out_count, dtype, context):
        assert out_count.tolist() == [in_count] == [in_buf.numel()] == [inout_buf.numel()]
        seen.append((dtype, context))
        inout_buf += in_buf

    attributes = request.Attributes(
        prologue_fn=half,
        epilogue_fn=back,
        reduction_fn=reduce,
        synchronous=True,
        to_cache=True,
        priority=3,
        match_id="embedding",
    )
    given = arguments(group.rank, reduction="custom", attributes=attributes)
    made = started(given)
    assert made.test()  # synchronous
    check(group, made, given, scale=2)
    count = part(group.rank).values.numel()
    context = request.FnContext("embedding", 0)
    assert seen[0] == (count, count, torch.float32, context)
    assert (torch.float64, context) in seen
    assert seen[-1] == (torch.float64, torch.float32, "embedding")


@spmd(1, on=("threads",))
def test_priority_says_once_that_it_has_no_effect(group):
    """Whoever sets it sets it for all calls."""
    attributes, logged = request.Attributes(), []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())
    logging.getLogger("weft").addHandler(handler)
    try:
        for attributes.priority in (0, 41, 41):
            started(arguments(0, attributes=attributes)).wait()
    finally:
        logging.getLogger("weft").removeHandler(handler)
    assert [text.partition(":")[0] for text in logged] == ["priority=41 has no effect"]


def fails(*_):
    return request.Status.runtime_error


def raises(*_):
    raise KeyError("no such thing")


def miscounts(in_buf, in_count, inout_buf, out_count, dtype, context):
    out_count.fill_(2)


def returns_rows(in_buf, in_count, inout_buf, out_count, dtype, context):
    return inout_buf.add_(in_buf)


def long_name(*_):
    return request.Status.success


long_name.__qualname__ = 99 * "long"


def in_inference_mode():
    with torch.inference_mode():
        return torch.empty(8)


ONE = torch.zeros(64, dtype=torch.uint8)


def having(**attributes):
    return {"attributes": request.Attributes(**attributes)}


WRONG = {
    "the same memory": (
        {"recv_ind_buf": ONE.view(torch.int64), "recv_val_buf": ONE.view(torch.float32)},
        "recv_ind_buf and recv_val_buf are in the same memory",
    ),
    "a count among the indices": (
        {"recv_ind_buf": ONE.view(torch.int64), "recv_ind_count": ONE.view(torch.int64)[7]},
        "recv_ind_buf and recv_ind_count are in the same memory",
    ),
    "a count among the values": (
        {"recv_val_buf": ONE.view(torch.float32), "recv_val_count": ONE[60:61]},
        "recv_val_buf and recv_val_count are in the same memory",
    ),
    "a count of the other's among the values": (
        {"recv_val_buf": ONE.view(torch.float32), "recv_ind_count": ONE[60:61]},
        "recv_val_buf and recv_ind_count are in the same memory",
    ),
    "one place for both counts": (
        {"recv_ind_count": ONE[:1], "recv_val_count": ONE[:1]},
        "recv_ind_count and recv_val_count are in the same memory",
    ),
    "no memory": (
        {"recv_val_buf": torch.empty(8, device="meta")},
        "recv_val_buf is on the meta device, where nothing is held",
    ),
    "inference": ({"recv_val_buf": in_inference_mode()}, "recv_val_buf is of inference mode"),
    "an attribute": ({"attributes": 3}, "attributes is a int"),
    "another generation's": (
        {"attributes": callback.Attributes(sparse_allreduce_completion_fn=print)},
        "attributes is callback.Attributes, .* pass .* or call callback.sparse_allreduce",
    ),
    "match_id": (having(match_id="x" * 129), "match_id is 'xxx"),
    "another match_id": (  # the longest there is, for a function with a long name
        having(match_id="\x01" * 128, reduction_fn=long_name) | {"reduction": "custom"},
        "different calls: .*, rank 2 has .*match_id=.*x01",
    ),
    "no function": (having(prologue_fn=3), "prologue_fn is a int"),
    "a prologue": (having(prologue_fn=raises), "KeyError: 'no such thing'"),
    "a prologue's count": (
        having(prologue_fn=lambda b, *_: b[1:]),
        "prologue_fn returned 14 values, not a tensor of 15 values",
    ),
    "a prologue's dtype": (having(prologue_fn=lambda b, *_: b.double()), "pass an epilogue_fn"),
    "an epilogue": (
        having(epilogue_fn=fails),
        "epilogue_fn returned status <Status.runtime_error: 4>",
    ),
    "an epilogue's count": (
        having(epilogue_fn=lambda *all: all[4].zero_() and None),
        r"epilogue_fn made 0 values of \d+: make as many",
    ),
    "no custom function": ({"reduction": "custom"}, "the reduction is custom, and there is no"),
    "the reduction": ({"reduction": "median"}, "op 'median' is unknown"),
    "a count": ({"send_ind_count": 4.5}, "send_ind_count is 4.5: pass the number of elements"),
    "a negative count": ({"send_val_count": -3}, "send_val_count is -3"),
    "a rest of values": ({"send_val_count": 14}, "14 values do not divide among 5 indices"),
    "values alone": ({"send_ind_count": 0}, "15 values do not divide among 0 indices"),
    "too long": ({"send_ind_count": 15}, "send_ind_buf holds 5 elements, the call says 15"),
    "index_dtype": ({"index_dtype": "long"}, "index_dtype is 'long': pass a torch dtype"),
    "float indices": ({"index_dtype": "float"}, "index_dtype is torch.float32: indices are of"),
    "value_dtype": ({"value_dtype": torch.float64}, "send_val_buf holds torch.float32, the call"),
    "a recv's dtype": (
        {"recv_val_buf": torch.empty(60, dtype=torch.float64)},
        "recv_val_buf holds torch.float64, the call says torch.float32",
    ),
    "an index's dtype": (
        {"recv_ind_buf": torch.empty(60, dtype=torch.int32)},
        "recv_ind_buf holds torch.int32, the call says torch.int64",
    ),
    "nowhere": ({"recv_ind_buf": None}, "recv_ind_buf is a NoneType"),
    "read-only": ({"recv_val_buf": bytes(800)}, "recv_val_buf is read-only"),
    "two counts": ({"recv_ind_count": torch.zeros(2).int()}, "recv_ind_count holds 2 elements"),
}


@pytest.mark.parametrize("what", WRONG)
@spmd(3, on=("threads",))
def test_one_rank_errs_and_all_are_told(group, what):
    changed, text = WRONG[what]
    given = arguments(group.rank) | (changed if group.rank == 2 else {})
    with pytest.raises(weft.WeftError, match=text) as caught:
        started(given).wait()
    assert "rank 2" in str(caught.value)
    if what == "a prologue" and group.rank == 2:
        assert isinstance(caught.value.__cause__, KeyError)  # with the place where it was raised
    assert given["recv_ind_count"] is None or given["recv_ind_count"].max() <= 0
    given = arguments(group.rank)
    check(group, started(given), given)


@pytest.mark.parametrize("keep", ["in_buf", "inout_buf"])
@spmd(3, on=("threads",))
def test_a_reduction_has_what_came_first_in_inout(group, keep):
    """A rank's own rows in the order they were sent, then rank by rank."""

    def one_of_both(in_buf, in_count, inout_buf, out_count, dtype, context):
        if keep == "in_buf":
            inout_buf.copy_(in_buf)

    given = arguments(
        group.rank,
        send_ind_buf=torch.tensor([4, 4]),
        send_ind_count=2,
        send_val_buf=torch.tensor([1.0, 2.0]) + 10 * group.rank,
        send_val_count=2,
        reduction="custom",
        attributes=request.Attributes(reduction_fn=one_of_both),
    )
    started(given).wait()
    assert given["recv_val_buf"][0, 0] == (22.0 if keep == "in_buf" else 1.0)
    assert given["send_val_buf"].tolist() == [1.0 + 10 * group.rank, 2.0 + 10 * group.rank]


@spmd(3, on=("threads",))
def test_a_reduction_that_fails_is_told_to_all(group):
    for function, text in (
        (fails, "reduction_fn returned status <Status.runtime_error: 4>"),
        (lambda *_: 77, "reduction_fn returned status 77"),
        (returns_rows, r"reduction_fn returned status tensor\(.*: return a Status, or nothing"),
        (miscounts, r"reduction_fn made 2 values of \d+: make as many"),
        (raises, "no such thing"),
    ):
        attributes = request.Attributes(reduction_fn=function)
        given = arguments(group.rank, reduction="custom", attributes=attributes)
        with pytest.raises(weft.WeftError, match=text):
            started(given).wait()


@spmd(3, on=("threads",))
def test_what_differs_is_told_to_all(group):
    odd = group.rank == 1
    function = request.Attributes(reduction_fn=miscounts if odd else returns_rows)
    for changed, text in (
        (
            {"attributes": function, "reduction": "custom"},
            "the ranks differ in op: .*returns_rows, rank 1 has .*miscounts",
        ),
        (
            {"attributes": request.Attributes(match_id="b" if odd else "a")},
            "different calls: .*match_id='a'",
        ),
    ):
        with pytest.raises(weft.WeftError, match=text):
            started(arguments(group.rank, **changed)).wait()
    small = part(group.rank).indices.to(torch.int8 if odd else torch.int64)
    changed = {"send_ind_buf": small, "index_dtype": small.dtype}
    changed["recv_ind_buf"] = torch.zeros(20, dtype=small.dtype)
    with pytest.raises(weft.WeftError, match=r"rank 1 has sparse_allreduce of torch.int8 indices"):
        started(arguments(group.rank, **changed)).wait()


CHOICES = {
    "ring": "split",
    "mask": "split",
    "allgatherv": "gather",
    "allgather": "gather",
    "basic": "split",
    "size": "split",
    "doubling": "doubling",
    " mask ": "split",
}


def test_every_name_of_oneccls_is_a_choice():
    assert set(ONECCL) < set(CHOICES)


@pytest.mark.parametrize("name, ours", CHOICES.items())
def test_the_environment_chooses_an_algorithm(monkeypatch, name, ours):
    monkeypatch.setenv("CCL_SPARSE_ALLREDUCE", name)

    def program(group):
        given = arguments(group.rank)
        check(group, started(given), given)
        return last_call().algorithm

    assert run(3, program) == [ours] * 3


ENVIRONMENTS = {
    "nonsense": ("split", "magic", "rank 1: CCL_SPARSE_ALLREDUCE='magic' is unknown: use one"),
    "another": (
        "ring",
        "doubling",
        "the ranks differ in algorithm: ranks 0, 2 have split, rank 1 has",
    ),
    "none": ("split", "", "the ranks differ in algorithm: ranks 0, 2 have split, rank 1 has auto"),
}


@pytest.mark.parametrize("what", ENVIRONMENTS)
@spmd(3, on=("processes",))
def test_one_rank_of_another_environment(group, what):
    """Each process has its own."""
    said, odd, text = ENVIRONMENTS[what]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CCL_SPARSE_ALLREDUCE", odd if group.rank == 1 else said)
        with pytest.raises(weft.WeftError, match=text):
            started(arguments(group.rank)).wait()
        patch.setenv("CCL_SPARSE_ALLREDUCE", said)
        given = arguments(group.rank)
        check(group, started(given), given)
        assert last_call().algorithm == "split"
