"""Aliases and copies of what a call is given, which keep what the caller's tensors have.

A tensor may get other memory before an asynchronous call runs (`tensor.data = other`), and one of
several calls that are one to the caller may write what another is to read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from ..base import _torch
from ..base.tensors import extent
from .tensors import copied, tensors_in

Aliases = dict[int, tuple[Tensor, Tensor]]
"""An alias of each of a caller's tensors, and the tensor, by the id of that."""


def aliased(argument: Any, made: Aliases) -> Any:
    """A tensor's alias, one for each tensor; the same of a list; anything else as it is."""
    if isinstance(argument, list):
        return [aliased(each, made) for each in argument]
    if not isinstance(argument, Tensor):
        return argument
    if id(argument) not in made:
        made[id(argument)] = _torch.waited(argument).detach(), argument
    return made[id(argument)][0]


def copied_if_mixed(outs: Sequence[Any], ins: Sequence[Any]) -> Sequence[Any]:
    """What several calls read: in copies if one of them writes what another reads or writes.

    To the caller they are one call: each has to read what was there before all of them.

    Args:
        outs: of each call a tensor, or some, among which there may be None.
        ins: of each call a tensor, or a list of them.
    """
    return [*map(_copies, ins)] if _are_mixed(outs, ins) else ins


_Span = tuple[int, int, int, bool]
"""The addresses of a tensor's first byte and behind its last, its call, and whether it is read."""


def _are_mixed(outs: Sequence[Any], ins: Sequence[Any]) -> bool:
    """Whether, of several calls, one writes what another reads or writes."""
    if len(outs) < 2:
        return False
    begun: list[_Span] = []  # those that may go on where the next begins
    for span in sorted([*_spans(outs, is_read=False), *_spans(ins, is_read=True)]):
        start, _, number, is_read = span
        begun = [each for each in begun if each[1] > start]
        if any(each[2] != number and not (each[3] and is_read) for each in begun):
            return True
        begun.append(span)
    return False


def _spans(arguments: Sequence[object], *, is_read: bool) -> Iterator[_Span]:
    for number, argument in enumerate(arguments):
        for tensor in tensors_in(argument):
            if tensor.numel():
                yield *extent(_torch.waited(tensor)), number, is_read


def _copies(argument: Any) -> Any:
    """A tensor in a copy, or a list of them: one of each, also where it stands more than once."""
    if isinstance(argument, Tensor):
        return copied(argument)
    found = {id(each): each for each in argument}
    copies = {key: copied(each) for key, each in found.items()}
    return [copies[id(each)] for each in argument]
