"""The threads that share one large kernel call: as many as torch may use, and only then."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import pairwise
from typing import TypeVar

import torch

T = TypeVar("T")

_WORTH = 1 << 20  # bytes for a thread to read or write: 17 µs to hand it over, 100 to do it


def share(nbytes: int) -> int:
    """The number of threads among which work on so many bytes is best divided."""
    return 1 if nbytes < 2 * _WORTH else max(1, min(torch.get_num_threads(), nbytes // _WORTH))


def ranges(count: int, parts: int) -> list[tuple[int, int]]:
    """0 to `count` cut in parts that differ by at most one."""
    if parts == 1:
        return [(0, count)]
    return list(pairwise(count * part // parts for part in range(parts + 1)))


def run(work: Callable[..., T], parts: Iterable[tuple[object, ...]]) -> list[T]:
    """`work(*part)` for all parts at once, the first in this thread; ends when the last has."""
    first, *others = parts
    if not others:
        return [work(*first)]
    futures = [_threads().submit(work, *part) for part in others]
    try:
        result = work(*first)
    finally:
        wait(futures)  # they write to memory of the caller's
    return [result, *(future.result() for future in futures)]


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="weft-kernel")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_threads.cache_clear)  # the threads stay with the parent
