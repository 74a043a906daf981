"""Reductions one after the other, in one call or in several, of which two are under way.

While the last chunks of one go their way, and until the first chunks of the next do, links would
rest: so the next begins before, and goes on whenever it can without a wait. The one that began
first is what is waited for; what comes meanwhile for the other is taken in, and answered as soon as
a wait ends.

When calls of others are in the queue is a matter of time, and differs from rank to rank. So it may
change when something is sent, and not what: reductions begin in the order of their calls, only of
calls that nothing else on the wire comes between, and the two use different channels.

Li et al., "PyTorch Distributed: experiences on accelerating data parallel training" (VLDB 2020),
section 5.4, has several all-reduces under way for that reason, each over connections of its own.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar

from ..wire.base import Pending, Wire
from ..wire.worker import Work

__all__ = ["Pipeline", "Reducing"]

_MOST = 2  # under way at a time, as many as there are lanes in `dense`
_KEPT = "pipeline"

T = TypeVar("T")


class Reducing(Protocol):
    """One reduction of several."""

    @property
    def overlaps(self) -> bool:
        """Whether those of other calls may be under way beside it; the same on every rank."""

    @property
    def done(self) -> bool:
        """Whether its result is where it belongs."""

    @property
    def awaited(self) -> Pending | None:
        """What it waits for next, if others may go on meanwhile."""

    def begin(self) -> None:
        """Send what there is to send, before anything else."""

    def step(self) -> None:
        """Wait for what it waits for next, and go on from there."""

    def proceed(self) -> None:
        """Go on as far as nothing has to be waited for."""


@dataclass(slots=True, eq=False)
class _Call:
    """The reductions of one call.

    Attributes:
        wire: its wire.
        plan: says which. Asked when they may begin, since what ranks know of each other may change
            in the call before.
        to_come: those that have not begun; None: not planned yet.
        missing: how many are not done.
        ticket: its place among the calls on the wire; -1: nothing behind it is known here.
        error: what one of them raised before the call had its turn, or None.
    """

    wire: Wire
    plan: Callable[[], Iterable[Reducing]]
    to_come: deque[Reducing] | None = None
    missing: int = 0
    ticket: int = -1
    error: Exception | None = None

    def following(self) -> Reducing | None:
        """The next one to begin; None: there is none."""
        if self.to_come is None:
            self.to_come = deque(self.plan())
            self.missing = len(self.to_come)
        return self.to_come[0] if self.to_come else None


class Pipeline:
    """What is under way on one wire, which keeps it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: deque[_Call] = deque()  # that are queued or have their turn, oldest first
        self._under_way: deque[tuple[_Call, Reducing]] = deque()

    @classmethod
    def of(cls, wire: Wire) -> Pipeline:
        """That of a wire."""
        pipeline: Pipeline = wire.kept.setdefault(_KEPT, cls())
        return pipeline

    def submit(
        self,
        wire: Wire,
        name: str,
        plan: Callable[[], Iterable[Reducing]],
        then: Callable[[Callable[[], None]], T],
    ) -> Work[T]:
        """Queue a call (`Worker.submit`); what it reduces may begin before it has its turn.

        Args:
            wire: its wire.
            name: of the call.
            plan: says what it reduces, in order.
            then: is the call. It is given what does the reductions, and returns the result.

        Raises:
            WeftError: as `Worker.submit`.
        """
        call = _Call(wire, plan)

        def job() -> T:
            with self._lock:  # in which it was queued: so it is among the others now
                pass
            try:
                return then(lambda: self._run(call))
            finally:
                self._forget(call)

        with self._lock:
            work = wire.worker.submit(name, job)
            call.ticket = work.ticket
            self._calls.append(call)
        return work

    def run(self, wire: Wire, reductions: Iterable[Reducing]) -> None:
        """Do reductions in a call whose turn it is, on this wire.

        Raises:
            Exception: the first that one of them raises.
        """
        call = _Call(wire, lambda: reductions)
        try:
            self._run(call)
        finally:
            self._forget(call)

    def _run(self, call: _Call) -> None:
        self._begin(call)
        while call.to_come or call.missing:
            awaited = [each.awaited for _, each in self._under_way]
            several = [each for each in awaited if each is not None]
            if len(several) < _MOST:
                self._under_way[0][1].step()  # one of this call: those before it are over
            else:
                call.wire.wait_for_any(several)
            for owner, each in list(self._under_way):
                with self._errors_of(owner, call):
                    each.proceed()
            while self._under_way and self._under_way[0][1].done:
                self._under_way.popleft()[0].missing -= 1
            self._begin(call)

    def _begin(self, call: _Call) -> None:
        """Begin what can be begun."""
        for owner in self._from(call):
            with self._errors_of(owner, call):
                if owner.error is not None:
                    raise owner.error
                while self._has_room(owner) and (following := owner.following()) is not None:
                    if not (following.overlaps or self._all_of(owner)):
                        return
                    following.begin()
                    assert owner.to_come is not None
                    self._under_way.append((owner, owner.to_come.popleft()))
            if owner.error is not None or owner.to_come is None or owner.to_come:
                return  # what comes behind it waits for it

    def _has_room(self, owner: _Call) -> bool:
        """Whether one more may be under way, for this call.

        In one call all ranks begin the same at the same place, whatever that sends.
        """
        fits = self._all_of(owner) or all(each.overlaps for _, each in self._under_way)
        return len(self._under_way) < _MOST and fits

    def _all_of(self, owner: _Call) -> bool:
        """Whether nothing of another call is under way."""
        return all(its is owner for its, _ in self._under_way)

    def _from(self, call: _Call) -> Iterator[_Call]:
        """This call and those that are right behind it in the queue."""
        yield call
        with self._lock:
            calls = list(self._calls)
        last = call.ticket
        for other in calls:
            if last >= 0 and other.ticket == last + 1:
                last += 1
                yield other

    @contextmanager
    def _errors_of(self, owner: _Call, call: _Call) -> Iterator[None]:
        """Keep the error of a call that has not got its turn until it has."""
        try:
            yield
        except Exception as error:
            if owner is call:
                raise
            owner.error = error
            self._drop(owner)

    def _drop(self, call: _Call) -> None:
        """Leave what is under way of a call that failed, if anything is."""
        self._under_way = deque(each for each in self._under_way if each[0] is not call)

    def _forget(self, call: _Call) -> None:
        """A call is over."""
        self._drop(call)
        with self._lock:
            if call in self._calls:
                self._calls.remove(call)
