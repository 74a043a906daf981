"""Blocks: written by all ranks of a host, private to whoever has one, and used again after that."""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import threading

import pytest
import torch

from weft.wire import blocks, memory
from weft.wire.arena import advise
from weft.wire.blocks import Blocks, Giver

PAGE = mmap.PAGESIZE
SIZE = 5 * PAGE


pytestmark = pytest.mark.skipif(
    not blocks.works(), reason="this kernel has no blocks (before 5.14?)"
)


@pytest.fixture
def two():
    """The giver, and the blocks as ranks 0 and 1 have them."""
    giver = Giver(2)
    other = Blocks.seen(os.getpid(), giver.fd, 1, giver.sign)
    giver.close()
    assert other is not None
    return giver, giver.blocks, other


def filled(ones, place, number):
    """The block, of which rank 1 writes all."""
    held = [each.take(place) for each in ones]
    held[1].memory.fill_(number)
    return held


def test_what_one_rank_writes_all_have_and_each_changes_its_own(two):
    giver, *ones = two
    place = giver.take(SIZE)
    mine, theirs = [block.own(0, SIZE) for block in filled(ones, place, 7)]
    assert mine.eq(7).all() and theirs.eq(7).all()
    mine[PAGE] = 1
    theirs[0] = 2
    assert (int(mine[PAGE]), int(mine[0])) == (1, 7)
    assert (int(theirs[PAGE]), int(theirs[0])) == (7, 2)


def test_a_block_is_given_again_when_nobody_holds_it(two):
    giver, *ones = two
    place = giver.take(SIZE)
    kept = [block.own(0, SIZE) for block in filled(ones, place, 7)]
    for left in (2, 1):
        other = giver.take(SIZE)
        assert other.start != place.start, f"{left} still hold it"
        for block in filled(ones, other, 9):
            block.release()
        assert all(each.eq(7).all() for each in kept)
        kept.pop()
        gc.collect()
        for each in ones:
            each.settle()
    assert giver.take(SIZE) == place


def test_parts_of_a_result_hold_all_of_it(two):
    giver, *ones = two
    place = giver.take(SIZE)
    mine, theirs = filled(ones, place, 7)
    theirs.release()
    part = mine.own(PAGE, SIZE)[:8].view(torch.float32)[1:]
    gc.collect()
    ones[0].settle()
    assert giver.take(SIZE) != place
    del part
    ones[0].settle()
    assert giver.take(SIZE) == place


def test_who_wrote_to_a_block_sees_the_next_result_in_it_and_has_copies_then(two):
    giver, *ones = two
    place = giver.take(SIZE)
    for block in filled(ones, place, 7):
        block.own(0, SIZE).mul_(2)
    for each in ones:
        each.settle()
    assert giver.take(SIZE) == place
    for block in filled(ones, place, 9):
        copy = block.own(0, SIZE)
        assert copy.eq(9).all()
        copy.mul_(2)
    assert giver.take(SIZE) == place, "a copy holds no block"
    for block in filled(ones, place, 5):
        block.release()
    for each in ones:  # also where the next result is not copied
        each._copies = 0
    assert giver.take(SIZE) == place
    assert all(block.own(0, SIZE).eq(5).all() for block in filled(ones, place, 5))


def test_where_nothing_tells_what_was_written_all_is_dropped(two, monkeypatch):
    giver, *ones = two
    place = giver.take(SIZE)
    for block in filled(ones, place, 7):
        block.own(0, SIZE).mul_(2)

    def none_left(address, size):
        raise OSError("too many open files")

    monkeypatch.setattr(blocks, "_written", none_left)
    for each in ones:
        each.settle()
        each._copies = 0
    assert giver.take(SIZE) == place
    assert all(block.own(0, SIZE).eq(9).all() for block in filled(ones, place, 9))


def test_who_does_not_write_has_no_copies(two):
    giver, *ones = two
    for number in range(3):
        place = giver.take(SIZE)
        lent = [block.own(0, SIZE) for block in filled(ones, place, number)]
        assert all(int(each.sum()) == number * SIZE for each in lent)
        assert [each.data_ptr() for each in lent] == [
            each._own.address + place.start for each in ones
        ]
        del lent
        for each in ones:
            each.settle()


def test_a_forked_child_keeps_what_it_had(two):
    giver, *ones = two
    place = giver.take(SIZE)
    mine, theirs = filled(ones, place, 7)
    lent = mine.own(0, SIZE)
    theirs.release()
    assert int(lent[0]) == 7  # a page that was read is mapped already, the others are not
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            os.read(reading, 1)  # until the parent has written to the block again
            right = bool(lent.eq(7).all())
            del lent
            ones[0].settle()  # in which a child gives nothing back
            os._exit(0 if right else 1)
        os._exit(2)
    del lent
    ones[0].settle()
    assert giver.take(SIZE) == place
    again = filled(ones, place, 9)
    os.write(writing, b"x")
    os.close(writing)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    os.close(reading)
    assert giver._pieces[0].place == place and giver.blocks._marks[place.number, :2].all()
    assert again[0].own(0, SIZE).eq(9).all()


