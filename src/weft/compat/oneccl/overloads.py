"""The overloads of the third generation's call, reduced to one list of arguments.

oneCCL's call exists with the two dtypes and, for typed buffers, without them; each of these with a
stream before the attributes, and without one.
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
    """A decorator that lets a function of all arguments be called by the overloads, too.

    Args:
        attributes: the class of the argument after the stream.
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
    """Whether the arguments after the buffers begin with the reduction, without dtypes.

    An argument that is a wrong dtype must not be taken for a reduction: the function reports it to
    all ranks.
    """
    if not 1 <= len(tail) <= _TYPED or "rtype" in named or tail[0] is None or is_dtype(tail[0]):
        return False
    return len(tail) == 1 or not (is_dtype(tail[1]) or isinstance(tail[1], str | int | type))
