"""`weft.wire.arena`: what is lent from it is read without system calls, and goes with its owner."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
from pathlib import Path

import pytest
import torch

from weft.kernels import lent
from weft.kernels.compile import compiler
from weft.kernels.talk_table import ARENA, GUARD
from weft.wire import arena
from weft.wire.arena import HEAD, ROOM, Arena
from weft.wire.lent import Guard, Reach, _read, may_trace, yama
from weft.wire.memory import Pool

pytestmark = pytest.mark.skipif(
    not arena.WORKS or _read() is None or ((yama() or 0) > 0 and not may_trace()),
    reason="this machine does not let processes read each other's memory",
)

HOST = b"h" * 16
NOBODY = 2**31 - 1  # no process has that number


@pytest.fixture
def lending():
    """An arena, its guard, and the reach of whoever is told of it."""
    own = Arena.made()
    guard = Guard(own)
    reach = Reach.of(guard.card(HOST), HOST)
    yield own, guard, reach
    own.close()


@pytest.fixture(params=["machine code", "Python"])
def read(request):
    """`read(reach, address, into)`, in one way or the other."""
    compiler.make(lent.KEY)

    def by_code(reach, address, into):
        return lent.fetch([(reach.record, address, into)]) == 1

    def by_python(reach, address, into):
        return reach.read(address, into.numpy().data)

    return by_code if request.param == "machine code" else by_python


def without_calls(reach):
    """The same reach, but that no system call can read anything by it."""
    assert reach.record[ARENA + 1] == ROOM
    reach.record[0] = reach._process = NOBODY
    return reach


def maps():
    """The mappings of arenas in this process."""
    gc.collect()
    return Path("/proc/self/maps").read_text().count("memfd:weft-arena")


def numbers(memory):
    return memory.copy_(torch.arange(len(memory)).to(torch.uint8))


def test_what_lies_in_it_is_read_without_a_system_call(lending, read):
    own, _, reach = lending
    memory = numbers(own.take(5000))
    into = torch.zeros(3000, dtype=torch.uint8)
    assert read(without_calls(reach), memory.data_ptr() + 1000, into)
    assert torch.equal(into, memory[1000:4000])
    memory.fill_(7)
    assert read(reach, memory.data_ptr(), into) and bool((into == 7).all())


def test_what_lies_elsewhere_or_reaches_beyond_it_is_read_by_system_calls(lending, read):
    own, _, reach = lending
    other, into = numbers(torch.empty(100, dtype=torch.uint8)), torch.zeros(100, dtype=torch.uint8)
    assert read(reach, other.data_ptr(), into) and torch.equal(into, other)
    end = own.address + ROOM - 50
    without_calls(reach)
    assert not read(reach, other.data_ptr(), into)
    assert not read(reach, end, into) and not read(reach, own.address - 1, into)
    assert read(reach, end, into[:50])


def test_what_is_not_lent_any_more_is_not_read(lending, read):
    own, guard, reach = lending
    memory, into = numbers(own.take(100)), torch.zeros(100, dtype=torch.uint8)
    assert read(without_calls(reach), memory.data_ptr(), into)
    guard.wipe()
    assert not read(reach, memory.data_ptr(), into)


def test_what_lies_in_it_is_seen_here(lending):
    own, guard, reach = lending
    compiler.make(lent.KEY)
    memory = numbers(own.take(5000))
    record, at = without_calls(reach).record, memory.data_ptr()
    (first, second) = lent.mapped(record, [(at, 100), (at + 1000, 4000)])
    assert ctypes.string_at(first, 100) == bytes(memory[:100])
    assert ctypes.string_at(second, 4000) == bytes(memory[1000:])
    nothing = torch.empty(0, dtype=torch.uint8)  # who reads as much of it hears that it is lent
    assert lent.fetch([(record, at, nothing)]) == 1
    guard.wipe()
    assert lent.fetch([(record, at, nothing)]) == 0


def test_peers_may_not_write(lending):
    own, _, reach = lending
    memory = numbers(own.take(100))
    here = int(reach.record[ARENA + 2]) + memory.data_ptr() - own.address
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        ctypes.memset(here, 0, 1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGSEGV


def test_it_is_gone_when_nobody_holds_it_and_holds_no_file(nothing_left):
    before = maps()
    with nothing_left():
        own = Arena.made()
        guard = Guard(own)
        reach = Reach.of(guard.card(HOST), HOST)
        memory = own.take(100)
        record = reach.record
        assert maps() == before + 3
        own.close()
        own.close()
        assert not own.usable and own.take(100) is None
        numbers(memory)  # what was taken stays
        del memory
        assert maps() == before + 2
        held = record[ARENA:]  # a view holds as much
        del record
        reach.forget()
        assert maps() == before + 2
        del held
        assert maps() == before + 1  # the guard's
        guard.wipe()
        del guard, own
        assert maps() == before


@pytest.mark.parametrize("what", ["closed", "another file", "another size", "another guard"])
def test_what_is_no_arena_any_more_is_not_mapped(lending, tmp_path, read, what):
    own, _, reach = lending
    memory, into = numbers(own.take(100)), torch.zeros(100, dtype=torch.uint8)
    if what == "closed":
        own.close()
    elif what == "another file":
        with (tmp_path / "file").open("w+b") as file:
            file.truncate(HEAD + ROOM)
            os.dup2(file.fileno(), own.fd)
    elif what == "another size":
        fd = os.memfd_create("weft-arena")
        os.truncate(fd, HEAD)
        os.dup2(fd, own.fd)
        os.close(fd)
    else:
        other = Arena.made()
        Guard(other)
        os.dup2(other.fd, own.fd)
        other.close()
    before = maps()
    assert read(reach, memory.data_ptr(), into) and torch.equal(into, memory)  # by system calls
    assert reach.record[ARENA + 1] == 0 and maps() == before


@pytest.mark.parametrize("fails", ["memfd_create", "truncate"])
def test_where_there_is_none_memory_comes_from_elsewhere(monkeypatch, nothing_left, fails):
    def refuse(*_):
        raise OSError("no")

    monkeypatch.setattr(os, fails, refuse)
    with nothing_left():
        assert Arena.made() is None
    guard = Guard(None)
    reach = Reach.of(guard.card(HOST), HOST)
    assert reach is not None and reach.record[ARENA + 1] == 0


def test_a_pool_lends_from_it_as_long_as_there_is_room(lending, monkeypatch):
    own, _, _ = lending
    pool = Pool()
    pool.arena = own

    def inside(lease):
        return 0 <= lease.tensor.data_ptr() - own.address < ROOM

    assert not inside(pool.lease(5000))
    first = pool.lease(5000, lent=True)
    assert inside(first) and pool.lent == pool.peak == 10_000
    place = first.tensor.data_ptr()
    second = pool.lease(5000, lent=True)
    assert inside(second) and abs(second.tensor.data_ptr() - place) >= 5000
    first.release()
    assert not inside(pool.lease(5000))  # not what is for peers
    again = pool.lease(6000, lent=True)
    assert again.tensor.data_ptr() == place
    large = [pool.lease(ROOM // 4, lent=True) for _ in range(4)]
    assert [inside(each) for each in large] == [True, True, True, False]
    large.pop().release()
    assert not inside(pool.lease(ROOM // 4))
    large.pop().release()
    pool.drain()
    assert inside(pool.lease(ROOM // 4, lent=True))
    own.close()
    second.release()
    assert not inside(pool.lease(5000, lent=True))


def test_a_forked_child_leaves_its_parents_alone(lending, read):
    own, guard, reach = lending
    pool = Pool()
    pool.arena = own
    pool.lease(5000, lent=True).release()
    memory, into = numbers(own.take(100)), torch.zeros(100, dtype=torch.uint8)
    child = os.fork()
    if child == 0:
        try:
            lease = pool.lease(5000, lent=True)
            inside = 0 <= lease.tensor.data_ptr() - own.address < ROOM
            guard.wipe()
            own.close()
            os._exit(inside)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert read(without_calls(reach), memory.data_ptr(), into) and torch.equal(into, memory)


RANKS = 3


def test_a_card_says_where_an_arena_is_and_that_there_is_none(lending):
    own, guard, reach = lending
    assert len(guard.card(HOST)) == len(Guard().card(HOST)) == Reach.SIZE
    assert bytes(own.head.memory[:16]) == reach.record[GUARD + 1 : GUARD + 3].tobytes()
