"""The rows of all ranks one after the other, unreduced: coalesce mode "disable".

Nothing is reduced, so no algorithm of a sparse all-reduce runs, whichever was selected; the rows
travel as in `weft.sparse_all_gather`.
"""

from __future__ import annotations

from typing import Any

from ...rows import Rows
from ...sparse.all_gather import gather_now
from ...sparse.request import Request
from ...wire.base import Wire

__all__ = ["concatenated"]


def concatenated(wire: Wire, request: Request) -> Any:
    """All ranks' rows in rank order, in the form of the request's; collective.

    Indices are int64, whatever they were; `request` says so, and states its errors.
    """
    rows = request.rows
    request.rows = Rows(rows.indices.long(), rows.values)
    request.fields |= {"ind_dtype": request.fields["index dtype"], "index dtype": "torch.int64"}
    return gather_now(wire, request, "sparse_allreduce in coalesce mode disable")[0]
