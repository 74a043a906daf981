"""Buffers: a caller's tensor or array as a 1-D tensor that shares its memory."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from weft import WeftError
from weft.base.tensors import has_elements, lacking, overlapping, unwritable


def seen(buffer: Any, count: int | None, dtype: torch.dtype, name: str) -> Tensor:
    """The first `count` elements of a buffer, or all of them, as a 1-D tensor that shares them.

    Args:
        buffer: None if `count` is 0.
        count: how many elements the call uses; None: all that the buffer has.
        dtype: of the elements.
        name: the parameter's, for errors.

    Raises:
        WeftError: it is no such buffer, or too short, or of another dtype.
    """
    if buffer is None and count == 0:
        return torch.empty(0, dtype=dtype, device="cpu")
    if isinstance(buffer, np.ma.MaskedArray):
        raise WeftError(f"{name} is a masked array, and a mask says nothing here: pass its data")
    if isinstance(buffer, np.ndarray):
        try:
            # torch has no tensors that are read-only
            buffer = torch.from_numpy(buffer if buffer.flags.writeable else buffer.copy())
        except (TypeError, ValueError) as error:  # its dtype, or strides
            raise WeftError(f"{name} cannot be a tensor: {error}") from error
    if not isinstance(buffer, Tensor):
        raise WeftError(
            f"{name} is a {type(buffer).__name__}: pass a tensor or a NumPy array, such as "
            "torch.frombuffer makes of other memory"
        )
    if not has_elements(buffer):
        raise WeftError(f"{name} is {lacking(buffer)}: pass a strided tensor with data")
    if not buffer.is_contiguous():
        raise WeftError(f"{name} is not contiguous: pass x.contiguous()")
    if buffer.dtype != dtype:
        raise WeftError(f"{name} holds {buffer.dtype}, the call says {dtype}: make them equal")
    if count is not None and buffer.numel() < count:
        raise WeftError(f"{name} holds {buffer.numel()} elements, the call says {count}")
    return buffer.detach().view(-1)[:count]


def written(buffer: Any, count: int | None, dtype: torch.dtype, name: str) -> Tensor:
    """The same of a buffer for results.

    Raises:
        WeftError: also if nothing can be written there.
    """
    if isinstance(buffer, np.ndarray) and not buffer.flags.writeable:
        raise WeftError(f"{name} is read-only, and the result goes there")
    place = seen(buffer, count, dtype, name)
    if reason := unwritable(place):
        raise WeftError(f"{name} is {reason}")
    return place


def check_apart(names: str, *places: Tensor | None) -> None:
    """Raise WeftError if buffers for results have memory in common."""
    if overlapping(*(place for place in places if place is not None)):
        raise WeftError(f"{names} are in the same memory: pass buffers of their own")


def counted(count: object, name: str) -> int:
    """A number of elements, which the parameter `name` gives.

    Raises:
        WeftError: it is no integer, or negative.
    """
    try:
        number = operator.index(count)  # type: ignore[arg-type]  # whatever is none raises
    except TypeError:
        number = -1
    if number < 0:
        raise WeftError(f"{name} is {count!r}: pass the number of elements, from 0 up")
    return number


def dtype_of(given: object, name: str) -> torch.dtype:
    """The dtype that the parameter `name` gives, torch's or its name.

    Raises:
        WeftError: it is none.

    Example:
        >>> dtype_of("float32", "value_dtype")
        torch.float32
    """
    dtype = getattr(torch, given, None) if isinstance(given, str) else given
    if not isinstance(dtype, torch.dtype):
        raise WeftError(f"{name} is {given!r}: pass a torch dtype, or its name as in 'int64'")
    return dtype


def index_dtype_of(given: object, name: str) -> torch.dtype:
    """The dtype of indices that the parameter `name` gives.

    Raises:
        WeftError: it is no integer type, or uint64, which may not fit weft's int64.
    """
    dtype = dtype_of(given, name)
    if dtype.is_floating_point or dtype.is_complex or dtype in (torch.bool, torch.uint64):
        raise WeftError(f"{name} is {dtype}: pass indices of an integer type, such as int64")
    return dtype
