"""Several calls that are one to the caller, in runs: what is small travels together.

`torch.distributed._coalescing_manager` makes such calls, and so do torch's lists of outputs and of
inputs. What is wrong with one of them is an error before anything is written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..base.memory import memory_of
from ..base.tensors import as_bytes
from ..comm.buckets import ALONE
from ..group.group import Group
from .exchanges import Parts, fill, open_and_exchange
from .sizes import fields_of
from .tensors import flat_of, place_for, put

CALLS = "number of outputs"
"""The field of how many calls there are: one for each of torch's outputs."""


def open_and_exchange_each(
    group: Group,
    call: str,
    fields: Mapping[str, object],
    gives: Sequence[Parts],
    takes: Sequence[Parts],
    compared: Sequence[Sequence[Tensor]],
    *,
    alike: bool = False,
) -> None:
    """Open a call, and do what several calls give and take, in runs of which each is opened.

    Args:
        group, call: as of `open_and_exchange`.
        fields, gives, takes, compared: as of `runs`.
        alike: whether a call's `gives` is one tensor, for all ranks.
    """
    for stated, sends, receives in runs(fields, gives, takes, compared):
        if alike:
            sends = sends * group.size
        open_and_exchange(group, call, stated, sends, receives, alike=alike)


def runs(
    fields: Mapping[str, object],
    gives: Sequence[Parts],
    takes: Sequence[Parts],
    compared: Sequence[Sequence[Tensor]],
) -> Iterator[tuple[Mapping[str, object], list[Any], list[Any]]]:
    """What is stated in the opening of each run, and what is sent and received in it.

    The first opening compares all calls. For each rank there is one tensor to send, and one to
    receive. When the next run is asked for, or the end, what was received is copied to where its
    calls want it.

    Args:
        fields: what all openings compare.
        gives, takes: of each call.
        compared: of each call, the tensors whose sizes all ranks compare.
    """
    stated = {CALLS: len(gives), **fields, **fields_of(*compared)}
    for run in _divided(compared):
        sends = [_joined(each) for each in zip(*gives[run], strict=True)]
        receives = [_room(each) for each in zip(*takes[run], strict=True)]
        yield stated, sends, receives
        _spread(receives, takes[run])
        stated = {**fields}


def _divided(compared: Sequence[Sequence[Tensor]]) -> Iterator[slice]:
    """The calls of each run: neighbours that are small and of one dtype."""
    first = room = 0
    dtype = None
    for number, tensors in enumerate(compared):
        nbytes = sum(tensor.nbytes for tensor in tensors)
        if number and (nbytes > room or tensors[0].dtype != dtype):
            yield slice(first, number)
            first = number
        if number == first:
            room, dtype = ALONE, tensors[0].dtype
        room -= nbytes
    yield slice(first, len(compared))


def _joined(parts: Sequence[Any]) -> Any:
    """Tensors in their order in one, 1-D, or the one that there is; None if there are none."""
    if len(parts) == 1 or parts[0] is None:
        return parts[0]
    flats = [as_bytes(flat_of(part)) for part in parts]
    return torch.cat(flats).view(parts[0].dtype)


def _room(parts: Sequence[Any]) -> Any:
    """Where to receive such tensors in one; None if there are none."""
    if len(parts) == 1 or parts[0] is None:
        return parts[0]
    nbytes = sum(part.nbytes for part in parts)
    return torch.empty(nbytes, dtype=torch.uint8).view(parts[0].dtype)


def _spread(wholes: Parts, wanted: Sequence[Parts]) -> None:
    """Put what was received in one for several calls where they want it, in their order."""
    if len(wanted) == 1:
        return
    left = [memory_of(whole) for whole in wholes if whole is not None]
    for takes in wanted:
        for number, wants in enumerate(each for each in takes if each is not None):
            place = place_for(wants)
            fill(place, left[number][: wants.nbytes])
            put(place, wants)
            left[number] = left[number][wants.nbytes :]
