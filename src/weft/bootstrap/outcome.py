"""How the program of each rank of a run ended, and how the run's starter learns of it."""

from __future__ import annotations

import pickle
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..base._torch import is_of_group
from ..base.errors import WeftError, WireError
from ..base.watch import frame_of
from ..wire.interface import WireFailed


class RankFailure(WireError, AssertionError):
    """A rank did not end by itself: it hangs, or its process died. Its `culprit` is that rank."""


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """How the program of one rank ended.

    Attributes:
        rank: which.
        value: what it returned, if it did.
        error: what it raised, if it did.
        trace: the traceback of that as text, for ranks in other processes.
        died: how its process ended, if it ended without an answer.
        hangs: if it did not end in time, that and where it was.
    """

    rank: int
    value: Any = None
    error: BaseException | None = None
    trace: str = ""
    died: str = ""
    hangs: str = ""

    @classmethod
    def of(cls, rank: int, program: Callable[..., Any], *args: Any, **kwargs: Any) -> Outcome:
        """Run a rank's program here."""
        try:
            return cls(rank, program(*args, **kwargs))
        except BaseException as error:  # whatever it is, it is raised again where it is wanted
            at = error.__traceback__ and error.__traceback__.tb_next  # without this frame
            trace = "".join(traceback.format_exception(error.with_traceback(at)))
            return cls(rank, error=error, trace=trace)

    def packed(self) -> bytes:
        """Pickle it for another process; an outcome that cannot be pickled becomes an error.

        Plain pickle is used: multiprocessing's own would pass tensors in shared memory of a process
        that is about to end.
        """
        try:
            told = pickle.dumps(self)
            pickle.loads(told)
        except Exception as reason:
            what = self.value if self.error is None else self.error
            text = f"{type(what).__name__} {what} cannot be pickled: {reason}"
            told = pickle.dumps(replace(self, value=None, error=WeftError(text)))
        return told

    def said(self, size: int) -> str:
        """What went wrong, in one sentence; where it was, below."""
        name = f"rank {self.rank} of {size}"
        if self.error is not None:
            return f"{name} raised {type(self.error).__name__}: {self.error}"
        return f"{name} {self.died or self.hangs}"


class _Remote(Exception):
    """The traceback of another process or thread, shown as the cause of its exception."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def results(outcomes: Sequence[Outcome], where: str) -> list[Any]:
    """What the ranks returned, in rank order.

    Raises:
        RankFailure: a process died, or ranks hang; it says which and where.
        BaseException: what a rank raised. Of several errors, the one that caused the others: first
            any that is no WireError and no process group's error, then a death.

    Notes on the error say which rank raised it, and how the others ended.
    """
    __tracebackhide__ = True
    size = len(outcomes)
    raised = [each for each in outcomes if each.error is not None]
    echoes = [  # raised because another rank failed
        each
        for each in raised
        if isinstance(each.error, (WireError, WireFailed)) or is_of_group(each.error)
    ]
    echoes.sort(key=lambda each: not isinstance(each.error, WireError))
    died = [each for each in outcomes if each.died]
    hangs = [each for each in outcomes if each.hangs]
    first = ([each for each in raised if each not in echoes] or died or echoes or hangs)[:1]
    if not first:
        return [each.value for each in outcomes]
    error = first[0].error
    if error is None:
        alike = died or hangs
        error = RankFailure(
            f"{'; '.join(each.said(size) for each in alike)} ({where})", culprit=alike[0].rank
        )
    else:
        alike = first
        error.add_note(f"on rank {first[0].rank} of {size} ({where})")
        if error.__traceback__ is None and first[0].trace:  # it comes from another process
            error.__cause__ = _Remote(first[0].trace)
    for each in (*raised, *died, *hangs):
        if each not in alike:
            error.add_note(each.said(size))
    raise error


def place(thread: threading.Thread) -> str:
    """A clause: the thread gave no answer, and its stack from the rank's program on."""
    frame = frame_of(thread.ident)
    if frame is None:
        return "has just ended"
    stack = traceback.extract_stack(frame)
    above = [depth for depth, each in enumerate(stack) if each.filename == __file__]
    lines = traceback.format_list(stack[max(above, default=-1) + 1 :] or stack)
    return "gave no answer; it was here:\n" + "".join(lines)
