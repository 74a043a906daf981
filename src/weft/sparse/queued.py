"""Calls that wait for their turn at the same moment, served as one: the rounds of one for all.

DistributedDataParallel hands over the gradients of several tables one right after the other, each
in a call of its own, and most of what a call costs does not depend on its size. So when such a
call's turn has come, those behind it in the queue are served with it.

How many are there is a matter of time, and differs from rank to rank. So each rank says in the
opening exchange of the first call how many it has. If all have the same they go on; else they open
again, with as many as are there on every rank.

A thread that calls `backward` for DistributedDataParallel has nothing left to do at its end but to
wait for the gradients. So it serves what is queued then, which takes no hand-over from thread to
thread and back; and where the last steps came to that end soon after their calls, these are left to
it from the beginning.
"""

from __future__ import annotations

import functools
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch

from .._torch import at_end_of_backward, backward_id
from ..agree import is_direct
from ..wire.base import Wire
from . import coalesced
from .api import reduce_now
from .listed import Listed
from .record import Record, recording
from .request import Request
from .tables import MOST

__all__ = ["QueuedCall", "run_queued"]

T = TypeVar("T")

_Kind = tuple[str, torch.dtype, torch.dtype, torch.Size, int | None]

_BYTES = 32 << 20  # of values: what is larger gains nothing from company
_MOMENT = 0.02  # seconds to wait for a call that came in the last bursts; a rank may be that late
_SOON = 0.005  # seconds before the end of backward, in which nothing is gained by another thread
_BELIEVED = 2  # steps for which that is expected again: ranks that share cores are late at times
_STARTS = 256  # kinds of calls that are remembered
_HIGHEST = 1 << 48  # an index must leave room for the number of its table


@dataclass(slots=True, eq=False)
class QueuedCall:
    """One table to be reduced.

    Attributes:
        make: makes its request (`Request.unsorted`), when its turn comes or before.
        blocks: its caller waits for it, so that nothing will come behind it.
        request: what it made.
        result: once `done`, in the form of the request.
        record: what the call did, with all that were served with it; None with those.
    """

    make: Callable[[], Request]
    blocks: bool = False
    request: Request | None = None
    result: Any = None
    record: Record | None = None
    done: bool = False
    ticket: int = -1
    inference: bool = field(default_factory=torch.is_inference_mode_enabled)

    def asked(self) -> Request:
        """The request."""
        if self.request is None:
            self.request = self.make()
        return self.request


class _Queue:
    """The calls of one rank on one wire that are not served yet, oldest first.

    A *burst* is what comes from one moment in which there are none to the next. Its *start* is the
    kind of its first call, by which it is known again.

    Attributes:
        ticket: of the last call.
    """

    def __init__(self) -> None:
        self._calls: deque[QueuedCall] = deque()
        self._changed = threading.Condition()
        self._burst = 0  # calls that this one has had so far
        self._over = False  # and it gets no more
        self._start: _Kind | None = None
        # calls that the last two with that start had, the latest behind
        self._usual: dict[_Kind, tuple[int, int]] = {}
        self._ends = _Ends()
        self.ticket = -1

    def add(self, calls: list[QueuedCall]) -> None:
        with self._changed:
            if not self._calls:
                self._burst, self._start = 0, None
            self._burst += len(calls)
            self._over = False
            self._calls.extend(calls)
            self._changed.notify_all()

    def forget(self, calls: list[QueuedCall]) -> None:
        """These are served, or given up."""
        with self._changed:
            for call in calls:
                if call in self._calls:
                    self._calls.remove(call)
            if not self._calls and self._start is not None:
                if len(self._usual) >= _STARTS:
                    self._usual.clear()
                _, before = self._usual.get(self._start, (0, self._burst))
                self._usual[self._start] = before, self._burst

    def behind(self, first: QueuedCall) -> list[QueuedCall]:
        """The calls from this one on that nothing else on the wire comes between.

        Training makes the same calls in each step. So if there were more calls in the last two
        bursts that began like this, the others are given a moment to come: a second call costs more
        than a wait, and of ranks that share cores one is often late. Once they do not come, nobody
        waits for them any more, and where they come every other time nobody ever does.
        """
        with self._changed:
            if self._start is None and not first.blocks:
                self._start = _kind(first.asked())
                usual = min(self._usual.get(self._start, (1, 1)))
                self._changed.wait_for(lambda: self._over or self._burst >= usual, _MOMENT)
            calls = list(self._calls)
        found: list[QueuedCall] = []
        for call in calls[calls.index(first) :] if first in calls else [first]:
            # tables of one call have one ticket, the next call has the next
            if found and call.ticket not in (found[-1].ticket, found[-1].ticket + 1):
                break
            found.append(call)
        return found[:MOST]

    def leave(self, wire: Wire) -> bool:
        """Have what is queued served at the end of this backward; whether it is left to that.

        Only the thread on which a call runs follows from it, never what is communicated.
        """
        ends = self._ends
        now, backward = time.monotonic(), backward_id()
        if backward < 0:
            return False
        if backward != ends.backward:
            ends.backward, ends.first = backward, now
            end = functools.partial(self._end, backward, weakref.ref(wire))
            at_end_of_backward(end)
        ends.last = now
        return ends.soon > 0

    def _end(self, backward: int, its: weakref.ref[Wire]) -> None:
        """A backward has come to its end, on this thread."""
        ends, wire = self._ends, its()
        if backward == ends.backward:  # else another one has begun, on another thread
            ends.backward = -1
            if time.monotonic() - ends.last < _SOON and ends.last - ends.first < _MOMENT:
                ends.soon = _BELIEVED
            else:
                ends.soon -= ends.soon > 0
            with self._changed:
                self._over = True
                self._changed.notify_all()
        if wire is not None:
            wire.worker.serve(self.ticket)


