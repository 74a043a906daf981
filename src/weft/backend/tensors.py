"""A program's tensors as collectives read and write them: elements in their order, in flat memory.

What is not plain, such as a transposed tensor, is read from a copy, and written after the call.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..base import _torch
from ..base.tensors import as_bytes, flattened, is_plain, mark_overwritten, plain, write


def tensors_in(argument: object) -> Iterator[Tensor]:
    """A tensor, or those of a list or tuple, also within others; nothing of anything else."""
    if isinstance(argument, Tensor):
        yield argument
    elif isinstance(argument, list | tuple):
        for each in argument:
            yield from tensors_in(each)


def elements(tensor: Tensor) -> Tensor:
    """A tensor's elements, in the same memory, which may be written without autograd's knowledge.

    `detach()` would share the version of the tensor, which then could not be written where a
    backward is to read it. torch's own backends let a program do that; see `overwritten`.
    """
    return _torch.waited(tensor).data


def flat_of(tensor: Tensor) -> Tensor:
    """The elements in their order, 1-D: the tensor's own memory if it is plain."""
    return flattened(plain(elements(tensor)))


def place_for(tensor: Tensor) -> Tensor:
    """Where to receive a tensor: its own memory if it is plain; `put` does the rest."""
    own = elements(tensor)
    return flattened(own) if is_plain(own) else torch.empty(own.numel(), dtype=own.dtype)


def put(flat: Tensor, tensor: Tensor) -> None:
    """Copy what lies in a `place_for` a tensor to it, unless that is its own memory."""
    own = elements(tensor)
    if flat.data_ptr() != own.data_ptr():
        write(own, flat.view(own.shape))


def copied(tensor: Tensor) -> Tensor:
    """The elements in their order, 1-D, in memory of their own, also where torch copies none."""
    return as_bytes(flat_of(tensor)).clone().view(tensor.dtype)


def overwritten(outs: list[Tensor]) -> list[Tensor]:
    """The outputs of a call, of which autograd learns that they were overwritten.

    A backward that was to read what they held before then raises, as with gloo. gloo does so of
    outputs, but for those of scatter and all_to_all_single, and not of what is reduced or sent in
    place.
    """
    mark_overwritten(outs)
    return outs
