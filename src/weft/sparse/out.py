"""The argument `out`, checked: buffers for the result, or a function that allocates them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..base.errors import WeftError
from ..base.tensors import has_elements, is_plain, lacking, overlapping, wrong_row_shape

Pair = tuple[Tensor, Tensor]
"""Indices and values of some rows."""

Allocator = Callable[[int, tuple[int, ...], tuple[torch.dtype, torch.dtype]], Pair]
"""(rows, row shape, (index dtype, value dtype)) -> (indices, values) to write the result to."""

Out = Pair | Allocator | None


def checked(
    given: object,
    dtypes: tuple[torch.dtype, torch.dtype],
    row_shape: tuple[int, ...] | None,
    returned: str = "",
) -> Pair:
    """Check a pair of buffers for the result.

    Args:
        given: the caller's `out`, or what the caller's allocator returned.
        dtypes: of indices and values.
        row_shape: of the result, if it is known.
        returned: " returned" if an allocator returned the pair; for the error.

    Raises:
        WeftError: it is no such pair, or the result cannot be written there.
    """
    if not (isinstance(given, tuple | list) and len(given) == 2):
        raise WeftError(
            f"out{returned or ' is'} a {type(given).__name__}: pass (indices, values) or a "
            "function that allocates them"
        )
    whose = "that out returned" if returned else "of out"
    wrong: str | None
    for tensor, name, dtype in zip(given, ("indices", "values"), dtypes, strict=True):
        wrong = f"a {type(tensor).__name__}: pass tensors"
        if isinstance(tensor, Tensor):
            wrong = unwritable(tensor)  # looked at first: a lazy one has no dtype
            if wrong is None and tensor.dtype != dtype:
                wrong = f"{tensor.dtype}: they must be {dtype}"
        if wrong:
            raise WeftError(f"the {name} {whose} are {wrong}")
    indices, values = given
    if indices.dim() != 1 or values.dim() == 0 or values.shape[0] != indices.numel():
        raise WeftError(
            f"the indices {whose} have shape {tuple(indices.shape)} and the values "
            f"{tuple(values.shape)}: both must hold the same number of rows"
        )
    if wrong := wrong_row_shape(values.shape[1:]):
        raise WeftError(f"the values {whose} {wrong}")
    if row_shape is not None and values.shape[1:] != row_shape:
        raise WeftError(
            f"the values {whose} have row shape {tuple(values.shape[1:])}, the rows have "
            f"{row_shape}"
        )
    if overlapping(indices, values):
        raise WeftError(f"the indices and values {whose} are in the same memory: pass two buffers")
    return indices.detach(), values.detach()


def unwritable(tensor: Tensor) -> str | None:
    """Why a result cannot be written to memory of the caller's, or None if it can."""
    if not has_elements(tensor):
        return f"{lacking(tensor)}: pass memory"
    if not tensor.is_contiguous():
        return "not contiguous: results are written in place"
    if not is_plain(tensor):
        return "a view whose conjugation or sign torch has postponed: pass memory of its own"
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        return "made in inference mode: make them outside, or call inside it"
    return None
