"""What a caller gave, one argument after the other: rows, memory for a result, the reduction.

Each check raises a `WrongError` with the sentence that all ranks are to be told; `request` makes
the checks of a call of these and states what they raise. Nothing here knows of a call or a rank.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..kernels.ops import OPS, Op
from ..rows import Rows
from ..tensors import has_elements, is_made_of_others, is_transformed, lacking
from ..wire.base import is_plain
from .call import Out, overlapping, unwritable

Pair = tuple[Tensor, Tensor]
"""Indices and values of some rows."""

WIRE_DTYPES = (torch.bfloat16, torch.float16)
"""What `wire_dtype` may be beside None."""

_LONGEST = 160  # bytes of the name of a caller's function


class WrongError(Exception):
    """Carries the sentence of a failed check."""


def unwrapped(given: object) -> tuple[Rows, Callable[[Rows], Any]]:
    """The rows that were given, and what gives a result the same form, on the same device."""
    if isinstance(given, Rows):
        if not (isinstance(given.indices, Tensor) and isinstance(given.values, Tensor)):
            what = f"{type(given.indices).__name__} and {type(given.values).__name__}"
            raise WrongError(f"rows are weft.Rows of {what}: pass tensors")
        device = given.values.device
        return given, lambda rows: Rows(
            rows.indices.to(device), rows.values.to(device), given.height
        )
    if isinstance(given, Tensor):
        stands = is_made_of_others(given) or is_transformed(given)
        if stands or given.layout != torch.sparse_coo:
            what = lacking(given) if stands else f"a tensor of layout {given.layout}"
            raise WrongError(
                f"rows is {what}: pass a sparse COO tensor (x.to_sparse(1) makes one), "
                "(indices, values) or weft.Rows"
            )
        shape, sparse = given.shape, given.sparse_dim()
        device = given.device

        def restore(rows: Rows) -> Tensor:
            if device.type != "cpu":
                rows = Rows(rows.indices.to(device), rows.values.to(device), rows.height)
            return rows.to_coo(shape[:sparse] + rows.row_shape, canonical=True)

        return Rows.from_coo(given.detach()), restore
    if isinstance(given, tuple | list) and len(given) == 2:
        indices, values = given
        if isinstance(indices, Tensor) and isinstance(values, Tensor):
            device = values.device
            if device.type == "cpu":
                return Rows(indices, values), paired
            return Rows(indices, values), lambda rows: (
                rows.indices.to(device),
                rows.values.to(device),
            )
    raise WrongError(
        f"rows is a {type(given).__name__}: pass a sparse COO tensor, (indices, values) or "
        "weft.Rows"
    )


def paired(rows: Rows) -> Pair:
    return rows.indices, rows.values


def readable(given: Rows) -> Rows:
    """Rows that were given, on the CPU, as kernels can read them."""
    indices, values = given.indices, given.values
    if given.height is not None and not isinstance(given.height, int):
        raise WrongError(f"height is {given.height!r}: pass the number of rows, or None")
    for name, tensor in (("indices", indices), ("values", values)):
        if not has_elements(tensor):
            raise WrongError(f"the tensor of {name} is {lacking(tensor)}: pass one with data")
    if indices.dim() != 1:
        raise WrongError(f"indices have shape {tuple(indices.shape)}: they must be 1-D")
    if indices.dtype not in (torch.int32, torch.int64):
        raise WrongError(f"indices are {indices.dtype}: they must be int32 or int64")
    if values.dim() == 0 or values.shape[0] != indices.numel():
        raise WrongError(
            f"{indices.numel()} indices come with values of shape {tuple(values.shape)}: "
            "the first dimension must be the number of indices"
        )
    if indices.is_quantized or values.is_quantized:  # their scale is not in their memory
        raise WrongError("indices or values are quantized: pass them dequantized")
    if indices.device != values.device:
        raise WrongError(f"indices are on {indices.device}, values on {values.device}")
    if values.requires_grad or values.device.type != "cpu" or not is_plain(values):
        values = values.detach().cpu().resolve_conj().resolve_neg()
    if indices.device.type != "cpu":
        indices = indices.cpu()
    return Rows(indices, values, given.height)


def place(out: object, rows: Rows) -> Out:
    """Where a result is wanted that is made of such rows and others'."""
    if out is None or callable(out):
        return out
    if not (isinstance(out, tuple | list) and len(out) == 2):
        raise WrongError(
            f"out is a {type(out).__name__}: pass (indices, values) or a function that "
            "allocates them"
        )
    wanted = (("indices", rows.indices.dtype), ("values", rows.values.dtype))
    for tensor, (name, dtype) in zip(out, wanted, strict=True):
        if not isinstance(tensor, Tensor):
            what = type(tensor).__name__
            raise WrongError(f"out's {name} are {what}: they must be {dtype}")
        if not has_elements(tensor):  # looked at first: a lazy one raises where it is read
            raise WrongError(f"out's tensor of {name} is {lacking(tensor)}: pass memory")
        if tensor.dtype != dtype:
            raise WrongError(f"out's {name} are {tensor.dtype}: they must be {dtype}")
        if reason := unwritable(tensor):
            raise WrongError(f"out's {name} are {reason}")
    indices, space = out
    if indices.dim() != 1 or space.dim() == 0 or space.shape[0] != indices.numel():
        raise WrongError(
            f"out has indices of shape {tuple(indices.shape)} and values of shape "
            f"{tuple(space.shape)}: both must hold the same number of rows"
        )
    if len(rows) and space.shape[1:] != rows.row_shape:
        raise WrongError(
            f"out's values have row shape {tuple(space.shape[1:])}, the rows have "
            f"{tuple(rows.row_shape)}"
        )
    if overlapping(indices, space):
        raise WrongError("out's indices and values are in the same memory: pass two buffers")
    return indices, space.detach()


