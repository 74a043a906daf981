"""What a program hands over by mistake on one rank: all are told, and the next call works."""

from __future__ import annotations

import concurrent.futures
import ctypes
import inspect
import threading

import numpy as np
import pytest
import torch

import weft
from weft.compat.oneccl import event, operation, request
from weft.testing import spmd

VALUES = (ctypes.c_float * 6)(*range(6))


class NoExport:
    """A tensor of another library that cannot be shared."""

    def __dlpack__(self, **named):
        raise BufferError("it is on the moon")

    def __dlpack_device__(self):
        return 1, 0


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


def failed():
    future = concurrent.futures.Future()
    future.set_exception(KeyError("lost"))
    return future


make = event.create_sparse_allreduce_attr
SHARED = torch.empty(64)
EVENT = {
    "neither": ({"attr": make()}, "attr has neither completion_fn nor alloc_fn: .* set one"),
    "both": ({"attr": make(print, short)}, "attr has both completion_fn and alloc_fn"),
    "no function": ({"attr": make(completion_fn=3)}, "completion_fn is a int"),
    "no attr": ({"attr": None}, "attr is a NoneType"),
    "a mode": ({"attr": make(nothing, None, None, "all")}, "coalesce_mode is 'all': use one of"),
    "completion": ({"attr": make(raises)}, "MemoryError: no room"),
    "allocation": ({"attr": make(alloc_fn=raises)}, "MemoryError: no room"),
    "no buffers": ({"attr": make(alloc_fn=nothing)}, "alloc_fn returned a NoneType, not two"),
    "short": ({"attr": make(alloc_fn=short)}, r"alloc_fn's val_buf holds \d+ elements, the call"),
    "another type": (
        {"attr": make(alloc_fn=lambda n, _, m, *rest: (np.zeros(n, np.int32), np.zeros(m)))},
        r"alloc_fn's idx_buf holds torch.int32, the call says torch.int64",
    ),
    "a dependency": ({"deps": [failed()]}, r"deps\[0\] failed: KeyError: 'lost'"),
    "no dependency": ({"deps": [3]}, r"deps\[0\] is a int: pass what can be waited for"),
    "no dependencies": ({"deps": 3}, "deps is a int: pass a list"),
    "a later dependency": ({"deps": [event.Event(), failed()]}, r"deps\[1\] failed: KeyError"),
    "a lost stream": ({"stream": LostStream()}, "stream failed: RuntimeError: device lost"),
    "a stream": ({"stream": "fast"}, "stream is a str: pass a torch.Stream"),
    "names of no dtype": ({"ind_dtype": "long", "val_dtype": "real"}, "ind_dtype is 'long': pass"),
    "types of Python": ({"ind_dtype": int, "val_dtype": float}, "ind_dtype is <class 'int'>: pass"),
    "numbers of an enum": ({"ind_dtype": 3, "val_dtype": 7}, "ind_dtype is 3: pass a torch dtype"),
    "no export": ({"send_val_buf": NoExport()}, "BufferError: it is on the moon"),
    "a mask": ({"send_val_buf": np.ma.masked_array(VALUES)}, "send_val_buf is a masked array"),
    "no data": (
        {"send_val_buf": torch.ones(6, device="meta")},
        "send_val_buf is on the meta device",
    ),
    "no such memory": (
        {"send_val_buf": ctypes.addressof(VALUES), "send_val_count": 3 << 62},
        "bytes at 0x.*, where no torch.float32 can be",
    ),
    "a pointer to others": (
        {"send_val_buf": ctypes.cast(VALUES, ctypes.POINTER(ctypes.c_int))},
        "send_val_buf holds torch.int32, the call says torch.float32",
    ),
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


@spmd(2, on=("threads",))
def test_wrong_dtypes_are_not_taken_for_a_reduction_and_a_group(group):
    """Of the short overloads, too: a group that is none could not be told."""
    dtypes = ("long", "real") if group.rank else ("int64", "float")
    sent = torch.tensor([5]), 1, torch.ones(1), 1, *[None] * 4
    with pytest.raises(weft.WeftError, match="rank 1: ind_dtype is 'long': pass a torch dtype"):
        event.sparse_allreduce(*sent, *dtypes, "sum", group, attr=kept()).wait()
    assert through_event(group) == [4.0, 6.0, 8.0, 12.0]


@spmd(1, 2, on=("threads",))
def test_types_of_numpy_and_typed_pointers_serve(group):
    pointer = ctypes.cast(VALUES, ctypes.POINTER(ctypes.c_float))
    for dtypes in (np.int64, np.float32), (np.dtype("i8"), np.dtype("f4")):
        named = dict(zip(("ind_dtype", "val_dtype"), dtypes, strict=True))
        found = through_event(group, send_val_buf=pointer, **named)
        assert found == [2.0 * group.size, 3.0 * group.size, 4.0 * group.size, 6.0 * group.size]
    attr, indices = kept(), torch.tensor([5, 2, 5])  # the pointer's own dtype
    event.sparse_allreduce(indices, 3, pointer, 6, *[None] * 4, "sum", group, attr=attr).wait()
    assert attr.fn_ctx == [found]


FOREVER = {"a future of torch": torch.futures.Future(), "what has a wait": threading.Event()}


@pytest.fixture
def sooner(monkeypatch):
    """What a call waits for has 3 s of the 30 s of the groups below: much room for the others."""
    monkeypatch.setattr(operation, "_SOONER", 0.1)


@pytest.mark.usefixtures("sooner")
@pytest.mark.parametrize("what", FOREVER)
@spmd(3, on=("threads",), timeout=30.0)
def test_what_never_ends_is_told_to_all(group, what):
    text = r"rank 1: deps\[0\], a \w+, has not ended within 3 s"
    through_event(group)  # all begin at the same moment
    with pytest.raises(weft.WeftError, match=text):
        through_event(group, deps=[FOREVER[what]] if group.rank == 1 else [])
    assert through_event(group) == [6.0, 9.0, 12.0, 18.0]


@pytest.mark.usefixtures("sooner")
@spmd(2, on=("threads",), timeout=30.0)
def test_calls_that_wait_for_each_other_end(group):
    """Each rank's call on one group waits for its call on the other, in opposite orders."""
    with event.Communicator(group).split(0) as other:
        through_event(group, comm=other)
        first, second = (group, other) if group.rank else (other, group)
        indices, ones = torch.tensor([1]), torch.ones(1)
        arguments = (indices, 1, ones, 1, *[None] * 4, "sum")
        gate = concurrent.futures.Future()
        begun = event.sparse_allreduce(*arguments, first, attr=kept(), deps=[gate])
        after = event.sparse_allreduce(*arguments, second, attr=kept(), deps=[begun])
        for made in (begun, after):
            with pytest.raises(weft.Error, match=r"has not ended within|failed"):
                made.wait()
    assert through_event(group) == [4.0, 6.0, 8.0, 12.0]


BARE = {
    "int": ctypes.addressof,
    "void": lambda held: ctypes.c_void_p(ctypes.addressof(held)),
    "pointer": lambda held: ctypes.cast(held, ctypes.POINTER(held._type_)),
}


@spmd(2, on=("threads",))
def test_a_buffer_without_dtype_needs_the_dtypes_named(group):
    """The typed overload cannot know what None or an address is of."""
    indices, count = (ctypes.c_int64 * 3)(5, 2, 5), 3
    for buffers, what in (
        ((None, 0, None, 0), "send_ind_buf is None"),
        ((indices, count, None, 0), "send_val_buf is None"),
        ((BARE["int"](indices), count, VALUES, 6), "send_ind_buf is an address"),
        ((indices, count, BARE["void"](VALUES), 6), "send_val_buf is an address"),
    ):
        sent = buffers if group.rank else (indices, count, VALUES, 6)
        text = f"rank 1: {what}, which has no dtype: name the dtypes in the call"
        with pytest.raises(weft.WeftError, match=text):
            event.sparse_allreduce(*sent, *[None] * 4, "sum", group, attr=kept()).wait()


@pytest.mark.parametrize("kind", BARE)
@spmd(3, on=("threads",))
def test_an_address_for_results_holds_as_much_as_is_sent(group, kind):
    """The other ranks have room, and nothing is written there either."""
    room = (ctypes.c_int64 * 9)(*[-7] * 9), (ctypes.c_float * 9)(*[-7] * 9)
    to = [BARE[kind](held) for held in room] if group.rank == 1 else room

    def call(indices):
        request.sparse_allreduce(
            *(indices, 3, torch.ones(3), 3, to[0], None, to[1], None, "int64", "float", "sum"),
            comm=group,
        ).wait()

    text = "rank 1: recv_ind_buf holds 3 elements and recv_val_buf 3, the result has 9 indices and"
    with pytest.raises(weft.WeftError, match=text):
        call(torch.arange(3) + 10 * group.rank)
    assert list(room[0]) == [-7] * 9 and list(room[1]) == [-7.0] * 9
    call(torch.tensor([5, 8, 2]))
    assert list(room[0]) == [2, 5, 8] + [-7] * 6 and list(room[1]) == [3.0] * 3 + [-7.0] * 6
