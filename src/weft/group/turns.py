"""Turns: the queue in which the calls of a group wait, so that one of them has it at a time.

An interrupt, which is an exception that the handler of a signal or another thread raises, may come
at any point. So the queue needs no lock, which would stay held: each step on it is one operation of
a deque's. Turns whose calls are over are put out of it by whoever comes next, and by whoever waits,
within a second.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from types import FrameType
from typing import Any

from ..base.latch import LOOK, Latch


class Turn:
    """A place in the queue of calls.

    Attributes:
        name: of the call.
        thread: the thread that is in the call, by its number; None: the call is queued, and its
            caller has gone on.
        frame: of that thread, in which the call is.
        work: of a call that is queued, its `worker.Work`; None: its caller runs it.
        news: wakes up who waits for the turn, once somebody does.
        is_over: whether it has left the queue.
    """

    __slots__ = ("frame", "is_over", "name", "news", "thread", "work")

    def __init__(self, name: str, frame: FrameType, work: Any = None) -> None:
        self.name = name
        self.thread: int | None = threading.get_ident()
        self.frame: FrameType | None = frame
        self.work = work
        self.news: Latch | None = None
        self.is_over = False

    def is_alive(self) -> bool:
        """Whether the call is queued, or its thread is still in it.

        An interrupt may end a call at any point, also in the middle of leaving the queue.
        """
        if self.thread is None:
            return True
        frame = self.frame
        if frame is None:  # it has left
            return False
        try:
            frame.clear()
        except RuntimeError:  # which a frame raises that is being executed
            return True
        # it ended just now: the call is queued since, or is in another frame
        return self.thread is None or self.frame not in (None, frame)


class Turns:
    """The turns of calls, in order; the first one has the group."""

    def __init__(self) -> None:
        self._queue: deque[Turn] = deque()

    def join(self, turn: Turn) -> None:
        """Give a call its place in the queue, which its caller sees to that it leaves."""
        self._queue.append(turn)

    def first(self) -> Turn | None:
        """The turn that has the group, or is going to."""
        try:
            return self._queue[0]
        except IndexError:
            return None

    def first_queued(self) -> Turn | None:
        """The first turn that is that of a queued call."""
        for turn in self._queue.copy():
            if turn.work is not None:
                return turn
        return None

    def of_this_thread(self) -> Turn | None:
        """The turn of the call that this thread is in, if it is in one."""
        here = threading.get_ident()
        for turn in self._queue.copy():
            if turn.thread == here:
                if turn.is_alive():
                    return turn
                self.leave(turn)
        return None

    def wait_for(self, turn: Turn, check: Callable[[], object]) -> None:
        """Wait until a turn has come, or is over.

        Args:
            turn: the turn.
            check: raises if a call before this one may never end; called once a second.
        """
        if self.first() is turn:
            return
        turn.news = Latch()  # before the next look: who leaves after that look finds it
        while self.first() is not turn and not turn.is_over:
            # ended as the turn before this one leaves the queue; a call ends by the deadlines of
            # its own waits
            if not turn.news.wait(LOOK):
                for each in self._queue.copy():
                    if not each.is_alive():  # an interrupt has kept it from leaving
                        self.leave(each)
                check()

    def leave(self, turn: Turn) -> None:
        """Take a turn out of the queue, and wake up who is next. Twice is fine."""
        turn.is_over = True
        turn.frame = None  # which has the turn, too
        try:
            self._queue.remove(turn)
        except ValueError:  # it has left, or this is a child that the job forked
            return
        for each in (turn, self.first()):
            if each is not None and each.news is not None:
                each.news.open()
