"""A caller's function as an op that never raises: what it raises is kept until all can be told.

It may raise while other ranks are in the middle of an algorithm, and wait for this one. So the
algorithm goes on with harmless values, and then the ranks tell each other (`run.performed`).
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from ..base.tensors import has_elements, lacking
from ..kernels.ops import Op


def guarded(op: Op, raised: list[BaseException]) -> Op:
    """An op of a caller's function that puts what this raises first into `raised`.

    From then on it returns the left operand. Who has been told must empty the list: tracebacks have
    frames that have it, a cycle, which would keep the memory of the call.
    """

    def combine(left: Tensor, right: Tensor) -> Tensor:
        if raised:
            return left
        try:
            both = op.function(left, right)
            if not isinstance(both, Tensor):
                raise TypeError(f"op returned a {type(both).__name__}, not a tensor")
            if not has_elements(both):
                raise ValueError(f"op returned a tensor that is {lacking(both)}")
            result = _kind(both)
            operands = _kind(left)
            if result != operands:
                raise ValueError(f"op returned {result} for two operands of {operands}")
        except BaseException as error:
            raised.append(error)
            return left
        return both.detach()

    return replace(op, function=combine)


def _kind(values: Tensor) -> str:
    return f"{tuple(values.shape)} of {values.dtype} on {values.device}"
