"""`weft.wire.tcp.shm`: segments give memory, and messages through them arrive whole."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import random
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import weft
from weft.testing import processes, run
from weft.wire.tcp import shm
from weft.wire.tcp.shm import Segment, exchange

PAGE = mmap.PAGESIZE

pytestmark = pytest.mark.skipif(Segment.make(PAGE) is None, reason="memfd_create is refused here")


@pytest.fixture
def segment():
    made = Segment.make(64 * PAGE)
    yield made
    made.close()


def test_memory_that_is_in_use_is_never_given_twice(segment):
    generator, held = random.Random(3), {}
    for step in range(2000):
        if held and generator.random() < 0.5:
            offset = generator.choice(list(held))
            nbytes = held.pop(offset)
            assert set(segment.memory[offset : offset + nbytes].tolist()) == {offset % 251}
            segment.free(offset)
            continue
        nbytes = generator.randrange(1, 9 * PAGE)
        offset = segment.allocate(nbytes)
        if offset is None:
            assert sum(-(-each // PAGE) for each in held.values()) + 9 > 64 // 4, step
            continue
        assert offset % PAGE == 0 and offset + nbytes <= segment.nbytes
        segment.memory[offset : offset + nbytes] = offset % 251
        held[offset] = nbytes
    for offset in held:
        segment.free(offset)
    assert segment.allocate(64 * PAGE) == 0  # all of it is one piece again
    assert segment.allocate(1) is None


def test_pages_that_are_not_used_for_a_while_go_back(segment):
    def blocks():
        return os.fstat(segment.fd).st_blocks * 512

    large = segment.allocate(60 * PAGE)
    segment.memory[large : large + 60 * PAGE] = 1
    segment.free(large)
    assert blocks() >= 60 * PAGE
    for _ in range(100):
        small = segment.allocate(2 * PAGE)
        segment.memory[small : small + 2 * PAGE] = 1
        segment.free(small)
    assert blocks() <= 4 * PAGE
    kept = segment.allocate(PAGE)
    segment.memory[kept] = 7
    segment.drain()
    assert blocks() <= PAGE and segment.memory[kept] == 7


def test_what_is_reserved_is_neither_given_nor_released():
    segment = Segment.make(64 * PAGE, reserved=4 * PAGE)
    segment.memory[: 4 * PAGE] = 7
    large = segment.allocate(60 * PAGE)
    assert large == 4 * PAGE and segment.allocate(1) is None
    segment.memory[large:] = 1
    segment.free(large)
    for _ in range(100):
        segment.free(segment.allocate(PAGE))
    segment.drain()
    assert os.fstat(segment.fd).st_blocks * 512 == 4 * PAGE
    assert bool((segment.memory[: 4 * PAGE] == 7).all())
    segment.close()
    assert Segment.make(64 * PAGE, reserved=33 * PAGE).reserved == 0


def test_a_closed_segment_gives_no_memory_and_keeps_what_it_gave(segment):
    offset = segment.stage(torch.arange(100))
    held = segment.memory[offset : offset + 800]
    segment.close()
    assert segment.allocate(1) is None
    assert held.view(torch.int64).tolist() == list(range(100))


def test_a_segment_that_is_closed_between_its_allocation_and_the_copy_stays_mapped(
    segment, monkeypatch
):
    """By the handler of a signal, which may close a wire at any point."""
    allocate = segment.allocate

    def allocate_and_close(nbytes):
        offset = allocate(nbytes)
        segment.close()
        return offset

    monkeypatch.setattr(segment, "allocate", allocate_and_close)
    assert segment.stage(torch.arange(100)) == 0
    assert segment.memory is None


def shown(segments, descriptors=None):
    """What two ranks see of each other's segments after they were exchanged."""
    sockets = socket.socketpair()

    def show(rank):
        with sockets[rank]:
            deadline = time.monotonic() + 10.0
            return exchange(segments[rank], {1 - rank: sockets[rank]}, deadline)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(show, range(2)))


def test_ranks_see_what_others_write(segment):
    with contextlib.closing(Segment.make(4 * PAGE)) as other:
        segments, its = shown([other, segment])
    assert [*segments] == [1] and [*its] == [0]
    offset = segment.stage(torch.arange(5))
    assert segments[1].memory[offset : offset + 40].view(torch.int64).tolist() == [0, 1, 2, 3, 4]


