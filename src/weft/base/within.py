"""A call that may take for ever, in a thread: it is left behind where no answer comes in time.

That is the store of a host that is stopped, for whose answer torch waits as long as the connection
stands, a name of a host, for which the system asks name servers, ranks that connect a process
group, for one that has died, and the end of such a group: none of it can be ended.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from .latch import join
from .pace import patient

T = TypeVar("T")

# After the time an answer may take so many pieces of so many seconds, since the machine may be
# busy. In any one of them this process may stand still, and hear nothing.
PIECES, PIECE = 5, 0.1
_LAST = 2.0  # seconds that an answer may take while the process ends

_left: list[threading.Thread] = []  # those that are left behind


@atexit.register
def _end_left() -> None:
    """Wait a little for answers that did not come in time.

    Whoever ends a host that is stopped ends those it has not answered, too, and C++ cannot take the
    GIL once the interpreter ends: a request that fails then aborts the process.
    """
    until = time.monotonic() + _LAST
    for thread in _left:
        thread.join(max(0.0, until - time.monotonic()))


class Asking(Generic[T]):
    """A call that runs in a thread of its own."""

    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function
        self._answers: list[T] = []
        self._errors: list[Exception] = []
        self._thread = threading.Thread(target=self._ask, name="weft asks", daemon=True)
        self._thread.start()

    def _ask(self) -> None:
        try:
            self._answers.append(self._function())
        except Exception as error:
            self._errors.append(error)

    def ends(self, seconds: float) -> bool:
        """Wait so long for its end; whether it has come."""
        return join(self._thread, seconds)

    def answer(self) -> T:
        """What the function returned.

        Raises:
            TimeoutError: it has not yet; it is left behind.
            Exception: what it raised.
        """
        if self._errors:
            raise self._errors[0]
        if not self._answers:
            _left.append(self._thread)
            raise TimeoutError("no answer in time")
        return self._answers[0]


def within(seconds: float, function: Callable[[], T]) -> T:
    """What a function returns.

    Raises:
        TimeoutError: it takes longer than so many seconds, and goes on.
        Exception: what it raised.

    Example:
        >>> within(60.0, lambda: "an answer")
        'an answer'
    """
    asking = Asking(function)
    asking.ends(seconds)
    for _ in range(PIECES):
        if asking.ends(patient(PIECE)):
            break
    return asking.answer()
