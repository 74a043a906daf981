"""The threads that share one large kernel call: as many as torch may use, and only then."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import pairwise
from typing import TypeVar

import torch

T = TypeVar("T")

_WORTH = 1 << 20  # bytes for a thread to read or write: 17 µs to hand it over, 100 to do it


def share(nbytes: int) -> int:
    """The number of threads among which work on so many bytes is best divided."""
    return 1 if nbytes < 2 * _WORTH else max(1, min(torch.get_num_threads(), nbytes // _WORTH))


def run(work: Callable[[int, int], T], count: int, nbytes: int) -> list[T]:
    """`work(start, stop)` for all of 0 to `count`, in parts if that touches enough bytes.

    The first part runs in this thread, and each other in another; ends when the last has.
    """
    parts = share(nbytes)
    if parts == 1:
        return [work(0, count)]
    first, *others = pairwise(count * part // parts for part in range(parts + 1))
    futures = [_threads().submit(work, *part) for part in others]
    try:
        result = work(*first)
    finally:
        wait(futures)  # they write to memory of the caller's
    return [result, *(future.result() for future in futures)]


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="weft-kernel")


os.register_at_fork(after_in_child=_threads.cache_clear)  # the threads stay with the parent
