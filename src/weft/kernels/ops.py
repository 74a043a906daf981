"""The reductions: what each is called, what combines two values, and which values it takes.

To add an operation: one entry in `OPS`. Algorithms and dense reductions find it there, and serve it
by torch operations; `tests/sparse/test_added_op.py` shows one. A row that only one rank brings, and
once, is copied. To be fast in sparse calls it needs machine code: a function of two numbers in
`loops`, its name in `loops.CONSTANTS`, and in `values` the kinds of numbers that it is for; in
dense reductions, a form in place in `schedules/dense.py`. A gradient of these needs a case in
`comm/all_reduce.py`. The docstrings of `sparse/api.py` and `comm/all_reduce.py`, README and
docs/start.md list all operations; `COMBINE` in `tests/cases.py` and `OPS` in
`tests/schedules/test_dense.py` try them.

What combines more than two rows at once, as a median, is no operation: it is a routine of its own
over what all ranks gave, as those in `sparse/family`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_INTS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
_NUMBERS = (*_FLOATS, *_INTS)
_BITWISE = (*_INTS, torch.bool)
DTYPES = (*_NUMBERS, torch.bool)
"""The dtypes that values to be reduced may have."""

HALVES = (torch.float16, torch.bfloat16)
"""Half precision, whose sums are kept in float32."""

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Op:
    """One reduction.

    Attributes:
        name: "sum", "prod", ...; for a callable its kind and qualified name.
        function: combines two tensors of equal shape `[n, *row_shape]`, and changes neither: those
            of `OPS` element by element, since parts of rows are reduced, too, with the same bits
            wherever in the tensor an element lies; a caller's row by row. The left operand comes
            from the lower rank, or from earlier in the input.
        takes: the dtypes of values that can be reduced; None: all of `DTYPES`.
        instead: for values of other dtypes, what to do instead; for the error.
        rounds: whether the result of two values may need more digits than they have.
        mean: the result is divided by the size of the group at the end.
        builtin: True for the operations named here, whose kernels may be compiled, which are
            associative up to rounding and commutative; False for a caller's function, which is
            only promised to be associative.
    """

    name: str
    function: Callable[[Tensor, Tensor], Tensor]
    takes: tuple[torch.dtype, ...] | None = None
    instead: str = ""
    rounds: bool = False
    mean: bool = False
    builtin: bool = True

    def refuses(self, dtype: torch.dtype) -> str | None:
        """Why values of this dtype cannot be reduced by this op, or None if they can."""
        if dtype not in DTYPES:
            return f"values of {dtype} are not supported: convert to one of {_names(DTYPES)}"
        if self.takes is None or dtype in self.takes:
            return None
        return f"op {self.name} is for {self.instead.format(dtype=dtype)}"

    def accumulator(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which partial results of values of this dtype are kept and travel.

        Wider only where that changes the result: half precision rounds what a rank brings, and the
        result, but no sum of some ranks. Integers wrap: early or late gives the same bits.
        """
        if self.builtin and self.rounds and dtype in HALVES:
            return torch.float32
        return dtype


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


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


_FOR_BITS = "integers and bool, the values are {dtype}"

OPS: dict[str, Op] = {
    op.name: op
    for op in (
        Op(
            "sum",
            torch.add,
            takes=_NUMBERS,
            instead="numbers, the values are bool: use bor",
            rounds=True,
        ),
        Op(
            "avg",
            torch.add,
            takes=_FLOATS,
            instead="floating point, the values are {dtype}: sum, then divide",
            rounds=True,
            mean=True,
        ),
        Op("min", functools.partial(_extremum, torch.minimum, torch.bitwise_or)),
        Op("max", functools.partial(_extremum, torch.maximum, torch.bitwise_and)),
        Op(
            "prod",
            torch.mul,
            takes=_NUMBERS,
            instead="numbers, the values are bool: use band",
            rounds=True,
        ),
        Op("band", torch.bitwise_and, _BITWISE, _FOR_BITS),
        Op("bor", torch.bitwise_or, _BITWISE, _FOR_BITS),
        Op("bxor", torch.bitwise_xor, _BITWISE, _FOR_BITS),
    )
}
"""The built-in operations by name."""

ELSEWHERE = {
    "mean": "avg",
    "average": "avg",
    "add": "sum",
    "product": "prod",
    "mul": "prod",
    "minimum": "min",
    "maximum": "max",
    "amin": "min",
    "amax": "max",
    "and": "band",
    "or": "bor",
    "xor": "bxor",
}
"""What other libraries call some of them."""