def test_who_lets_go_while_another_thread_forks_does_not_see_old_results(two, monkeypatch):
    giver, *ones = two
    place = giver.take(SIZE)
    mine, theirs = filled(ones, place, 7)
    held = [mine.own(0, SIZE)]
    theirs.release()
    threads = []

    def settles():
        held.clear()
        ones[0].settle()

    def advise_late(address, size, advice):
        """Prepare pages when another thread has let go of them, or had the time to."""
        if not threads:  # else it is that thread, which drops what it found prepared
            threads.append(threading.Thread(target=settles))
            threads[0].start()
            threads[0].join(0.2)
        advise(address, size, advice)

    with monkeypatch.context() as patched:
        patched.setattr(blocks, "advise", advise_late)
        child = os.fork()
        if child == 0:
            os._exit(0)
        threads[0].join(10)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not threads[0].is_alive() and not giver.blocks._marks[place.number, :2].any()
    assert giver.take(SIZE) == place
    assert filled(ones, place, 9)[0].memory.eq(9).all()
    assert ones[0].lend(place, 0, SIZE).eq(9).all()


def test_what_cannot_be_prepared_for_a_fork_is_said_and_the_rest_is(two, monkeypatch, caplog):
    giver, *ones = two
    places = [giver.take(SIZE), giver.take(SIZE)]
    lent = [filled(ones, place, 7)[0].own(0, SIZE) for place in places]
    done = []

    def first_fails(address, size, advice):
        done.append(address)
        if len(done) == 1:
            raise OSError(12, "Cannot allocate memory")

    with monkeypatch.context() as patched:
        patched.setattr(blocks, "advise", first_fails)
        child = os.fork()
        if child == 0:
            os._exit(0)
    os.waitpid(child, 0)
    assert len(done) == len(lent)
    assert "child may see a result change: Cannot allocate memory" in caplog.text


def test_memory_that_serves_nobody_goes_back_to_the_system(two):
    giver, *ones = two
    place = giver.take(SIZE)
    before, theirs = filled(ones, place, 7)
    for block in (before, theirs):
        block.release()
    for _ in range(memory.PATIENCE):
        other = giver.take(40 * SIZE)
        for block in filled(ones, other, 1):
            block.release()
    assert before.memory.eq(0).all()  # a hole
    assert [piece.place for piece in giver._pieces] == [other]


def test_no_more_is_kept_than_was_said(two):
    giver, *ones = two
    giver._limit = 7 * SIZE
    for times in (1, 2, 4, 8):
        place = giver.take(times * SIZE)
        for block in filled(ones, place, 7):
            block.release()
    giver.take(16 * SIZE)
    free = [piece.place.size for piece in giver._pieces[:-1]]
    assert 0 < sum(free) <= 7 * SIZE


def test_there_is_an_end_to_what_is_held(two, monkeypatch):
    monkeypatch.setattr(blocks, "_ROOM", 4 * SIZE)
    giver, *ones = two
    places = [giver.take(SIZE) for _ in range(3)]
    assert len({place.start for place in places}) == 3
    assert giver.take(2 * SIZE) is None
    for place in places[:2]:  # which lie side by side
        for each in ones:
            each.give_back(place)
    assert giver.take(2 * SIZE).start == 0
    assert giver.take(2 * SIZE) is None


def test_there_is_an_end_to_their_number(two):
    giver, *_ = two
    places = [giver.take(PAGE) for _ in range(blocks._BLOCKS)]
    assert None not in places and giver.take(PAGE) is None


def test_a_file_that_is_another_is_not_taken():
    giver = Giver(2)
    try:
        assert Blocks.seen(os.getpid(), giver.fd, 1, bytes(16)) is None
        with open(os.devnull) as file:
            assert Blocks.seen(os.getpid(), file.fileno(), 1, giver.sign) is None
        assert Blocks.seen(os.getpid(), giver.fd, 1, giver.sign) is not None
    finally:
        giver.close()
    assert Blocks.seen(os.getpid(), -1, 1, giver.sign) is None


def test_nothing_is_left_open_and_results_outlive_the_blocks():
    def files():
        return len(os.listdir("/proc/self/fd"))

    before = files()
    giver = Giver(1)
    place = giver.take(SIZE)
    block = giver.blocks.take(place)
    block.memory.fill_(3)
    mine = block.own(0, SIZE)
    giver.close()
    assert files() == before
    del giver, block
    gc.collect()
    assert mine.eq(3).all()
    mine.add_(1)
    assert mine.eq(4).all()
    address = mine.data_ptr()
    del mine
    gc.collect()
    with pytest.raises(OSError):  # not mapped any more
        advise(address, PAGE, mmap.MADV_WILLNEED)


def test_a_kernel_that_cannot_prepare_pages_has_no_blocks(monkeypatch):
    monkeypatch.setattr(blocks, "_POPULATE_WRITE", 12345)
    with pytest.raises(OSError):
        Giver(1)


def test_a_kernel_that_does_not_tell_what_was_written_has_no_blocks(monkeypatch):
    monkeypatch.setattr(blocks, "_written", lambda address, size: False)
    with pytest.raises(OSError, match="written"):
        Giver(1)
