"""The reductions: what each is called, what combines two values, and which values it takes.

To add an operation: one entry in `OPS`; kernels, algorithms and tests find it there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_INTS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
DTYPES = (*_FLOATS, *_INTS, torch.bool)
"""The dtypes that values to be reduced may have."""

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Op:
    """One reduction.

    Attributes:
        name: "sum", "prod", ...; for a callable its kind and qualified name.
        function: combines two tensors of equal shape `[n, *row_shape]` row by row; the left
            operand comes from the lower rank, or from earlier in the input.
        builtin: True for the operations named here, whose kernels may be compiled, which are
            associative up to rounding and commutative; False for a caller's function, which is
            only promised to be associative.
        mean: the result is divided by the size of the group at the end.
    """

    name: str
    function: Callable[[Tensor, Tensor], Tensor]
    builtin: bool = True
    mean: bool = False

    def refuses(self, dtype: torch.dtype) -> str | None:
        """Why values of this dtype cannot be reduced by this op, or None if they can."""
        if dtype not in DTYPES:
            return f"values of {dtype} are not supported: convert to one of {_names(DTYPES)}"
        if not self.builtin:
            return None
        if self.name.startswith("b") and dtype in _FLOATS:
            return f"op {self.name} is for integers and bool, the values are {dtype}"
        if self.mean and dtype not in _FLOATS:
            return f"op avg is for floating point, the values are {dtype}: sum, then divide"
        if self.name in ("sum", "prod") and dtype is torch.bool:
            other = "bor" if self.name == "sum" else "band"
            return f"op {self.name} is for numbers, the values are bool: use {other}"
        return None

    def accumulator(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which partial results of values of this dtype are kept and travel.

        Wider only where that changes the result: half precision rounds what a rank brings, and the
        result, but no sum of some ranks. Integers wrap: early or late gives the same bits.
        """
        rounds = self.builtin and self.name in ("sum", "avg", "prod")
        return (
            torch.float32 if rounds and dtype.itemsize == 2 and dtype.is_floating_point else dtype
        )

    def neutral(self, dtype: torch.dtype) -> float | int | bool:
        """The value that changes nothing: -0.0 for float sums; 0.0 would make 0.0 of a -0.0."""
        if self.name in ("sum", "avg"):
            return -0.0 if dtype.is_floating_point else 0
        if self.name == "prod":
            return 1
        if self.name in ("bor", "bxor"):
            return False if dtype is torch.bool else 0
        if self.name == "band":
            return True if dtype is torch.bool else (255 if dtype is torch.uint8 else -1)
        if dtype is torch.bool:
            return self.name == "min"
        if dtype.is_floating_point:
            return float("inf") if self.name == "min" else float("-inf")
        limits = torch.iinfo(dtype)
        return limits.max if self.name == "min" else limits.min


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def _minimum(left: Tensor, right: Tensor) -> Tensor:
    return _extremum(torch.minimum, torch.bitwise_or, left, right)


def _maximum(left: Tensor, right: Tensor) -> Tensor:
    return _extremum(torch.maximum, torch.bitwise_and, left, right)


def _extremum(
    choose: Callable[[Tensor, Tensor], Tensor],
    merge: Callable[[Tensor, Tensor], Tensor],
    left: Tensor,
    right: Tensor,
) -> Tensor:
    """torch's choice, but -0.0 is less than 0.0, as in IEEE 754-2019.

    torch takes the left or the right of equal operands by where in the vector they lie, so the
    sign of a zero would depend on how the rows were cut.
    """
    chosen = choose(left, right)
    if not chosen.dtype.is_floating_point:
        return chosen
    bits = _BITS[chosen.dtype.itemsize]
    both = merge(left.contiguous().view(bits), right.contiguous().view(bits)).view(chosen.dtype)
    return torch.where(left == right, both, chosen)


OPS: dict[str, Op] = {
    "sum": Op("sum", torch.add),
    "avg": Op("avg", torch.add, mean=True),
    "min": Op("min", _minimum),
    "max": Op("max", _maximum),
    "prod": Op("prod", torch.mul),
    "band": Op("band", torch.bitwise_and),
    "bor": Op("bor", torch.bitwise_or),
    "bxor": Op("bxor", torch.bitwise_xor),
}
"""The built-in operations by name."""
