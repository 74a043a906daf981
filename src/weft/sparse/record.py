"""What calls did: a record for each group, of its last call; and how a call takes its turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from torch.profiler import record_function

from ..wire import default
from ..wire.base import Wire


@dataclass(frozen=True, slots=True)
class Record:
    """What one call did, on this rank; for a list of tables, all of them together.

    Measuring the link, which a group does once, in its first call that needs to know, is in none
    of the figures.

    Attributes:
        algorithm: what ran; "eager" where all rows travelled in the opening exchange.
        rows: rows of this rank, without duplicates where the call combines them.
        total: rows of all ranks together, K.
        union: rows of this rank's result; of `sparse_all_reduce`, U.
        messages: sent by this rank, the opening exchange included.
        sent_bytes: in those messages.
        bound_bytes: bytes that the average rank must receive, whatever the algorithm.
        seconds: from the opening to the result.
        ranges: of `sparse_reduce_scatter`: rank r owns the indices from `ranges[r]` up to, not
            including, `ranges[r + 1]`.
    """

    algorithm: str
    rows: int
    total: int
    union: int
    messages: int
    sent_bytes: int
    bound_bytes: int
    seconds: float
    ranges: tuple[int, ...] | None = None


_Counters = tuple[int, int, float]  # messages and bytes sent, seconds

_records: WeakKeyDictionary[Wire, Record] = WeakKeyDictionary()
_apart: WeakKeyDictionary[Wire, _Counters] = WeakKeyDictionary()  # what no call is to count


def last_call(group: Any = None) -> Record | None:
    """What the last sparse call on this group did, on this rank; None before the first."""
    return _records.get(default.resolve(group))


def as_one(wire: Wire, first: Record, second: Record) -> None:
    """Have two calls, of which this group's last is the second, recorded as one."""
    names = dict.fromkeys((first.algorithm, second.algorithm))
    _records[wire] = Record(
        " and ".join(names),
        first.rows + second.rows,
        first.total + second.total,
        first.union + second.union,
        first.messages + second.messages,
        first.sent_bytes + second.sent_bytes,
        first.bound_bytes + second.bound_bytes,
        first.seconds + second.seconds,
    )


class Note(Protocol):
    def __call__(
        self,
        algorithm: str,
        *,
        rows: int,
        total: int,
        union: int,
        bound: float,
        ranges: tuple[int, ...] | None = None,
    ) -> Record: ...


@contextmanager
def recording(wire: Wire, name: str) -> Iterator[Note]:
    """A call as a range of the profiler; gives the function that notes what it did."""
    start = _counters(wire)

    def note(
        algorithm: str,
        *,
        rows: int,
        total: int,
        union: int,
        bound: float,
        ranges: tuple[int, ...] | None = None,
    ) -> Record:
        messages, sent, seconds = _since(start, wire)
        record = _records[wire] = Record(
            algorithm, rows, total, union, messages, sent, round(bound), seconds, ranges
        )
        return record

    with record_function(f"weft::{name}"):
        yield note


@contextmanager
def apart(wire: Wire) -> Iterator[None]:
    """What is done in here is no part of the call that is recorded."""
    start = _counters(wire)
    yield
    messages, sent, seconds = _since(start, wire)
    before = _apart.get(wire, (0, 0, 0.0))
    _apart[wire] = (before[0] + messages, before[1] + sent, before[2] + seconds)


def _counters(wire: Wire) -> _Counters:
    messages, sent, seconds = _apart.get(wire, (0, 0, 0.0))
    traffic = wire.traffic
    return traffic.messages - messages, traffic.bytes - sent, time.perf_counter() - seconds


def _since(start: _Counters, wire: Wire) -> _Counters:
    messages, sent, seconds = _counters(wire)
    return messages - start[0], sent - start[1], seconds - start[2]


def started(wire: Wire, name: str, job: Callable[[], Any], async_op: bool) -> Any:
    """The job's result when its turn has come, or at once the `Work` that will have it."""
    return wire.worker.submit(name, job) if async_op else wire.worker.call(name, job)
