"""Where a tensor lies, as far as it decides the way: on the host, or on an accelerator.

Values on an accelerator never visit the host: torch operations serve them in place of machine code,
and the user's process group carries them. Tests have that way on CPU tensors, too: `as_device`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

_lock = threading.Lock()
_asked = 0  # how many `as_device` are open


def on_host(tensor: Tensor) -> bool:
    """Whether a tensor goes the way of the CPU.

    Example:
        >>> import torch
        >>> on_host(torch.ones(2))
        True
        >>> with as_device():
        ...     on_host(torch.ones(2))
        False
    """
    return tensor.is_cpu and not _asked


@contextmanager
def as_device() -> Iterator[None]:
    """For tests: CPU tensors are treated as if they were on an accelerator, in all threads."""
    _count(1)
    try:
        yield
    finally:
        _count(-1)


def _count(by: int) -> None:
    global _asked
    with _lock:
        _asked += by
