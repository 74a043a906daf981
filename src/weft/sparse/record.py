"""The record of the last sparse call on each group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from ..group import default
from ..group.group import Group


@dataclass(frozen=True, slots=True)
class Record:
    """What one call did, on this rank; of a list, all tables together.

    Attributes:
        algorithm: what ran; "eager" where all rows travelled in the opening exchange.
        why: the line of the rule that decided, in words; "" in calls that have no choice.
        rows: rows of this rank, without duplicates where the call combines them.
        total: rows of all ranks together, K.
        union: rows of this rank's result; of `sparse_all_reduce`, U.
        messages: sent by this rank, the opening exchange included.
        sent_bytes: in those messages.
        bound_bytes: bytes that the average rank must receive, whatever the algorithm.
        seconds: from the call's turn to the result; of a list for all its tables.
        ranges: of `sparse_reduce_scatter`: rank r owns the indices from `ranges[r]` up to, not
            including, `ranges[r + 1]`.
    """

    algorithm: str
    why: str
    rows: int
    total: int
    union: int
    messages: int
    sent_bytes: int
    bound_bytes: int
    seconds: float
    ranges: tuple[int, ...] | None = None

    @classmethod
    def of(
        cls,
        group: Group,
        algorithm: str,
        why: str,
        rows: int = 0,
        total: int = 0,
        union: int = 0,
        bound: float = 0,
    ) -> Record:
        """Of the call that runs, with what it has sent until now."""
        call = group.worker.now
        assert call is not None  # whose turn it is
        call.measure()
        return cls(
            algorithm,
            why,
            rows,
            total,
            union,
            call.messages,
            call.sent_bytes,
            round(bound),
            call.seconds,
        )


_RECORD = "record of the last sparse call"  # of a group's state


def last_call(group: object = None) -> Record | None:
    """What the last sparse call on this group did, on this rank; None before the first."""
    return cast(Record | None, default.resolve(group).state.get(_RECORD))


def note(group: Group, record: Record) -> None:
    """Store the record of the call that runs."""
    call = group.worker.now
    assert call is not None  # whose turn it is
    group.state[_RECORD] = record
    call.sparse = record
