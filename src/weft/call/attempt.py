"""`attempt`: what one rank may fail at, and all have to know of."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

from ..base.arguments import printable, shown
from ..base.errors import WeftError, entry
from ..group import default
from .opening import confess, preparing

T = TypeVar("T")


@entry
def attempt(function: Callable[[], T], group: object = None, *, name: str = "attempt") -> T:
    """Call a function on every rank; if it raises on one of them, every rank raises.

    Use it for local work between two calls, such as reading a file: if only one rank raised there,
    the others would wait for it in their next call. If the others are already in a sparse call, or
    in `all_to_all`, `exchange` or `all_reduce`, a rank that cannot join them may attempt a function
    that raises the reason: then all of them raise it.

    Args:
        function: of no arguments; it must not call weft on the same group, and end within the
            group's timeout.
        group: None (the default group), a Group, a ProcessGroup, or a 1-D DeviceMesh.
        name: what errors call the attempt; the same on every rank, at most 700 bytes.

    Returns:
        What the function returned on this rank.

    Raises:
        WeftError: the function raised on some rank; the same text on every rank, naming the rank.
            On that rank the exception is its `__cause__`, but SystemExit and KeyboardInterrupt are
            raised themselves. The next call works.
        WireError: a peer or a link failed; names the culprit. The group is lost.

    Example:
        >>> import weft
        >>> from weft.testing import run
        >>> def program(group):
        ...     try:
        ...         weft.attempt(lambda: 1 // group.rank)
        ...     except weft.WeftError as error:
        ...         return str(error)
        >>> run(2, program)[1]
        'rank 0: ZeroDivisionError: integer division or modulo by zero'
    """
    group = default.resolve(group)
    with preparing(group, "attempt"):
        if not isinstance(name, str):
            raise WeftError(f"name is {shown(name)}: pass a text")
        call = printable(str.__str__(name)).encode()[:_LONGEST].decode(errors="ignore")

    def job() -> T:
        made, trouble = None, None
        try:
            made = function()
        except BaseException as error:
            trouble = error
        confess(group, call, trouble)
        return cast(T, made)

    return group.worker.call(call, job)


_LONGEST = 700  # bytes of a name: it travels in the fingerprint
