"""The first generation: every parameter of its document."""

from __future__ import annotations

import inspect
import threading
from datetime import timedelta

import numpy as np
import pytest
import torch

import weft
from weft.compat.oneccl import request
from weft.kernels.ops import DTYPES
from weft.testing import expected, spmd

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


def check(group, made, given, op="sum"):
    want = expected([part(rank) for rank in range(group.size)], op)
    made.wait()
    assert made.test()
    found, sums = (
        torch.as_tensor(given[name]).view(-1) for name in ("recv_ind_buf", "recv_val_buf")
    )
    assert int(given["recv_ind_count"][0]) == len(want)
    assert int(given["recv_val_count"][0]) == want.values.numel()
    assert found[: len(want)].tolist() == want.indices.tolist()
    assert sums[: want.values.numel()].tolist() == want.values.view(-1).tolist()
    assert found[len(want) :].eq(-7).all()  # nothing is written beyond the counts
    assert sums[want.values.numel() :].eq(-7).all()


@spmd(1, 2, 3, 4, 7, 8)
def test_buffers_and_counts_are_filled(group):
    given = arguments(group.rank)
    check(group, started(given), given)


@pytest.mark.parametrize("values", DTYPES, ids=str)
@spmd(2, on=("threads",))
def test_every_type_of_values(group, values):
    """For those of indices see test_oneccl_faces.py."""
    highest = torch.iinfo(torch.int64).max
    there = [highest, 5, highest - 1 - group.rank]
    sent = torch.tensor([[1, 0], [1, 1], [0, 1]]).to(values)
    given = arguments(
        group.rank,
        send_ind_buf=torch.tensor(there),
        send_ind_count=3,
        send_val_buf=sent,
        send_val_count=6,
        recv_ind_buf=torch.zeros(4, dtype=torch.int64),
        recv_val_buf=torch.zeros(8).to(values),
        value_dtype=values,
        reduction="max",
    )
    started(given).wait()
    assert given["recv_ind_buf"].tolist() == [5, highest - 2, highest - 1, highest]
    assert given["recv_val_buf"].tolist() == [1, 1, 0, 1, 0, 1, 1, 0]
    assert (given["recv_ind_count"].item(), given["recv_val_count"].item()) == (4, 8)


@spmd(2, on=("threads",))
def test_the_request_tracks_the_call(group):
    given = arguments(group.rank)
    if group.rank == 0:
        made = started(given)
        assert not made.test()  # the other rank has not called yet
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
        recv_ind_buf=indices,
        recv_val_buf=values,
    )
    started(given).wait()
    assert given["recv_ind_count"].item() == given["recv_val_count"].item() == 3
    assert indices.tolist() == [1, 2, 5, 1]
    assert values.tolist() == [3.0 * group.size, 1.0 * group.size, 2.0 * group.size, 3.0]


RESULT = "the result has {} indices and {} values: pass buffers of that size"
TIGHT = {
    "recv_ind_buf": (torch.full((4,), -7), f"holds 4 elements and recv_val_buf .*, {RESULT}"),
    "recv_val_buf": (torch.full((7,), -7.0), f"and recv_val_buf 7, {RESULT}"),
}


@pytest.mark.parametrize("name", TIGHT)
@spmd(1, 3, on=("threads",))
def test_what_does_not_fit_is_told_to_all_and_nothing_is_written(group, name):
    small, text = TIGHT[name]
    given = arguments(group.rank)
    tight = group.size - 1
    given |= {name: small.clone()} if group.rank == tight else {}
    want = expected([part(rank) for rank in range(group.size)])
    made = started(given)
    told = text.format(len(want), want.values.numel())
    with pytest.raises(weft.WeftError, match=f"^rank {tight}: .*{told}"):
        made.wait()
    assert made.test()
    assert all(given[end].eq(-7).all() for end in ("recv_ind_buf", "recv_val_buf"))
    assert given["recv_ind_count"].tolist() == [-1]
    given = arguments(group.rank)
    check(group, started(given), given)


def in_inference_mode():
    with torch.inference_mode():
        return torch.empty(8)


def frozen():
    place = np.zeros(60, np.float32)
    place.flags.writeable = False
    return place


ONE = torch.zeros(64, dtype=torch.uint8)


