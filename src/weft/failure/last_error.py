"""The last error that this process raised alone, to be told to ranks that wait for it.

An invalid `group=` is raised on its own rank only, since nobody knows which group was meant; so is
an error of the program itself. Other ranks may then wait for this one. They learn of the error at
once if this rank leaves, else at their deadline, when the detector asks where this rank is.
"""

from __future__ import annotations

import sys
import time

from ..base.arguments import in_words
from ..base.errors import in_short

_last: tuple[float, str] | None = None


def note(error: BaseException) -> None:
    """Keep an error that was raised now."""
    global _last
    if not isinstance(error, SystemExit) or error.code:  # SystemExit(0) is no error
        _last = time.monotonic(), in_short(in_words(error))


def note_uncaught() -> None:
    """At the end of the program: keep the exception that ends it, if one does."""
    error = getattr(sys, "last_value", None)  # set before Python's hook prints it
    if error is not None and not hasattr(sys, "ps1"):  # at a prompt it ended nothing
        note(error)


def since(moment: float, *, handled: bool = False) -> str:
    """The last error, if it was raised after `moment`; else "".

    Args:
        moment: when the session was last used, by `time.monotonic`.
        handled: whether the exception that the calling thread is handling counts, too: a `with`
            block or a `finally` may close the group because of it.
    """
    error = sys.exc_info()[1]
    if handled and error is not None:
        note(error)
    return _last[1] if _last is not None and _last[0] >= moment else ""
