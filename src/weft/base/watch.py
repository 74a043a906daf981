"""The line on standard error about a slow wait, and where a rank's program stands.

The failure detector prints it about the waits of a session. Before there is one, `store.pauses`
does. The line changes nothing else, so ranks may set different times.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import sys
import threading
from types import FrameType

from .arguments import shown
from .errors import WeftError
from .frames import is_library

# How often a thread is looked at for a frame outside the libraries. It goes on meanwhile, and the
# frame of a generator that has yielded by then does not say who called it.
_LOOKS = 3

# Held while the collector is off: who looks meanwhile would take that for the program's wish, and
# turn it off again for good. A process that is forked meanwhile would never turn it on.
_looking = threading.RLock()
os.register_at_fork(
    before=_looking.acquire, after_in_parent=_looking.release, after_in_child=_looking.release
)

_seconds_of_program: float | None = None  # what `weft.init(watch=)` said; None: nothing


def choose(seconds: float | None) -> None:
    """Set the seconds for groups that are made from now on; None: the environment's."""
    global _seconds_of_program
    _seconds_of_program = seconds


def chosen() -> float:
    """Seconds of a wait after which a line is printed: `choose`'s, else WEFT_WATCH's, else never.

    Raises:
        WeftError: it is no number of seconds above 0.
    """
    value: float | str | None = _seconds_of_program
    if value is None:
        value = os.environ.get("WEFT_WATCH") or math.inf
    with contextlib.suppress(Exception):  # a caller's object may raise anything
        if float(value) > 0:
            return float(value)
    raise WeftError(
        f"watch (or WEFT_WATCH) is {shown(value)}: pass a number of seconds above 0, or None"
    )


def chosen_by() -> str:
    """Where `chosen` is from: an argument, a variable, or "default"."""
    if _seconds_of_program is not None:
        return "weft.init(watch=)"
    return "WEFT_WATCH" if os.environ.get("WEFT_WATCH") else "default"


def program_line(thread: int | None = None) -> str:
    """The line of the user's program at which a thread is: "file:line in function".

    That is its innermost frame outside weft, torch and Python's own library.

    Args:
        thread: its identifier; None: the main one.
    """
    for _ in range(_LOOKS):
        innermost = frame_of(thread or threading.main_thread().ident)
        frame = innermost
        while frame is not None and is_library(frame.f_code.co_filename):
            frame = frame.f_back
        if frame is not None:
            break
    frame = frame or innermost
    if frame is None:
        return "an unknown line"
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_qualname}"


def frame_of(thread: int | None) -> FrameType | None:
    """What a thread executes now; None: there is no such thread.

    A collection of garbage meanwhile may lock Python 3.11 up (python/cpython#106883): it runs
    finalizers while no thread can begin.
    """
    with _looking:
        is_enabled = gc.isenabled()
        gc.disable()
        try:
            return sys._current_frames().get(thread or 0)
        finally:
            if is_enabled:
                gc.enable()


def tell(rank: int, seconds: float, call: tuple[int, str], why: str) -> None:
    """Print one line: this rank has waited for some seconds, in a call (number, name), and why."""
    what = f"call {call[0]} ({call[1]})"
    where = f" in {what}" if call[1] and what not in why else ""
    line = f"weft: rank {rank} has waited for {seconds:.1f} s{where}: {why}\n"
    with contextlib.suppress(OSError, ValueError):  # nobody may be there to read it
        print(line, end="", file=sys.stderr, flush=True)
