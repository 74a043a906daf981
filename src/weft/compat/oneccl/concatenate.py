"""The rows of all ranks one after the other, unreduced: coalesce mode "disable".

Nothing is reduced, so no algorithm of a sparse all-reduce runs, whichever was selected; the rows
travel as in `weft.sparse_all_gather`.
"""

from __future__ import annotations

from typing import Any

import torch

from ...rows import Rows
from ...sparse.all_gather import gather_now
from ...sparse.arguments import outside
from ...sparse.request import Request
from ...wire.base import Wire

__all__ = ["concatenated"]


def concatenated(wire: Wire, request: Request, index: torch.dtype) -> Any:
    """All ranks' rows in rank order, in the form of the request's; collective.

    Indices are int64, whatever they were; `request`, which has not looked at them, says so, and
    states its errors. Those of uint64 travel as they are, bit by bit, since nobody compares them.

    Args:
        wire: among whom.
        request: this rank's rows, and the fingerprint.
        index: the dtype that the indices were.
    """
    rows = request.rows
    if request.error is None and len(rows):
        lowest, highest = (int(end) for end in rows.indices.aminmax())
        if index == torch.uint64 and lowest < 0:
            highest = torch.iinfo(torch.int64).max  # as int32 they would lose the upper bits
        else:
            request.error = outside(lowest, highest, None)
        request.highest = highest
    request.rows = Rows(rows.indices.long(), rows.values)
    request.fields |= {"ind_dtype": request.fields["index dtype"], "index dtype": "torch.int64"}
    return gather_now(wire, request, "sparse_allreduce in coalesce mode disable")[0]
