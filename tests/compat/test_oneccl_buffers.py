"""A tensor or an array is a buffer; what cannot be one is refused, with the parameter's name."""

from __future__ import annotations

import array
import gc
import weakref

import numpy as np
import pytest
import torch

from weft import WeftError
from weft.compat.oneccl import request
from weft.compat.oneccl.buffers import dtype_of, index_dtype_of, seen, written
from weft.testing import spmd

FLOATS = [1.0, 2.0, 4.0, 8.0]

KINDS = {
    "tensor": lambda: torch.tensor(FLOATS),
    "rows": lambda: torch.tensor(FLOATS).view(2, 2),
    "with gradient": lambda: torch.tensor(FLOATS, requires_grad=True),
    "numpy": lambda: np.array(FLOATS, np.float32),
    "other memory": lambda: torch.frombuffer(array.array("f", FLOATS), dtype=torch.float32),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_memory_is_shared(kind):
    buffer = KINDS[kind]()
    tensor = written(buffer, 3, torch.float32, "recv_val_buf")
    assert tensor.tolist() == FLOATS[:3]
    tensor[1] = 16.0
    assert seen(buffer, None, torch.float32, "send_val_buf").tolist() == [1.0, 16.0, 4.0, 8.0]


@pytest.mark.parametrize("kind", [*KINDS, "read-only"])
@spmd(2, on=("threads",))
def test_any_buffer_is_sent_and_received_to(group, kind):
    make = KINDS["numpy" if kind == "read-only" else kind]
    source, target = make(), make()
    if kind == "read-only":
        source.flags.writeable = False
    indices, found = np.array([9, 3, 9, 60000], np.uint16), np.zeros(4, np.uint16)
    request.sparse_allreduce(
        *(indices, 4, source, 4, found, None, target, None, "uint16", "float", "sum"), comm=group
    ).wait()
    assert found[:3].tolist() == [3, 9, 60000]
    assert seen(target, 3, torch.float32, "x").tolist() == [4.0, 10.0, 16.0]


def test_what_is_only_read_may_be_read_only():
    frozen = np.array(FLOATS, np.float32)
    frozen.flags.writeable = False
    assert seen(frozen, 4, torch.float32, "x").tolist() == FLOATS
    with pytest.raises(WeftError, match="x is read-only"):
        written(frozen, 4, torch.float32, "x")


def test_memory_lives_as_long_as_it_is_seen():
    owner = np.arange(1000)
    gone = weakref.ref(owner)
    tensor = seen(owner, 1000, torch.int64, "x")
    del owner
    gc.collect()
    assert gone() is not None
    assert tensor[-1] == 999
    del tensor
    gc.collect()
    assert gone() is None


def test_names_of_dtypes():
    for name in ("int8", "uint8", "int32", "int64", "float16", "bfloat16", "float32", "float64"):
        dtype = getattr(torch, name)
        assert dtype_of(name, "val_dtype") is dtype_of(dtype, "val_dtype") is dtype
    for wrong in ("long double", "sum", int, 3, None):
        with pytest.raises(WeftError, match=r"val_dtype is .*: pass a torch dtype, or its name"):
            dtype_of(wrong, "val_dtype")
    for wrong in ("float32", "bool", "uint64", "complex64"):
        with pytest.raises(WeftError, match=r"ind_dtype is .*: pass indices of an integer type"):
            index_dtype_of(wrong, "ind_dtype")


HELD = np.zeros(6, np.float32)
WRONG = {
    "nothing": (None, 1, "x is a NoneType: pass a tensor"),
    "an object": (object(), 1, "x is a object: pass a tensor"),
    "bytes": (bytes(24), 1, "x is a bytes: pass a tensor or a NumPy array, such as torch.frombuff"),
    "an address": (HELD.ctypes.data, 1, "x is a int: pass a tensor or a NumPy array"),
    "a mask": (np.ma.masked_array(HELD), 1, "x is a masked array"),
    "short": (HELD, 7, "x holds 6 elements, the call says 7"),
    "another type": (HELD.astype(np.float64), 1, "x holds torch.float64, the call says torch.fl"),
    "steps": (HELD[::2], 1, "x is not contiguous: pass x.contiguous"),
    "backwards": (HELD[::-1], 1, "x cannot be a tensor: .* negative"),
    "torch steps": (torch.zeros(6)[::2], 1, r"x is not contiguous: pass x\.contiguous"),
    "sparse": (torch.zeros(3).to_sparse(), 1, "x is of layout torch.sparse_coo"),
    "no data": (torch.ones(6, device="meta"), 1, "x is on the meta device"),
    "foreign bytes": (HELD.astype(">f4"), 1, "x cannot be a tensor: .*byte order"),
    "words": (np.array(["a"]), 1, "x cannot be a tensor: "),
    "complex": (HELD.astype(np.complex64), 1, "x holds torch.complex64"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_cannot_be_a_buffer(what):
    buffer, count, text = WRONG[what]
    with pytest.raises(WeftError, match=text):
        seen(buffer, count, torch.float32, "x")
