"""How a caller's arguments are read and told of. They may be anything, and raise whatever is asked
of them."""

from __future__ import annotations

import operator
import sys
from datetime import timedelta
from typing import Any, TypeGuard, TypeVar

from .errors import WeftError

T = TypeVar("T")

_SHOWN = 80  # characters of a value in an error


def shown(given: object) -> str:
    """An argument in an error, on one line: itself where that is short, else what it is.

    Example:
        >>> shown("median"), shown(2.5), shown(object), shown([0] * 99)
        ("'median'", '2.5', "<class 'object'>", 'a list')
        >>> shown("na" * 99)[70:]
        "ananananan' and so on"
    """
    what = f"a {type(given).__name__}"
    try:
        text = repr(given)
    except Exception:
        return what
    if len(text) <= _SHOWN and text.isprintable():
        return text
    return f"{text[:_SHOWN]}' and so on" if type(given) is str else what


def printable(text: str) -> str:
    """A text that can be sent and read: what is no letter, such as half of one, is escaped.

    Example:
        >>> printable("a table"), printable("a\\ntable")
        ('a table', 'a\\\\ntable')
    """
    return text if text.isprintable() else text.encode("unicode_escape").decode()


def in_words(error: BaseException) -> str:
    """What was raised, with what it says, which may be nothing.

    Example:
        >>> in_words(KeyError("a")), in_words(KeyboardInterrupt())
        ("KeyError: 'a'", 'KeyboardInterrupt')
    """
    name = type(error).__name__
    try:
        return f"{name}: {error}".removesuffix(": ")
    except Exception:  # of its own `str`
        return name


def is_a(given: object, kind: type[T]) -> TypeGuard[T]:
    """Whether an argument is of a class; not, if it raises where Python asks for its class."""
    try:
        return isinstance(given, kind)
    except Exception:
        return False


def truth(name: str, given: object) -> bool:
    """Whether an argument, called `name`, counts as true.

    Raises:
        WeftError: that cannot be told, as of an array.
    """
    try:
        return bool(given)
    except Exception:
        raise WeftError(f"{name} is {shown(given)}: pass True or False") from None


def as_integer(given: Any) -> int:
    """An argument as an integer, also one of numpy's; -1 if it is none.

    Example:
        >>> import numpy
        >>> as_integer(5), as_integer(numpy.int64(5)), as_integer(5.0), as_integer(True)
        (5, 5, -1, -1)
    """
    try:
        return -1 if isinstance(given, bool) else operator.index(given)
    except Exception:
        return -1


LONGEST = 14 * 24 * 3600.0
"""Seconds that a wait may last, two weeks: more is no limit, and the system's poll takes no more
than 24 days."""


def is_duration(timeout: object) -> TypeGuard[float]:
    """Whether this is a finite number of seconds above 0."""
    try:
        if isinstance(timeout, bool) or not isinstance(timeout, int | float):
            return False
        return 0 < timeout <= sys.float_info.max  # also of an int that no float can hold
    except Exception:  # a caller's object may raise anything
        return False


def wrong_timeout(timeout: object) -> str | None:
    """What is wrong with an argument called `timeout` that is to be a duration, or None.

    Example:
        >>> wrong_timeout(-1)
        'timeout is -1: pass a positive number of seconds'
    """
    if is_duration(timeout):
        return None
    return f"timeout is {shown(timeout)}: pass a positive number of seconds"


def limit_of_wait(timeout: object) -> float | None:
    """The seconds of a `wait(timeout)`, which may be a timedelta, or 0; None: no limit.

    Raises:
        WeftError: it is none of these.
    """
    seconds = timeout.total_seconds() if is_a(timeout, timedelta) else timeout
    if seconds is None:
        return None
    if is_duration(seconds):
        return min(seconds, LONGEST)
    if (is_a(seconds, int) or is_a(seconds, float)) and seconds == 0:
        return 0.0
    raise WeftError(wrong_timeout(seconds))


def root_in(given: object, size: int) -> int:
    """An argument as a rank; -1 if it is none of `size` ranks."""
    root = as_integer(given)
    return root if 0 <= root < size else -1


def wrong_root(name: str, root: int, given: object, size: int) -> str | None:
    """What is wrong with an argument that `root_in` made `root` of, or None."""
    if root >= 0:
        return None
    return f"{name} is {shown(given)}: pass a rank of the group, 0 to {size - 1}"
