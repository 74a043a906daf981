"""The least that any exact schedule sends.

A *part* is what the schedule's messages join: a rank, or a host with all its ranks. An index that m
parts hold needs m-1 messages between parts to combine its rows at one of them, and P-1 to deliver
the sum to the P-1 others. This holds for each index alone, and so for all together.

Source: docs/holders.md, which proves it; tests/sparse/test_bound.py searches all schedules of a few
indices on a few parts for a better one.
"""

from __future__ import annotations

from collections.abc import Sequence


def rows_of_average(total: float, union: float, parts: int) -> float:
    """Rows that the average part must receive, and send: [K + (P-2)·U] / P.

    Args:
        total: K, rows of all parts together, each part's duplicates removed.
        union: U, rows of the result.
        parts: P.

    Example:
        >>> rows_of_average(total=400, union=400, parts=4)  # no overlap: what all others have
        300.0
        >>> rows_of_average(total=400, union=100, parts=4)  # the same rows: a dense all-reduce
        150.0
    """
    return (total + (parts - 2) * union) / parts


def rows_of_busiest(own: Sequence[float], others: Sequence[float], union: float) -> float:
    """Rows that the part with most to do must receive or send.

    That is at least what the average part must. A part also sends each row that it has once or
    more, and receives each row that others have once or more.

    Args:
        own: rows of each part, its duplicates removed.
        others: for each part the rows in the union of all others.
        union: rows of the result.

    Example:
        >>> rows_of_busiest(own=[900, 100, 100], others=[200, 950, 950], union=1000)
        950.0
    """
    if len(own) == 1:
        return 0.0
    return max(rows_of_average(sum(own), union, len(own)), *map(float, own), *map(float, others))