def wrong_wire_dtype(dtype: object) -> str | None:
    """What is wrong with a `wire_dtype`, in a sentence, or None."""
    if dtype is None or (isinstance(dtype, torch.dtype) and dtype in WIRE_DTYPES):
        return None
    return f"wire_dtype is {dtype}: pass {' or '.join(map(str, WIRE_DTYPES))}, or None"


def outside(low: int, high: int, height: int | None) -> str | None:
    """What is wrong with indices from `low` to `high`."""
    if low < 0:
        return f"index {low} is negative: indices count from 0"
    if height is not None and high >= height:
        return f"index {high} is outside of a height of {height}"
    return None


def op_name(op: object) -> object:
    """The name of a `torch.distributed.ReduceOp`; anything else as it is."""
    if not isinstance(op, dist.ReduceOp | dist.ReduceOp.RedOpType):
        return op
    names = {"PRODUCT": "prod"}
    name = next(
        (n for n in dist.ReduceOp.RedOpType.__members__ if op == getattr(dist.ReduceOp, n)), "?"
    )
    return names.get(name, name.lower())


def operation(op: object) -> Op:
    op = op_name(op)
    if isinstance(op, str):
        if op not in OPS:
            raise WrongError(
                f"op {op!r} is unknown: use one of {', '.join(OPS)}, a torch ReduceOp, or a "
                "function of two tensors"
            )
        return OPS[op]
    if callable(op):
        name = getattr(op, "__qualname__", None) or type(op).__qualname__
        name = f"{type(op).__name__} {getattr(op, '__module__', '?')}.{name}"
        if len(name.encode()) > _LONGEST:  # it travels with every call
            digest = hashlib.sha256(name.encode()).hexdigest()[:12]
            name = f"{name[: _LONGEST // 4]}... (digest {digest})"
        return Op(name, op, builtin=False)
    raise WrongError(f"op is a {type(op).__name__}: pass a name, a ReduceOp or a function")
