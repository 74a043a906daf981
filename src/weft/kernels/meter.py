"""How much local arithmetic a rank does, told to whoever asks: a simulation makes time of it.

Kernels report what they move, in bytes; a schedule that copies rows by plain torch operations
reports that itself. Where nobody asks, a report costs some tens of nanoseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

PLACE = 48
"""Bytes that could be merged while a row's place is found; benchmarks/kernels.py."""

CALL = 80_000
"""The same while a kernel is called to bring rows to their places: many small pieces cost more than
few large ones."""

PUT = 1.5
"""The same while a byte is brought to a place that is anywhere."""

MARK, SPREAD = 16, 24
"""The same while an index is marked in a bitmap, or its place counted there, and while one is read
from it."""

SHARE, PICK = 64, 40
"""The same while a place is given to one of those that have it, and while it is found out whether
a row's place was given to some rank."""

_meter: ContextVar[Callable[[float], object] | None] = ContextVar("weft_meter", default=None)


@contextmanager
def metered(meter: Callable[[float], object]) -> Iterator[None]:
    """Have `meter(nbytes)` called for all arithmetic of this context.

    Example:
        >>> import torch
        >>> from weft import kernels
        >>> seen = []
        >>> with metered(seen.append):
        ...     _ = kernels.take(torch.ones(3, 64), torch.tensor([2, 0]))
        >>> seen
        [512]
    """
    token = _meter.set(meter)
    try:
        yield
    finally:
        _meter.reset(token)


def spend(nbytes: float) -> None:
    """Report that so many bytes are merged, copied or touched for the first time."""
    meter = _meter.get()
    if meter is not None:
        meter(nbytes)
