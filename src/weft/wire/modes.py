"""The caller's torch function modes, kept out of what weft does inside.

`torch.set_default_device("cuda")` is such a mode: each tensor that is made without a device is made
there. weft's own are memory that messages lie in, so they belong on the CPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

__all__ = ["without_modes"]

P = ParamSpec("P")
T = TypeVar("T")

_count = torch._C._len_torch_function_stack


def without_modes(function: Callable[P, T]) -> Callable[P, T]:
    """The same function, in which no torch function mode of its caller is active.

    Example:
        >>> with torch.device("meta"):
        ...     torch.empty(1).device.type, without_modes(torch.empty)(1).device.type
        ('meta', 'cpu')
    """

    @functools.wraps(function)
    def inside(*args: P.args, **kwargs: P.kwargs) -> T:
        if not _count():
            return function(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            return function(*args, **kwargs)

    return inside
