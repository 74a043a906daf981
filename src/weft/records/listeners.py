"""Counters: what each call of this process did, told to whoever asks (`weft.on_call`).

The worker tells them when a call has ended. Where nobody asks, that is one look at an empty list.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Self

from ..base.arguments import shown
from ..base.errors import WeftError
from .calls import CallStats

_log = logging.getLogger("weft")
# each step on it is one operation: a collection of garbage may come to `remove` in any
_listeners: list[Listener] = []


class Listener:
    """A function that is told of calls, until `remove()`, or until the end of a `with` block."""

    def __init__(self, function: Callable[[CallStats], object]) -> None:
        self._function = function

    def remove(self) -> None:
        """Tell it of no further calls. Twice is fine."""
        with contextlib.suppress(ValueError):
            _listeners.remove(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def tell(self, stats: CallStats) -> None:
        """Call the function. If it raises, log that, and remove it."""
        try:
            self._function(stats)
        except Exception:  # the call itself ended well, on all ranks
            self.remove()
            _log.exception("rank %d: a listener of weft.on_call failed, and is removed", stats.rank)


def on_call(listener: Callable[[CallStats], object]) -> Listener:
    """Have a function called after every call of weft's in this process, to count, log, or export.

    A call that weft makes as a part of another one is counted there.

    Args:
        listener: called with the `CallStats` of each call, in the thread that ran the call, which
            for asynchronous calls, and those of `weft.ddp`, is a thread of weft's. It must be
            quick, and must not call weft. If it raises, that is logged, and it is removed.

    Returns:
        A handle: `remove()` ends it. So does the end of a `with` block.

    Raises:
        WeftError: `listener` cannot be called.

    Example:
        >>> import torch, weft
        >>> seen = []
        >>> with weft.init(), weft.on_call(seen.append):
        ...     _ = weft.all_reduce(torch.ones(4))
        >>> [(stats.name, stats.messages, stats.sent_bytes) for stats in seen]  # alone: to nobody
        [('all_reduce', 0, 0)]
    """
    if not callable(listener):
        raise WeftError(f"listener is {shown(listener)}: pass a function of one CallStats")
    handle = Listener(listener)
    _listeners.append(handle)
    return handle


def tell_all(call: CallStats) -> None:
    """Tell all listeners of a call that has ended."""
    for listener in _listeners.copy():
        listener.tell(call)