@dataclass(slots=True)
class _Ends:
    """What is known of the backwards that calls were made in.

    Attributes:
        backward: the number of the one that is running; -1: none.
        first, last: when its calls were made.
        soon: for how many steps calls are left to the end of backward.
    """

    backward: int = -1
    first: float = 0.0
    last: float = 0.0
    soon: int = 0


_queues: WeakKeyDictionary[Wire, _Queue] = WeakKeyDictionary()
_lock = threading.Lock()


def run_queued(
    wire: Wire, calls: list[QueuedCall], start: Callable[[Callable[[], None], bool], T]
) -> T:
    """Queue some tables' reductions; they are served when their turn comes, or before.

    Args:
        wire: among whom.
        calls: one for each table.
        start: has a job take its turn on the wire; after the job, all of `calls` are done. Told
            whether the job may be left to the end of backward (`Worker.submit`).

    Returns:
        What `start` returns.
    """
    with _lock:
        queue = _queues.get(wire)
        if queue is None:
            queue = _queues[wire] = _Queue()
    ticket = wire.worker.made
    for call in calls:
        call.ticket = ticket

    def job() -> None:
        try:
            for call in calls:
                while not call.done:
                    _serve(wire, queue, call)
        finally:
            queue.forget(calls)

    blocks = any(call.blocks for call in calls)
    leave = not blocks and queue.leave(wire)
    queue.add(calls)
    try:
        started = start(job, leave)
        queue.ticket = wire.worker.made - 1
        return started
    except BaseException:
        queue.forget(calls)
        raise


def _serve(wire: Wire, queue: _Queue, first: QueuedCall) -> None:
    """Reduce this table, and those behind it that all ranks have here."""
    together = _together(wire, queue, first)
    while len(together) > 1:
        requests = [call.asked() for call in together]
        with recording(wire, "sparse_all_reduce") as note:
            try:
                done = coalesced.as_one(wire, Listed.of(requests))
            except coalesced.Fewer as fewer:
                together = together[: fewer.count]
                continue
        first.record = done.noted(note)
        for call, request, pair in zip(together, requests, done.pairs, strict=True):
            call.result, call.done = request.gives(pair), True
        queue.forget(together)
        return
    first.asked().sort()
    first.result, first.record = reduce_now(wire, first.asked())
    first.done = True
    queue.forget([first])


def _together(wire: Wire, queue: _Queue, first: QueuedCall) -> list[QueuedCall]:
    """This call and those behind it that may be served with it, as far as this rank can tell."""
    if wire.size == 1 or not is_direct(wire) or not _is_social(first.asked()):
        return [first]
    found = [first]  # looked for now: while the first was being sorted others may have come
    nbytes = first.asked().rows.values.nbytes
    for call in queue.behind(first)[1:]:
        request = call.asked()
        nbytes += request.rows.values.nbytes
        if call.inference != first.inference or nbytes > _BYTES:
            break
        if not (_is_social(request) and _kind(request)[:-1] == _kind(first.asked())[:-1]):
            break
        found.append(call)
    return found


def _is_social(request: Request) -> bool:
    """Whether a call may be served with others at all."""
    known = request.error is None and request.algorithm == "auto"
    return known and request.highest < _HIGHEST and not request.fallible and request.out is None


def _kind(request: Request) -> _Kind:
    """What calls that are served together have in common; and, last, the height."""
    rows = request.rows
    return request.op.name, request.dtype, rows.values.dtype, rows.row_shape, rows.height