def test_a_segment_that_could_be_cut_off_is_refused(segment):
    class Loose:
        nbytes = 4 * PAGE
        fd = os.memfd_create("loose", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)

    os.truncate(Loose.fd, Loose.nbytes)
    assert shown([segment, Loose]) == shown([None, segment]) == [{}, {}]
    fcntl.fcntl(Loose.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    assert [[*segments] for segments in shown([segment, Loose])] == [[1], [0]]
    os.close(Loose.fd)


SIZES = (0, 1, 65_535, 65_536, 65_537, 131_072, 131_073, 1_000_003)


def content(rank, peer, nbytes):
    return torch.arange(nbytes, dtype=torch.int64).add(17 * rank + 3 * peer).to(torch.uint8)


def every_way(group):
    """Of all sizes, from leased memory and from private, into tensors and anywhere."""
    for nbytes in SIZES:
        for leased in (False, True):
            for anywhere in (False, True):
                lease = group.lease(nbytes * group.size)
                mine = [content(group.rank, peer, nbytes) for peer in range(group.size)]
                if leased:
                    for peer, memory in enumerate(lease.tensor.view(group.size, nbytes)):
                        mine[peer] = memory.copy_(mine[peer])
                sends = [(peer, mine[peer]) for peer in group.peers]
                recvs = [
                    (peer, nbytes + 9 if anywhere else torch.empty(nbytes, dtype=torch.uint8))
                    for peer in group.peers
                ]
                pending = group.post(sends, recvs)
                got = pending.wait()
                lease.release()
                for peer, each in zip(group.peers, got, strict=True):
                    right = content(peer, group.rank, nbytes)
                    assert torch.equal(each[:nbytes], right), (nbytes, leased, anywhere)
                pending.release()


@pytest.mark.parametrize("room", [None, 4 * PAGE, 40 * PAGE])
def test_messages_arrive_whatever_room_there_is(room):
    run(3, with_room, room, on="processes")


def with_room(group, room):
    if room is None:
        every_way(group)
        return
    make = Segment.make
    shm.Segment.make = classmethod(lambda cls, reserved: make(room, reserved))
    part = group.split(range(group.size))
    shm.Segment.make = make
    every_way(part)
    part.close()


def more_than_a_socket_takes(group):
    """Frames that the socket does not take leave without another call of their sender's."""
    count, mine = 12_000, group.lease(70_000).tensor
    for _ in range(count if group.rank else 0):
        group.post([(0, mine)])
    aside = group.split([0, 1])
    for _ in range(0 if group.rank else count):
        group.post((), [(1, mine)]).wait()
    aside.all_gather_bytes(b"here", bytes)
    aside.close()


def test_frames_leave_by_themselves():
    run(2, more_than_a_socket_takes, on="processes")


def same_to_all(group):
    """A tensor that goes to several is copied once, and its copy makes room for the next."""
    group.wire.segment.drain()
    nbytes, descriptor = 5 << 20, group.wire.segment.fd  # more than is acknowledged late
    mine = torch.full((nbytes,), group.rank, dtype=torch.uint8)
    before = os.fstat(descriptor).st_blocks * 512  # of meetings
    for _ in range(10):
        pending = group.post(
            [(peer, mine) for peer in group.peers], [(peer, nbytes) for peer in group.peers]
        )
        assert [int(each[-1]) for each in pending.wait()] == group.peers
        pending.release()
        group.all_gather_bytes(b"here", bytes)
    assert os.fstat(descriptor).st_blocks * 512 == before + nbytes


def test_a_tensor_for_several_is_copied_once():
    run(3, same_to_all, on="processes")


def closes_while_it_waits():
    with weft.init() as group:
        group.post((), [(1 - group.rank, group.lease(100_000).tensor)])
    return [each for each in open("/proc/self/maps") if "/memfd:weft" in each]


def test_a_receive_that_never_came_keeps_no_segment_of_a_closed_wire():
    assert processes(2, closes_while_it_waits) == [[], []]


def sums_while_pages_are_locked(when):
    """The last rank has all its memory locked from those calls on, until the next but one."""
    libc, kept, refused = ctypes.CDLL(None, use_errno=True), [], ""
    shm.ROOM = 64 << 20  # which is taken when it is locked, on all ranks
    with weft.init() as group:
        for call in range(8):
            is_last = group.rank == group.size - 1
            if is_last and call in when and libc.mlockall(1 | 2):  # with future
                refused = os.strerror(ctypes.get_errno())
            if is_last and call - 2 in when:
                libc.munlockall()
            rows = torch.arange(20_000) * (call + 1), torch.full((20_000, 64), group.rank + call)
            kept.append(weft.sparse_all_reduce(rows, algorithm=("split", "gather")[call % 2]))
            for number, (indices, values) in enumerate(kept):
                assert indices.equal(torch.arange(20_000) * (number + 1))
                assert bool((values == sum(range(group.size)) + group.size * number).all())
    return refused


@pytest.mark.parametrize("when", [(0,), (1, 4), (7,)], ids=["before", "between", "after"])
def test_locked_memory_makes_no_sum_wrong(when):
    """mlockall copies what is mapped privately: a result that others write would be an old one."""
    if refused := processes(3, sums_while_pages_are_locked, when)[-1]:
        pytest.skip(f"mlockall: {refused} (RLIMIT_MEMLOCK)")
