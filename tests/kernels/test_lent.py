"""What a process lends is read by machine code, to where it belongs, while it is lent."""

from __future__ import annotations

import ctypes
import os

import pytest
import torch

from weft import kernels
from weft.kernels import OPS, Op, lent
from weft.kernels.compile import compiler
from weft.kernels.cpu_talk import lender
from weft.wire.lent import _read

pytestmark = pytest.mark.skipif(_read() is None, reason="this system has no process_vm_readv")


class Lending:
    """This process, as one that lends."""

    def __init__(self):
        secret = os.urandom(16)
        self._guard = ctypes.create_string_buffer(secret, 16)
        self.record = lender(os.getpid(), ctypes.addressof(self._guard), secret)

    def wipe(self):
        ctypes.memset(self._guard, 0, 16)


@pytest.fixture(autouse=True)
def machine_code():
    for key in (lent.KEY, kernels.cpu.value_key(torch.float32, torch.float32, OPS["sum"])):
        compiler.make(key)
        assert compiler.made(key)


def test_reads_fill_what_they_are_for():
    there, source = Lending(), torch.arange(5000)
    first, second = torch.zeros(3000, dtype=torch.int64), torch.zeros(10, dtype=torch.int64)
    reads = [
        (there.record, source.data_ptr() + 8 * 1000, first),
        (there.record, source.data_ptr(), second),
    ]
    assert lent.fetch(reads) == 2
    assert torch.equal(first, source[1000:4000]) and torch.equal(second, source[:10])


def test_the_first_that_cannot_be_read_is_told():
    there, gone, source = Lending(), Lending(), torch.arange(100)
    gone.wipe()
    into = torch.zeros(3, 10, dtype=torch.int64)
    at = source.data_ptr()
    lenders = there.record, gone.record, there.record
    assert lent.fetch([(one, at, row) for one, row in zip(lenders, into, strict=True)]) == 1
    assert torch.equal(into[0], source[:10]) and not into[2].any()
    assert lent.fetch([(there.record, 8, into[0])]) == 0  # no memory is there


@pytest.mark.parametrize("room", [256, 4000, 10**6])
def test_rows_are_added_as_if_they_were_here(room):
    draw = torch.Generator().manual_seed(3)
    runs = [torch.randint(900, (400,), generator=draw).unique() for _ in range(3)]
    rows = [torch.randn(len(run), 64, generator=draw) for run in runs]
    union = kernels.union(runs)
    sums, expected = torch.empty(2, len(union.indices), 64)
    there, scratch = Lending(), torch.empty(room, dtype=torch.uint8)
    for slots, values in zip(union.slots, rows, strict=True):
        kernels.combine(expected, slots, values, OPS["sum"])
        at = values.data_ptr()
        assert lent.combine(sums, slots, there.record, at, OPS["sum"], scratch) is True
    assert torch.equal(sums, expected)


def test_rows_that_are_not_lent_any_more_are_not_added():
    there, values = Lending(), torch.ones(4, 8)
    there.wipe()
    slots, out = kernels.union([torch.arange(4)]).slots[0], torch.zeros(4, 8)
    scratch = torch.empty(64, dtype=torch.uint8)
    done = lent.combine(out, slots, there.record, values.data_ptr(), OPS["sum"], scratch)
    assert done is False and not out.any()


def test_a_function_is_left_to_the_caller():
    there, values = Lending(), torch.ones(4, 8)
    slots, out = kernels.union([torch.arange(4)]).slots[0], torch.zeros(4, 8)
    op = Op("mine", torch.add, builtin=False)
    at = values.data_ptr()
    assert (
        lent.combine(out, slots, there.record, at, op, torch.empty(64, dtype=torch.uint8)) is None
    )
