"""The arithmetic of dense reductions: how contributions combine, and how a tensor is cut for it.

What belongs here needs no wire. Half precision, and float8, is accumulated in float32 and
rounded once. In min and max a NaN wins and -0.0 is less than 0.0 (IEEE 754-2019), as in the sparse
reductions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .base import flattened

_BLOCK = 1 << 15  # elements that are combined at once, in memory that stays in the cache
_ALIGN = 64  # bytes that parts are multiples of

Combine = Callable[..., Tensor]

Reduce = Callable[[Sequence[Tensor], Tensor], None]
"""Combines all contributions, in rank order, into the second; see `reduce_parts`."""

OPS: dict[str, Combine] = {
    "sum": torch.add,
    "avg": torch.add,  # then divided by how many there are
    "min": torch.minimum,
    "max": torch.maximum,
    "prod": torch.mul,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}

# torch's arithmetic lacks these; seen as signed integers they add and multiply to the same bits
_SIGNED = {
    torch.uint16: torch.int16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
}

# what holds the bits of a number
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def cut(flat: Tensor, ranks: int) -> int:
    """Elements of the part of a 1-D tensor that each rank reduces; of the last ones it may be
    less."""
    each, aligned = -(-len(flat) // ranks), grain(flat)
    return -(-each // aligned) * aligned


def grain(flat: Tensor) -> int:
    """Elements of which parts and chunks hold whole multiples, so that they are aligned."""
    return max(1, _ALIGN // flat.element_size())


def refuses(op: str, dtype: torch.dtype) -> str | None:
    """Why tensors of this dtype cannot be reduced by this op, or None if they can."""
    if op not in OPS:
        return f"op {op!r} is unknown: use one of {', '.join(OPS)}"
    if op == "avg" and not (dtype.is_floating_point or dtype.is_complex):
        return f"op avg is for floating point, the tensor is {dtype}: sum, then divide"
    combine, nothing = _arithmetic(op, torch.empty(0, dtype=dtype))
    try:
        if _is_widened(dtype):
            nothing = nothing.copy_(nothing.float()).float()
        combine(nothing, nothing)
        if op == "avg":
            nothing.div_(1)  # of complex32, torch has the sum alone
    except (RuntimeError, TypeError, NotImplementedError) as error:
        return f"op {op} does not apply to {dtype}: {error}"
    return None


def reduce(parts: Sequence[Tensor], op: str, out: Tensor) -> None:
    """What `all_reduce` makes of contributions, where they all are here.

    Args:
        parts: 1-D, of the dtype and size of `out`, in rank order; left as they are, or overwritten
            as by `reduce_parts`.
        op: one of `OPS`.
        out: contiguous; may be one of the parts.
    """
    combined, flat = arithmetic(op, flattened(out))
    seen = [part.view(flat.dtype) for part in parts]
    if not len(flat):
        return
    if len(seen) == 1:
        flat.copy_(seen[0])
    else:
        combined(seen, flat)


def arithmetic(op: str, flat: Tensor) -> tuple[Reduce, Tensor]:
    """How contributions combine, and the tensor seen in the dtype in which they do."""
    combine, seen = _arithmetic(op, flat)
    return functools.partial(reduce_parts, combine=combine, mean=op == "avg"), seen


def _arithmetic(op: str, flat: Tensor) -> tuple[Combine, Tensor]:
    """`arithmetic`, of two contributions."""
    combine, dtype = OPS[op], flat.dtype
    if dtype in _SIGNED:
        signed = flat.view(_SIGNED[dtype])
        if op not in ("min", "max"):
            return combine, signed
        top = torch.iinfo(signed.dtype).min  # flipping the top bit turns one order into the other

        def ordered(left: Tensor, right: Tensor, *, out: Tensor | None = None) -> Tensor:
            return torch.bitwise_xor(combine(left ^ top, right ^ top), top, out=out)

        return ordered, signed
    if op in ("min", "max") and dtype.is_floating_point:
        return functools.partial(_extremum, op), flat
    if dtype is torch.bool:
        combine = {"sum": torch.logical_or, "prod": torch.logical_and}.get(op, combine)
    return combine, flat


def _is_widened(dtype: torch.dtype) -> bool:
    """Whether contributions are combined in float32: of half precision and of float8 they are."""
    return dtype.is_floating_point and dtype.itemsize <= 2


def _extremum(op: str, left: Tensor, right: Tensor, *, out: Tensor | None = None) -> Tensor:
    """torch's choice, but the sign of a zero does not depend on how a tensor was cut.

    Of 0.0 and -0.0 torch takes the left or the right one by where in its vectors they lie. A
    minimum is negative where either is, but for a NaN; a maximum where both are.
    """
    out = torch.empty_like(left) if out is None else out
    bits = _BITS[out.dtype.itemsize]
    sign = torch.iinfo(bits).min
    for start in range(0, max(1, len(out)), _BLOCK):  # once, so that what torch refuses is refused
        to, *both = (each[start : start + _BLOCK] for each in (out, left, right))
        chosen, (one, two) = OPS[op](*both).view(bits), (each.view(bits) for each in both)
        if op == "min":
            signs = (one | two).bitwise_and_(sign)
            torch.bitwise_or(chosen, signs, out=to.view(bits))
        else:
            signs = (one & two).bitwise_or_(~sign)
            torch.bitwise_and(chosen, signs, out=to.view(bits))
    return out


def reduce_parts(
    parts: Sequence[Tensor], out: Tensor, combine: Combine = torch.add, *, mean: bool = False
) -> None:
    """Combine at least two in the order given, into `out`, which may be one of the parts.

    For the `mean` of them, what comes of that is divided, in half precision before it is rounded.
    The others are left as they are: they may be memory that is only to be read.
    """
    wide = _is_widened(out.dtype)
    if not wide and all(part.data_ptr() != out.data_ptr() for part in parts[2:]):
        combine(parts[0], parts[1], out=out)
        for part in parts[2:]:
            combine(out, part, out=out)
        if mean:
            out.div_(len(parts))
        return
    for start in range(0, len(out), _BLOCK):
        target, *blocks = (each[start : start + _BLOCK] for each in (out, *parts))
        total = combine(blocks[0].float(), blocks[1].float()) if wide else combine(*blocks[:2])
        for block in blocks[2:]:
            combine(total, block.float() if wide else block, out=total)
        target.copy_(total.div_(len(parts)) if mean else total)
