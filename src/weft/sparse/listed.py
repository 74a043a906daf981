"""The tables of a list, and what was asked for each.

A list often has many tables of one kind, and looking at a table is a good part of what a call
costs. So those of one kind that follow each other share one `Request`, that of the first of them,
and bring nothing of their own but their tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from operator import attrgetter
from typing import Any, NamedTuple

from .arguments import Pair, paired
from .request import NOTHING, Request

__all__ = ["Listed", "listed"]

_RESTORE = attrgetter("restore")


class Listed(NamedTuple):
    """Tables, at least one.

    Attributes:
        requests: what was asked for each. Of neighbours of one kind it is the same object, whose
            `rows` are those of the first of them.
        pairs: indices and values of each, on the CPU.
    """

    requests: list[Request]
    pairs: list[Pair]

    @classmethod
    def of(cls, requests: Sequence[Request]) -> Listed:
        """Tables each of which has a request of its own."""
        return cls(list(requests), [(each.rows.indices, each.rows.values) for each in requests])

    def gives(self, pairs: list[Pair]) -> list[Any]:
        """Results, one of each table, in the forms that the tables were given in."""
        if set(map(_RESTORE, self.requests)) == {paired}:
            return pairs
        return [each.gives(pair) for each, pair in zip(self.requests, pairs, strict=True)]

    def part(self, tables: Sequence[int]) -> Listed:
        """Some of them."""
        return Listed(
            [self.requests[table] for table in tables], [self.pairs[table] for table in tables]
        )


def listed(
    rows: list[Any], op: Any, algorithm: object, wire_dtype: object, places: list[Any]
) -> Listed:
    """Check the arguments of a call; an empty list is one empty table."""
    tables = rows or [NOTHING]
    requests: list[Request] = []
    pairs: list[Pair] = []
    before: Request | None = None
    for table, place in zip_longest(tables, places[: len(tables)]):
        pair = None if before is None or place is not None else before.like(table)
        if pair is None:
            before = Request.of_table(table, op, algorithm, wire_dtype, place, before)
            pair = before.rows.indices, before.rows.values
        assert before is not None
        requests.append(before)
        pairs.append(pair)
    # not in the fields of others, which may be the same object
    requests[0].fields = {**requests[0].fields, "number of tables": len(rows)}
    return Listed(requests, pairs)
