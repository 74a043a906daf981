"""The rows of all ranks one after the other, unreduced: coalesce mode "disable".

Every rank's rows are given keys of their own, ascending by rank and then by position, and travel
as bytes, the index before the values. Their sparse all-reduce is the concatenation: nothing meets,
so nothing is added, and any algorithm serves.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...rows import Rows
from ...sparse.api import reduce_now
from ...sparse.request import Request
from ...wire.base import Wire, as_bytes

__all__ = ["concatenated"]

_INDEX = 8  # bytes of an index in a row
_RANK = 40  # bits of a position in a key

Reserve = Callable[[int, tuple[int, ...]], object]


def concatenated(
    wire: Wire, request: Request, rows: Rows, reserve: Reserve | None
) -> tuple[Tensor, Tensor]:
    """All ranks' rows in rank order: their indices as int64, their values; 1-D; collective.

    Args:
        wire: among whom.
        request: what was checked of the rows: its errors and its fingerprint are stated.
        rows: this rank's, as they were given.
        reserve: called with the number of rows and the row shape as soon as they are known.
    """
    dtype, count = rows.values.dtype, len(rows)
    index = as_bytes(rows.indices.to(torch.int64)).view(count, _INDEX)
    packed = torch.cat([index, as_bytes(rows.values).view(count, rows.row_bytes)], 1)
    keys = torch.arange(count, device=index.device) + (wire.rank << _RANK)

    def place(
        count: int, row_shape: tuple[int, ...], dtypes: tuple[torch.dtype, torch.dtype]
    ) -> tuple[Tensor, Tensor]:
        if reserve is not None:
            reserve(count, ((row_shape[0] - _INDEX) // dtype.itemsize,))
        return torch.empty(count, dtype=dtypes[0]), torch.empty(count, *row_shape, dtype=dtypes[1])

    moved = Request.of(
        (keys, packed), "bor", request.algorithm, None, None if reserve is None else place
    )
    moved.error = request.error or moved.error
    moved.fields = request.fields | {"row shape": moved.fields.get("row shape")}
    (_, found), _ = reduce_now(wire, moved)
    indices, values = (found[:, part].reshape(-1) for part in (slice(_INDEX), slice(_INDEX, None)))
    return indices.view(torch.int64), values.view(dtype)
