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

__all__ = ["Record", "last_call", "recording", "started"]


@dataclass(frozen=True, slots=True)
class Record:
    """What one call did, on this rank; for a list of tables, all of them together.

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


_records: WeakKeyDictionary[Wire, Record] = WeakKeyDictionary()


def last_call(group: Any = None) -> Record | None:
    """What the last sparse call on this group did, on this rank; None before the first."""
    return _records.get(default.resolve(group))


class _Note(Protocol):
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
def recording(wire: Wire, name: str) -> Iterator[_Note]:
    """A call as a range of the profiler; gives the function that notes what it did."""
    start, messages, sent = time.perf_counter(), wire.traffic.messages, wire.traffic.bytes

    def note(
        algorithm: str,
        *,
        rows: int,
        total: int,
        union: int,
        bound: float,
        ranges: tuple[int, ...] | None = None,
    ) -> Record:
        record = _records[wire] = Record(
            algorithm,
            rows,
            total,
            union,
            wire.traffic.messages - messages,
            wire.traffic.bytes - sent,
            round(bound),
            time.perf_counter() - start,
            ranges,
        )
        return record

    with record_function(f"weft::{name}"):
        yield note


def started(wire: Wire, name: str, job: Callable[[], Any], async_op: bool) -> Any:
    """The job's result when its turn has come, or at once the `Work` that will have it."""
    return wire.worker.submit(name, job) if async_op else wire.worker.call(name, job)
