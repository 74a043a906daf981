"""Overloads: how the third generation's call may be written, as one list of arguments.

oneCCL has its call with the two dtypes and, for typed buffers, without them; each with a stream
before the attributes, and without one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from .buffers import is_dtype

T = TypeVar("T")

_BUFFERS = 8  # arguments that all overloads begin with
_TYPED = 5  # what may follow them without dtypes: reduction, communicator, stream, attributes, deps


def overloaded(attributes: type) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Have a function of all arguments take the overloads too.

    Args:
        attributes: what the argument after the stream is.
    """

    def decorate(function: Callable[..., T]) -> Callable[..., T]:
        @functools.wraps(function)
        def call(*given: Any, **named: Any) -> T:
            head, tail = given[:_BUFFERS], given[_BUFFERS:]
            if _is_typed(tail, named):
                tail = (None, None, *tail)
            if len(tail) > 4 and isinstance(tail[4], attributes):
                tail = (*tail[:4], None, *tail[4:])
            return function(*head, *tail, **named)

        return call

    return decorate


def _is_typed(tail: Sequence[Any], named: Mapping[str, Any]) -> bool:
    """Whether what follows the buffers begins with the reduction.

    A wrong dtype is a dtype all the same: its rank must get as far as telling the others.
    """
    if not 1 <= len(tail) <= _TYPED or "rtype" in named or tail[0] is None or is_dtype(tail[0]):
        return False
    return len(tail) == 1 or not (is_dtype(tail[1]) or isinstance(tail[1], str | int | type))
