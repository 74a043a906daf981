"""What all faces do with their arguments: groups, integers, memory to write to, and what is wrong.

A face checks what weft's own calls cannot know of. What is wrong there on one rank is raised on
all, as by weft's calls.
"""

from __future__ import annotations

import operator
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

import weft
from weft.wire.base import has_elements, lacking

Integers = NDArray[np.int64]


def wire_of(group: Any = None) -> weft.Wire:
    """The wire of what `group=` of weft's calls takes; None: of the default group."""
    return weft.Partition(1, group=group).wire


def default() -> weft.Wire | None:
    """The wire of the default group, if there is one."""
    try:
        return wire_of()
    except weft.WeftError:
        return None


def tell(error: Exception, group: Any = None) -> NoReturn:
    """Raise on all ranks what is wrong on this one, while the others make the call."""

    def fail() -> NoReturn:
        raise error

    weft.attempt(fail, group)
    raise error


def integer(given: object) -> int | None:
    """An integer of any kind, such as NumPy's or a bool, as Python's; None of anything else."""
    try:
        return int(operator.index(given))  # type: ignore[arg-type]  # whatever is none raises
    except TypeError:
        return None


def integers(given: ArrayLike) -> Integers:
    """One integer or several, as NumPy takes them, as an array of at least one dimension."""
    return np.atleast_1d(np.asarray(given, dtype=np.int64))


def unfit(tensor: Tensor, *, write: bool = True) -> str | None:
    """Why a tensor of the caller's cannot be filled, or at least read, or None."""
    if not has_elements(tensor):
        return f"{lacking(tensor)}: pass a strided tensor with data"
    if not write:
        return None
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    if any(extent > 1 and step == 0 for extent, step in steps):
        return "expanded, its elements share memory: pass one that can be written"
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        return "of inference mode: pass one that can be written, or a clone of it"
    return None
