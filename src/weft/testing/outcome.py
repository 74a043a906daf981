"""What became of each rank of a run, and how it is told to whoever started it."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import WireError


class RankFailure(AssertionError):
    """A rank did not end by itself: it hangs, or its process died."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the program of one rank ended.

    Attributes:
        rank: which.
        value: what it returned, if it did.
        error: what it raised, if it did.
        trace: the traceback of that, as text; for ranks in other processes.
        hangs: where it was when its time was up, as text, if it did not end at all.
        died: how its process ended, if it did.
    """

    rank: int
    value: Any = None
    error: BaseException | None = None
    trace: str = ""
    hangs: str = ""
    died: str = ""


class _Remote(Exception):
    """The traceback of another process or thread, shown as the cause of its exception."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def results(outcomes: Sequence[Outcome], where: str) -> list[Any]:
    """What the ranks returned, in rank order.

    Raises:
        RankFailure: a process died, or ranks hang; it says which and where.
        BaseException: what a rank raised, with a note that says which rank. Of several, the one
            that caused the others: whatever is no WireError comes first.
    """
    __tracebackhide__ = True
    size = len(outcomes)
    died = [each for each in outcomes if each.died]
    raised = [each for each in outcomes if each.error is not None]
    hangs = [each for each in outcomes if each.hangs]
    causes = [each for each in raised if not isinstance(each.error, WireError)]
    if died and not causes:
        said = "; ".join(f"rank {each.rank} of {size} {each.died}" for each in died)
        raise RankFailure(f"{said} ({where})") from _first_error(raised)
    if hangs and not causes:
        ranks = ", ".join(str(each.rank) for each in hangs)
        stacks = "\n".join(f"rank {each.rank} was here:\n{each.hangs}" for each in hangs)
        text = f"no answer from rank {ranks} of {size} ({where})\n{stacks}"
        raise RankFailure(text) from _first_error(raised)
    for each in causes or raised:
        assert each.error is not None
        each.error.add_note(f"on rank {each.rank} of {size} ({where})")
        others = [other.rank for other in raised if other is not each]
        if others:
            each.error.add_note(f"ranks {others} raised too")
        if each.error.__traceback__ is None and each.trace:  # it comes from another process
            raise each.error from _Remote(each.trace)
        raise each.error
    return [each.value for each in outcomes]


def place(thread: threading.Thread, runner: str) -> str:
    """Where a running thread is, as text: its stack from the body on, below the file `runner`."""
    frame = sys._current_frames().get(thread.ident or 0)
    if frame is None:
        return "nowhere: it has just ended"
    stack = traceback.extract_stack(frame)
    above = [depth for depth, each in enumerate(stack) if each.filename == runner]
    return "".join(traceback.format_list(stack[max(above, default=-1) + 1 :] or stack))


def _first_error(raised: Sequence[Outcome]) -> BaseException | None:
    return raised[0].error if raised else None
