"""What a process lends is read by machine code, to where it belongs, while it is lent."""

from __future__ import annotations

import ctypes
import os

import pytest
import torch

from weft.kernels import lent
from weft.kernels.compile import compiler
from weft.kernels.cpu_talk import lender
from weft.kernels.talk_table import ARENA
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
    compiler.make(lent.KEY)
    assert compiler.made(lent.KEY)


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


def test_what_is_mapped_here_is_found():
    there = Lending().record
    there[ARENA:] = torch.tensor([5000, 100, 90_000, 0]).numpy()
    assert lent.mapped(there, [(5000, 100), (5030, 10)]) == [90_000, 90_030]
    assert lent.mapped(there, [(5000, 10), (5095, 6)]) is None
    assert lent.mapped(there, [(4999, 10)]) is None
    assert lent.mapped(Lending().record, [(5000, 0)]) is None
