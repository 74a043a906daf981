"""uint64 indices, also those from 2^63 on, for which weft's int64 from 0 up has no place.

Rows from there on are reduced in a call of their own, behind that of the rows below, their indices
less 2^63. What it gives comes behind what the first call gave: the order of unsigned numbers. Two
tables of one list would not do, whose keys, of both together, are int64 too.

Whether there are such rows is a field of the first call's fingerprint, which only a rank that has
some states. So all ranks know it from the opening of that call, before there is a result; and where
nobody has any, that call is all there is, and nothing travels or is copied for their sake.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...rows import Rows
from ...sparse.api import reduce_now
from ...sparse.call import Allocator
from ...sparse.record import as_one
from ...sparse.request import Request
from ...wire.base import Wire

__all__ = ["halves", "reduced"]

_FIELD = "indices from 2^63"
_ENDS = torch.iinfo(torch.int64)

_Dtypes = tuple[torch.dtype, torch.dtype]

Ask = Callable[[Rows, Allocator | None], Request]
"""What makes a request of rows, and of where the result is wanted."""


def halves(rows: Rows) -> tuple[Rows, Rows]:
    """Rows below 2^63, and those from there on less that; each in their order.

    Args:
        rows: their indices are uint64, seen as int64.

    Example:
        >>> bits = torch.tensor([2**64 - 1, 7], dtype=torch.uint64).view(torch.int64)
        >>> [half.indices.tolist() for half in halves(Rows(bits, torch.ones(2)))]
        [[7], [9223372036854775807]]
    """
    indices, values = rows.indices, rows.values
    if not len(rows) or int(indices.min()) >= 0:
        return rows, Rows(indices[:0], values[:0])
    upper = indices < 0
    lower = ~upper
    return (
        Rows(indices[lower], values[lower]),
        Rows(indices[upper] & _ENDS.max, values[upper]),
    )


def reduced(
    wire: Wire, parts: tuple[Rows, Rows], ask: Ask, out: Allocator | None
) -> tuple[Tensor, Tensor]:
    """The result, ascending, its indices seen as int64; collective.

    Args:
        wire: among whom.
        parts: as `halves` gives them.
        ask: makes a request.
        out: the caller's memory, which is asked for once, for all the result.
    """

    def asked(part: Rows, place: Allocator) -> Request:
        request = ask(part, None if out is None else place)
        for each in parts:  # so that the rows of both calls are known to be of one shape
            if len(each):
                request.fields["row shape"] = tuple(each.row_shape)
        return request

    def place(count: int, row_shape: tuple[int, ...], dtypes: _Dtypes) -> tuple[Tensor, Tensor]:
        assert out is not None
        if _FIELD not in first.agreed:
            return out(count, row_shape, dtypes)
        return torch.empty(count, dtype=dtypes[0]), torch.empty(count, *row_shape, dtype=dtypes[1])

    first = asked(parts[0], place)
    if len(parts[1]):
        first.fields[_FIELD] = "some"
    lower: tuple[Tensor, Tensor]
    lower, record = reduce_now(wire, first)
    if _FIELD not in first.agreed:
        return lower
    begin = len(lower[0])
    whole: list[Tensor] = []

    def behind(count: int, row_shape: tuple[int, ...], dtypes: _Dtypes) -> tuple[Tensor, Tensor]:
        assert out is not None
        whole.extend(out(begin + count, row_shape, dtypes))
        return whole[0][begin:], whole[1][begin:]

    upper, more = reduce_now(wire, asked(parts[1], behind))
    as_one(wire, record, more)
    if out is None:
        whole = [torch.cat(each) for each in zip(lower, upper, strict=True)]
    else:
        for each, part in zip(whole, lower, strict=True):
            each[:begin].copy_(part)
    whole[0][begin:].bitwise_or_(_ENDS.min)
    return whole[0], whole[1]
