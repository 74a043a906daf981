"""What a caller's function raises, kept until all ranks can be told.

A caller's `op` may raise while other ranks are in the middle of the schedule, and wait
for this one. The schedule does not see the exception: it is kept as the call's `Trouble`, the
schedule goes on with harmless values, and then the ranks tell each other (`run.performed`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..base.tensors import has_elements, lacking
from ..kernels.ops import Op


@dataclass(slots=True)
class Trouble:
    """The exception that a caller's function raised first, or None.

    It is apart from the call, which holds the function: that must not hold the call, or the memory
    of each call would be kept until the garbage collector runs.
    """

    error: BaseException | None = None

    def forget(self) -> None:
        """Let go of the exception, once all have been told.

        Its traceback has frames that have this: a cycle, which would keep the memory of the call.
        """
        self.error = None

    def guarded(self, op: Op) -> Op:
        """A caller's op that never raises: what its function raises is kept here.

        From then on it returns the left operand instead.
        """

        def combine(left: Tensor, right: Tensor) -> Tensor:
            if self.error is not None:
                return left
            try:
                both = op.function(left, right)
                if not isinstance(both, Tensor):
                    raise TypeError(f"op returned a {type(both).__name__}, not a tensor")
                if not has_elements(both):
                    raise ValueError(f"op returned a tensor that is {lacking(both)}")
                if _kind(both) != _kind(left):
                    result, operands = map(_described, (both, left))
                    raise ValueError(f"op returned {result} for two operands of {operands}")
            except BaseException as error:
                self.error = error
                return left
            return both.detach()

        return replace(op, function=combine)


def _kind(values: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return values.shape, values.dtype, values.device


def _described(values: Tensor) -> str:
    return f"{tuple(values.shape)} of {values.dtype} on {values.device}"
