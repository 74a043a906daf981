"""Whatever has memory is a buffer; what cannot be one is refused, with the parameter's name."""

from __future__ import annotations

import array
import ctypes
import gc
import mmap
import weakref

import numpy as np
import pytest
import torch

from weft import WeftError
from weft.compat.oneccl import request
from weft.compat.oneccl.buffers import (
    NAMES,
    Address,
    dtype_in,
    dtype_of,
    is_dtype,
    one_integer,
    seen,
)
from weft.testing import spmd

FLOATS = [1.0, 2.0, 4.0, 8.0]


class OnlyDLPack:
    """What a tensor of another library is to us."""

    def __init__(self, tensor):
        self._tensor = tensor

    def __dlpack__(self, **named):
        return self._tensor.__dlpack__(**named)

    def __dlpack_device__(self):
        return self._tensor.__dlpack_device__()


class OldDLPack(OnlyDLPack):
    """Of before DLPack had versions."""

    def __dlpack__(self, *, stream=None):
        return self._tensor.__dlpack__()


def mapped(values):
    memory = mmap.mmap(-1, 16)
    memory[:] = np.array(values, np.float32).tobytes()
    return memory


KINDS = {
    "tensor": lambda: torch.tensor(FLOATS),
    "rows": lambda: torch.tensor(FLOATS).view(2, 2),
    "with gradient": lambda: torch.tensor(FLOATS, requires_grad=True),
    "numpy": lambda: np.array(FLOATS, np.float32),
    "array": lambda: array.array("f", FLOATS),
    "ctypes": lambda: (ctypes.c_float * 4)(*FLOATS),
    "memoryview": lambda: memoryview(array.array("f", FLOATS)),
    "bytearray": lambda: bytearray(np.array(FLOATS, np.float32).tobytes()),
    "mmap": lambda: mapped(FLOATS),
    "shared memory": lambda: memoryview(mapped(FLOATS)),  # as SharedMemory.buf is
    "dlpack": lambda: OnlyDLPack(torch.tensor(FLOATS)),
    "dlpack of NumPy": lambda: OnlyDLPack(np.array(FLOATS, np.float32)),
    "old dlpack": lambda: OldDLPack(torch.tensor(FLOATS)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_memory_is_shared(kind):
    buffer = KINDS[kind]()
    tensor = seen(buffer, 3, torch.float32, "send_val_buf", write=True)
    assert tensor.tolist() == FLOATS[:3]
    tensor[1] = 16.0
    again = seen(buffer, None, torch.float32, "send_val_buf")
    assert again.tolist() == [1.0, 16.0, 4.0, 8.0]
    if kind not in ("bytearray", "mmap", "shared memory"):
        assert dtype_in(buffer, "send_val_buf") == torch.float32


@pytest.mark.parametrize("kind", [*KINDS, "read-only", "address", "void", "pointer", "Address"])
@spmd(2, on=("threads",))
def test_whatever_has_memory_is_sent_and_received_to(group, kind):
    held = (ctypes.c_float * 4)(*FLOATS), (ctypes.c_float * 4)()
    addresses = {
        "address": lambda to: ctypes.addressof(held[to]),
        "void": lambda to: ctypes.c_void_p(ctypes.addressof(held[to])),
        "pointer": lambda to: ctypes.cast(held[to], ctypes.POINTER(ctypes.c_float)),
        "Address": lambda to: Address(ctypes.addressof(held[to]), 4, "float"),
    }
    if kind in addresses:
        source, target = map(addresses[kind], range(2))
    else:
        source = np.array(FLOATS, np.float32) if kind == "read-only" else KINDS[kind]()
        target = held[1] if kind == "read-only" else KINDS[kind]()
    if kind == "read-only":
        source.flags.writeable = False
    indices, found = (ctypes.c_uint16 * 4)(9, 3, 9, 60000), np.zeros(4, np.uint16)
    request.sparse_allreduce(
        *(indices, 4, source, 4, found, None, target, None, "uint16", "float", "sum"), comm=group
    ).wait()
    assert found[:3].tolist() == [3, 9, 60000]
    reached = held[1] if kind in addresses else target
    assert seen(reached, 3, torch.float32, "x").tolist() == [4.0, 10.0, 16.0]


def test_what_is_only_read_may_be_read_only():
    frozen = np.array(FLOATS, np.float32)
    frozen.flags.writeable = False
    for buffer in (frozen, frozen.tobytes(), OnlyDLPack(frozen)):
        assert seen(buffer, 4, torch.float32, "x").tolist() == FLOATS
        with pytest.raises(WeftError, match="x is read-only"):
            seen(buffer, 4, torch.float32, "x", write=True)


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


@pytest.mark.parametrize("name", NAMES)
def test_names_of_dtypes(name):
    dtype = dtype_of(name, "val_dtype")
    assert isinstance(dtype, torch.dtype)
    assert dtype_of(dtype, "val_dtype") is dtype
    assert is_dtype(name)
    assert dtype_of(np.dtype("f4"), "val_dtype") is torch.float32
    assert not is_dtype("sum")


HELD = np.zeros(6, np.float32)
WRONG = {
    "nothing": (None, 1, "x is a NoneType: pass a tensor"),
    "an object": (object(), 1, "x is a object: pass a tensor"),
    "a flag": (True, 1, "x is a bool"),
    "null": (0, 1, "x is 4 bytes at 0x0, where no torch.float32 can be"),
    "negative": (-8, 1, "x is 4 bytes at -0x8"),
    "crooked": (HELD.ctypes.data + 2, 1, "where no torch.float32 can be"),
    "endless": (HELD.ctypes.data, None, "x is an address of unknown extent"),
    "short": (HELD, 7, "x holds 6 elements, the call says 7"),
    "a short address": (Address(HELD.ctypes.data, 6, "float"), 7, "x holds 6 elements"),
    "another type": (HELD.astype(np.float64), 1, "x holds torch.float64, the call says torch.fl"),
    "another address": (Address(HELD.ctypes.data, 6, "int"), 1, "x holds torch.int32, the call"),
    "no count": (Address(HELD.ctypes.data, None, "float"), 1, "the count of x is None"),
    "no address": (Address(None, 6, "float"), 1, "the address of x is None: pass an integer"),
    "bytes of a type": (memoryview(HELD).cast("B"), 1, "x holds torch.uint8, the call says"),
    "a view of a type": (memoryview(bytearray(24)).cast("i"), 1, "x holds torch.int32, the call"),
    "no dtype": (Address(HELD.ctypes.data, 1, "long"), 1, "the dtype of x is 'long'"),
    "steps": (HELD[::2], 1, "x is an array that is not contiguous"),
    "torch steps": (torch.zeros(6)[::2], 1, r"x is a tensor that is not contiguous: pass x\.cont"),
    "sparse": (torch.zeros(3).to_sparse(), 1, "x is a tensor that is not contiguous"),
    "foreign bytes": (HELD.astype(">f4"), 1, "x holds '>f4', which torch has no dtype for"),
    "complex": (HELD.astype(np.complex64), 1, "x holds '<c8'"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_cannot_be_a_buffer(what):
    buffer, count, text = WRONG[what]
    with pytest.raises(WeftError, match=text):
        seen(buffer, count, torch.float32, "x")


def test_buffers_of_one_integer():
    assert one_integer(None, "x") is None
    for buffer in (
        torch.tensor(0),
        np.zeros(1, np.uint8),
        ctypes.c_size_t(0),
        array.array("q", [0]),
        ctypes.pointer(ctypes.c_size_t(0)),
    ):
        one_integer(buffer, "x").fill_(7)
        held = getattr(buffer, "contents", buffer)
        assert int(np.asarray(held).reshape(-1)[0]) == 7
    for bad in (torch.zeros(1), torch.zeros(2).int(), torch.zeros(1).bool()):
        with pytest.raises(WeftError, match=r"x holds . elements of .*: pass a buffer of one"):
            one_integer(bad, "x")
    with pytest.raises(WeftError, match="x is an address, which has no dtype"):
        one_integer(HELD.ctypes.data, "x")
