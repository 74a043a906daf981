"""The least that any exact schedule sends.

A *part* is what the schedule's messages join: a rank, or a host with all its ranks. An index that m
parts hold needs m-1 messages between parts to combine its rows at one of them, and P-1 to deliver
the sum to the P-1 others. This holds for each index alone, and so for all together.

Source: docs/holders.md, which proves it; tests/sparse/test_bound.py searches all schedules of a few
indices on a few parts for a better one.
"""

from __future__ import annotations


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
