"""What a program hands over by mistake on one rank: all are told, and the next call works."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import torch

import weft
from weft.compat.oneccl import event
from weft.testing import spmd


def kept():
    return event.create_sparse_allreduce_attr(
        completion_fn=lambda *given: given[-1].append(given[3].tolist()), fn_ctx=[]
    )


def through_event(group, **changed):
    """One call as the document writes it; its values."""
    sent = torch.tensor([5, 2, 5]), 3, torch.arange(6.0), 6
    arguments = [*sent, *[None] * 4, torch.int64, torch.float32, "sum", group, None, kept(), []]
    names = inspect.signature(event.sparse_allreduce).parameters
    given = dict(zip(names, arguments, strict=True)) | changed
    event.sparse_allreduce(*given.values()).wait()
    return given["attr"].fn_ctx[0]


def allocating(function):
    return {"attr": event.create_sparse_allreduce_attr(alloc_fn=function, fn_ctx=[[]])}


def in_inference_mode(count):
    with torch.inference_mode():
        return torch.empty(count)


def raises(*_):
    raise MemoryError("no room")


def nothing(*_):
    return None


def short(idx_count, idx_dtype, val_count, val_dtype, ctx):
    return np.zeros(idx_count, np.int64), np.zeros(val_count - 1, np.float32)


class LostStream:
    """A stream of a device that fell off."""

    def synchronize(self):
        raise RuntimeError("device lost")


make = event.create_sparse_allreduce_attr
SHARED = torch.empty(64)
EVENT = {
    "neither": ({"attr": make()}, "attr has neither completion_fn nor alloc_fn: .* set one"),
    "both": ({"attr": make(print, short)}, "attr has both completion_fn and alloc_fn"),
    "no function": ({"attr": make(completion_fn=3)}, "completion_fn is a int"),
    "no attr": ({"attr": None}, "attr is a NoneType"),
    "completion": ({"attr": make(raises)}, "MemoryError: no room"),
    "allocation": ({"attr": make(alloc_fn=raises)}, "MemoryError: no room"),
    "no buffers": ({"attr": make(alloc_fn=nothing)}, "alloc_fn returned a NoneType, not two"),
    "short": ({"attr": make(alloc_fn=short)}, r"alloc_fn's val_buf holds \d+ elements, the call"),
    "another type": (
        {"attr": make(alloc_fn=lambda n, _, m, *rest: (np.zeros(n, np.int32), np.zeros(m)))},
        r"alloc_fn's idx_buf holds torch.int32, the call says torch.int64",
    ),
    "no dependency": ({"deps": [3]}, r"deps\[0\] is a int: pass what sparse_allreduce returned"),
    "no dependencies": ({"deps": 3}, "deps is a int: pass a list"),
    "a dict": ({"deps": {"first": "second"}}, "deps is a dict: pass a list"),
    "none": ({"deps": None}, "deps is a NoneType: pass a list"),
    "a lost stream": ({"stream": LostStream()}, "RuntimeError: device lost"),
    "a stream": ({"stream": "fast"}, "stream is a str: pass a torch.Stream"),
    "names of no dtype": ({"ind_dtype": "big", "val_dtype": "real"}, "ind_dtype is 'big': pass"),
    "the same memory": (
        allocating(lambda n, _, m, *rest: (SHARED.view(torch.int64)[:n], SHARED[:m])),
        "alloc_fn's idx_buf and its val_buf are in the same memory",
    ),
    "inference": (
        allocating(lambda n, dtype, m, *rest: (torch.empty(n, dtype=dtype), in_inference_mode(m))),
        "alloc_fn's val_buf is of inference mode",
    ),
}


@pytest.mark.parametrize("what", EVENT)
@spmd(3, on=("threads",))
def test_one_rank_errs_and_all_are_told(group, what):
    changed, text = EVENT[what]
    with pytest.raises(weft.WeftError, match=text) as caught:
        through_event(group, **(changed if group.rank == 1 else {}))
    assert str(caught.value).startswith("rank 1: ")
    assert through_event(group) == [6.0, 9.0, 12.0, 18.0]


@spmd(3, on=("threads",))
def test_a_dependency_that_failed_is_told_to_all(group):
    """Also where it failed on one rank's group alone; what it was is in the text."""
    parts = [group.split([rank]) for rank in range(group.size)]
    own = parts[group.rank]
    attr = make(completion_fn=raises if group.rank == 1 else nothing)
    sent = torch.tensor([5]), 1, torch.ones(1), 1, *[None] * 4, torch.int64, torch.float32, "sum"
    before = [event.sparse_allreduce(*sent, own, attr=each) for each in (make(nothing), attr)]
    text = r"^rank 1: deps\[1\] failed: WeftError: .*MemoryError: no room"
    with pytest.raises(weft.WeftError, match=text):
        through_event(group, deps=before)
    assert through_event(group) == [6.0, 9.0, 12.0, 18.0]
    own.close()


@spmd(2, on=("threads",))
def test_what_a_rank_can_see_for_itself_is_raised_by_the_call(group):
    sent = torch.tensor([5]), 1, torch.ones(1), 1, *[None] * 4, torch.int64, torch.float32, "sum"
    text = "rank 1: attr has neither"
    if group.rank:
        with pytest.raises(weft.WeftError, match=text):
            event.sparse_allreduce(*sent, group, attr=make())
    else:
        made = event.sparse_allreduce(*sent, group, attr=kept())
        with pytest.raises(weft.WeftError, match=text):
            made.wait()
