"""The result of a sparse all-reduce, computed in the simplest way, for tests to compare with."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..base.errors import WeftError
from ..kernels.ops import HALVES, OPS
from ..sparse.rows import Rows


def expected(
    parts: Sequence[Rows],
    op: str | Callable[[Tensor, Tensor], Tensor] = "sum",
    wire_dtype: torch.dtype | None = None,
) -> Rows:
    """Compute the reduction of all ranks' rows, row by row, in one process.

    It reduces in the order that `weft.sparse_all_reduce` documents. First, a rank's duplicates are
    reduced in input order, and the result is rounded once to the dtype of the values, or to
    `wire_dtype` if that is narrower; half precision with `wire_dtype=torch.float32` is not rounded
    here. Then the ranks are reduced in rank order, and the result is rounded once. Half precision
    is summed and multiplied in float32 in between.

    Args:
        parts: each rank's rows, of one dtype and row shape, in rank order; at least one rank's.
        op: the name of an operation of `weft.sparse_all_reduce`, or an associative function of two
            `[1, *row_shape]` tensors.
        wire_dtype: as for `weft.sparse_all_reduce`.

    Returns:
        The rows of the result: sorted indices, each once, and their values, in the dtypes and with
        the height of the first rank's.

    Raises:
        WeftError: there are no parts.

    Example:
        >>> one = Rows(torch.tensor([4, 1, 4]), torch.tensor([1.0, 2.0, 4.0]))
        >>> two = Rows(torch.tensor([4]), torch.tensor([8.0]))
        >>> expected([one, two]).values
        tensor([ 2., 13.])
    """
    if not parts:
        raise WeftError("parts is empty: pass the rows of at least one rank")
    dtype = parts[0].values.dtype
    named = OPS[op] if isinstance(op, str) else None
    narrow = dtype if wire_dtype is None or dtype.itemsize <= wire_dtype.itemsize else wire_dtype
    combine = named.function if named else op
    rounds_once = wire_dtype is torch.float32 and dtype in HALVES
    partial = named.accumulator(dtype) if named else torch.float32 if rounds_once else dtype
    assert callable(combine)

    total: dict[int, Tensor] = {}
    for rows in parts:
        mine: dict[int, Tensor] = {}
        values = rows.values.to(partial).unsqueeze(1).unbind()
        for index, row in zip(rows.indices.tolist(), values, strict=True):
            mine[index] = combine(mine[index], row) if index in mine else row
        for index, row in mine.items():
            if partial is not narrow and not rounds_once:
                row = row.to(dtype).to(narrow).to(partial)
            total[index] = combine(total[index], row) if index in total else row

    indices = torch.tensor(sorted(total), dtype=parts[0].indices.dtype)
    if not total:
        return Rows(indices, parts[0].values[:0], parts[0].height)
    result = torch.cat([total[index] for index in sorted(total)])
    if named is not None and named.mean:
        result = result / len(parts)
    return Rows(indices, result.to(dtype).to(narrow).to(dtype), parts[0].height)
