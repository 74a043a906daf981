"""Memory that comes back: a result's pages serve again, never while somebody sees them."""

import errno
import os
import signal
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from weft.base import memory
from weft.base.memory import Pool, Shelf, fresh

LARGE = 5 << 20


@pytest.fixture
def shelf(monkeypatch: pytest.MonkeyPatch) -> Shelf:
    own = Shelf(64 << 20)
    monkeypatch.setattr(memory, "shelf_of_process", lambda: own)
    return own


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.bool])
def test_a_large_result_is_an_ordinary_tensor(shelf: Shelf, dtype: torch.dtype) -> None:
    tensor = fresh((3, LARGE // 3 + 1), dtype)
    assert tensor.shape == (3, LARGE // 3 + 1) and tensor.dtype == dtype
    assert tensor.is_contiguous() and not tensor._is_view() and not tensor.requires_grad
    tensor.fill_(1)
    assert bool((tensor.clone() == tensor).all())


def test_its_memory_is_the_next_ones(shelf: Shelf) -> None:
    tensor = fresh((LARGE,), torch.uint8)
    place = tensor.data_ptr()
    del tensor
    assert shelf.kept >= LARGE
    tensor = fresh((LARGE // 4 - 1000,), torch.float32)
    assert tensor.data_ptr() == place and shelf.kept == 0


@pytest.mark.parametrize(
    "hold",
    [
        lambda tensor: tensor[5:10],
        lambda tensor: tensor.numpy(),
        lambda tensor: torch.utils.dlpack.from_dlpack(tensor),
        lambda tensor: tensor.untyped_storage(),
    ],
    ids=["view", "numpy", "dlpack", "storage"],
)
def test_not_while_anybody_sees_it(shelf: Shelf, hold: Callable[[Tensor], Any]) -> None:
    held = hold(fresh((LARGE,), torch.uint8).fill_(7))
    assert shelf.kept == 0
    fresh((LARGE,), torch.uint8).fill_(9)
    assert int(held[0]) == 7
    del held
    assert shelf.kept >= 2 * LARGE


def test_no_more_than_the_limit_is_kept(shelf: Shelf) -> None:
    results = [fresh((20 << 20,), torch.uint8) for _ in range(4)]
    places = [result.data_ptr() for result in results]
    while results:
        results.pop(0)
    assert 20 << 20 <= shelf.kept <= 64 << 20
    assert fresh((20 << 20,), torch.uint8).data_ptr() in places[2:]
    shelf.limit = shelf.kept  # what is just as large is kept
    fresh((20 << 20,), torch.uint8)
    assert shelf.kept == shelf.limit


def test_what_is_kept_makes_room_where_memory_is_short(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, room = memory.mmap.mmap, 9 * LARGE
    alive: weakref.WeakSet[Any] = weakref.WeakSet()

    def limited(number: int, size: int, **more: Any) -> Any:
        if size + sum(map(len, alive)) > room:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        pages = real(number, size, **more)
        alive.add(pages)
        return pages

    monkeypatch.setattr(memory.mmap, "mmap", limited)
    fresh((4 * LARGE,), torch.uint8)
    assert len(fresh((6 * LARGE,), torch.uint8)) == 6 * LARGE
    with pytest.raises(MemoryError, match=r"^no memory for \d+ bytes: "):
        fresh((9 * LARGE,), torch.uint8)


def test_a_piece_may_come_back_in_the_middle_of_asking(shelf: Shelf) -> None:
    first = shelf.take(LARGE)
    with shelf.lock:  # as when a collection of garbage runs inside of `take`
        thread = threading.Thread(target=lambda holder: holder.pop(), args=([first],))
        del first
        thread.start()
        thread.join(timeout=10)
        assert not thread.is_alive()
    assert shelf.kept >= LARGE


def test_a_forked_child_waits_for_no_lock_of_its_parent() -> None:
    with memory.shelf_of_process().lock:  # as when another thread is in the middle of `take`
        child = os.fork()
        if child == 0:
            signal.alarm(10)
            try:
                os._exit(len(fresh((LARGE,), torch.uint8)) != LARGE)
            finally:
                os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_nonsense_in_the_environment_is_said_and_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = memory.shelf_of_process.__wrapped__
    usual = made().limit
    monkeypatch.setenv("WEFT_KEEP", "3")
    assert made().limit == 3 << 20
    monkeypatch.setenv("WEFT_KEEP", "lots")
    assert made().limit == usual and "WEFT_KEEP is 'lots'" in caplog.text


def test_a_pool_that_is_drained_lends_other_memory():
    pool = Pool()
    with pool.lease(10_000) as memory:
        place = memory.data_ptr()
        held = memory[:1]  # so that nobody else gets it
    with pool.lease(9_000) as again:
        assert again.data_ptr() == place
    pool.drain()
    with pool.lease(10_000) as other:
        assert other.data_ptr() != place == held.data_ptr()
