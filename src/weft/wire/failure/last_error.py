"""What this process raised where no other rank hears of it, for those that wait for it.

A wrong `group=` cannot be stated to a group: nobody knows which. So it is raised on its rank alone,
as is whatever a program raises of itself. Who waits for that rank is told what it was: at once if
it leaves on that account, else when it is asked, at the deadline, where it is (`detector`).
"""

from __future__ import annotations

import sys
import time

_LONGEST = 500  # characters of an error that travel

_last: tuple[float, str] | None = None


def note(error: BaseException) -> None:
    """Keep what was raised, now."""
    global _last
    if not isinstance(error, SystemExit) or error.code:  # the way a program ends well
        text = " ".join(f"{type(error).__name__}: {error}".split())
        _last = time.monotonic(), text[:_LONGEST]


def note_uncaught() -> None:
    """Keep what ends the program, if anything does; for when it ends."""
    error = getattr(sys, "last_value", None)  # set before Python's hook prints it
    if error is not None and not hasattr(sys, "ps1"):  # at a prompt it ended nothing
        note(error)


def since(moment: float, *, handled: bool = False) -> str:
    """What was raised last, if that was after a moment of `time.monotonic`, else "".

    Args:
        moment: when the wire that asks was last used.
        handled: whether what the calling thread is handling right now counts, too: it closes the
            wire on that account, as a `with` block or a `finally` does.
    """
    error = sys.exc_info()[1]
    if handled and error is not None:
        note(error)
    return _last[1] if _last is not None and _last[0] >= moment else ""