COUNTS = "recv_ind_count", "recv_val_count"
WRONG = {
    "the same memory": (
        {"recv_ind_buf": ONE.view(torch.int64), "recv_val_buf": ONE.view(torch.float32)},
        "the buffers for results are in the same memory",
    ),
    "a count of the other's among the values": (
        {"recv_val_buf": ONE.view(torch.float32), "recv_ind_count": ONE.view(torch.int64)[7]},
        "the buffers for results are in the same memory",
    ),
    "one place for both counts": (
        {
            "recv_ind_count": ONE.view(torch.int64)[:1],
            "recv_val_count": ONE.view(torch.int64)[:1],
        },
        "the buffers for results are in the same memory",
    ),
    "no memory": (
        {"recv_val_buf": torch.empty(8, device="meta")},
        "recv_val_buf is on the meta device, where nothing is held",
    ),
    "inference": ({"recv_val_buf": in_inference_mode()}, "recv_val_buf is of inference mode"),
    "an attribute": ({"attributes": 3}, "attributes is a int"),
    "a callback": (
        {"attributes": request.Attributes(sparse_allreduce_completion_fn=print)},
        "attributes has a completion_fn, which .*: pass none, or call callback.sparse_allreduce",
    ),
    "the reduction": ({"reduction": "median"}, "op 'median' is unknown"),
    "a count": ({"send_ind_count": 4.5}, "send_ind_count is 4.5: pass the number of elements"),
    "a negative count": ({"send_val_count": -3}, "send_val_count is -3"),
    "a rest of values": ({"send_val_count": 14}, "14 values do not divide among 5 indices"),
    "values alone": ({"send_ind_count": 0}, "15 values do not divide among 0 indices"),
    "too long": ({"send_ind_count": 15}, "send_ind_buf holds 5 elements, the call says 15"),
    "index_dtype": ({"index_dtype": "big"}, "index_dtype is 'big': pass a torch dtype"),
    "float indices": ({"index_dtype": "float"}, "index_dtype is torch.float32: pass indices"),
    "of uint64": ({"index_dtype": "uint64"}, "index_dtype is torch.uint64: pass indices of an"),
    "value_dtype": ({"value_dtype": torch.float64}, "send_val_buf holds torch.float32, the call"),
    "another index": ({"index_dtype": torch.int32}, "send_ind_buf holds torch.int64, the call"),
    "a recv's dtype": (
        {"recv_val_buf": torch.empty(60, dtype=torch.float64)},
        "recv_val_buf holds torch.float64, the call says torch.float32",
    ),
    "an index's dtype": (
        {"recv_ind_buf": torch.empty(60, dtype=torch.int32)},
        "recv_ind_buf holds torch.int32, the call says torch.int64",
    ),
    "nowhere": ({"recv_ind_buf": None}, "recv_ind_buf is a NoneType"),
    "read-only": ({"recv_val_buf": frozen()}, "recv_val_buf is read-only"),
    "a narrow count": (
        {"recv_ind_count": torch.zeros(1).int()},
        "recv_ind_count holds torch.int32, the call says torch.int64",
    ),
    "no room for a count": (
        {"recv_ind_count": torch.zeros(0).long()},
        "recv_ind_count holds 0 elements, the call says 1",
    ),
}


@pytest.mark.parametrize("what", WRONG)
@spmd(3, on=("threads",))
def test_one_rank_errs_and_all_are_told(group, what):
    changed, text = WRONG[what]
    given = arguments(group.rank) | (changed if group.rank == 2 else {})
    with pytest.raises(weft.WeftError, match=text) as caught:
        started(given).wait()
    assert "rank 2" in str(caught.value)
    assert all(given[count].numel() == 0 or given[count].max() <= 0 for count in COUNTS)
    given = arguments(group.rank)
    check(group, started(given), given)


@spmd(3, on=("threads",))
def test_functions_that_differ_are_told_to_all(group):
    given = arguments(group.rank, reduction=torch.sub if group.rank == 1 else torch.add)
    with pytest.raises(weft.WeftError, match=r"the ranks differ in op: .*add, rank 1 has .*sub"):
        started(given).wait()


def fails(left, right):
    raise KeyError("no such thing")


@spmd(3, on=("threads",))
def test_a_reduction_that_raises_is_told_to_all(group):
    with pytest.raises(weft.WeftError, match="no such thing"):
        started(arguments(group.rank, reduction=fails)).wait()
    given = arguments(group.rank)
    check(group, started(given), given)
