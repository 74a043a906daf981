"""The opening exchange of every call in this room.

Beside the fingerprint and the error of `weft.call.agree`, a rank states whether its tensors record
gradients, whether it is under `torch.no_grad()`, a limit of bytes to move at once, and a digest of
something that may differ. These combine by minima, however many ranks there are. A call may add
bytes of its own (a mask, a small payload): if statements are direct, each rank gets those of every
rank; else they are combined by bitwise "or".
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor

from ..base.errors import WeftError
from ..group.group import Group
from ..group.pending import Awaited
from .agree import BODY, Agreement, Private, agree

NO_LIMIT = (1 << 63) - 1
"""The limit of a rank that has none."""

_NOBODY, _RANKS = NO_LIMIT, 1 << 31
_SAID = struct.Struct("<5q8x")  # so that any dtype may follow

ROOM = BODY - _SAID.size
"""Bytes that a call may state of its own."""


@dataclass(frozen=True, slots=True)
class Mode:
    """The state of autograd where the call was made.

    Attributes:
        records: whether this call would be recorded: a tensor requires a gradient.
        enabled: whether gradients are recorded at all.
    """

    records: bool = False
    enabled: bool = True

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> Mode:
        """The mode here and now, for a call with these tensors."""
        enabled = torch.is_grad_enabled()
        return cls(enabled and any(tensor.requires_grad for tensor in tensors), enabled)


@dataclass(frozen=True, slots=True)
class Opening:
    """The combined statements of all ranks.

    Attributes:
        records: whether some rank records gradients; then all take part in backward.
        limit: the smallest limit.
        equal: whether all digests are equal.
        agreement: the rest; its bodies are valid inside `opened`.
    """

    records: bool
    limit: int
    equal: bool
    agreement: Agreement

    def own(self, nbytes: int) -> list[memoryview]:
        """The call's own bytes of each rank, in rank order; if statements are not direct, one item:
        all combined. Valid inside `opened`."""
        return self.agreement.read(_own, nbytes)

    def mask(self, nbytes: int) -> list[int]:
        """The call's own bytes of all ranks, combined by bitwise "or"."""
        said = [np.frombuffer(each, np.uint8) for each in self.own(nbytes)]
        return cast(list[int], np.bitwise_or.reduce(said).tolist())


@contextmanager
def opened(
    group: Group,
    name: str,
    fields: Mapping[str, object],
    error: str | None,
    *,
    mode: Mode | None = None,
    limit: int = NO_LIMIT,
    digest: int = 0,
    own: bytes | memoryview = b"",
    private: Sequence[Private] | None = None,
    watch: Callable[[Awaited], object] | None = None,
) -> Iterator[Opening]:
    """Agree on a call; collective.

    Args:
        group: the ranks that take part.
        name: of the call.
        fields: values that must be equal on all ranks; None: this rank does not know the value.
        error: what is wrong with this rank's arguments.
        mode: of a differentiable call, else None.
        limit: how much this rank may move at once, in the call's units.
        digest: an int64 to be compared with the others'.
        own: bytes of the call's own, at most `ROOM`.
        private: what to say to each rank, in rank order; with `own` at most `ROOM` bytes. Only if
            statements are direct.
        watch: as for `agree`.

    Raises:
        WeftError: a rank stated an error, fingerprints differ, or some ranks record gradients and
            others are under `torch.no_grad()`.
    """
    rank = group.rank_in_errors(group.rank)
    numbers = _SAID.pack(
        rank if mode and mode.records else _NOBODY,
        rank if mode and not mode.enabled else _NOBODY,
        limit,
        digest,
        ~digest,  # the largest becomes the smallest
    )
    body = bytearray().join([numbers, own])
    agreement = agree(group, name, fields, error, body, _combine, watch=watch, private=private)
    try:
        said = agreement.read(_numbers)
        recorder, without, least, lowest, highest = map(min, zip(*said, strict=True))
        if recorder != _NOBODY and without != _NOBODY:
            raise WeftError(
                f"rank {recorder} records gradients of {name}, rank {without} is under "
                "torch.no_grad(): call it under the same mode on every rank"
            )
        yield Opening(recorder != _NOBODY, least, lowest == ~highest, agreement)
    finally:
        agreement.release()


def _numbers(body: memoryview) -> tuple[int, ...]:
    """The numbers at the start of a body. Raises ValueError if they are invalid."""
    numbers = _SAID.unpack_from(body)
    if min(numbers[:3]) < 0 or any(_RANKS <= each < _NOBODY for each in numbers[:2]):
        raise ValueError(f"it says {numbers}")
    return numbers


def _own(body: memoryview, nbytes: int) -> memoryview:
    """The bytes after the numbers. Raises ValueError if they are not `nbytes`."""
    if len(body) != _SAID.size + nbytes:
        raise ValueError(f"{len(body)} bytes for {_SAID.size + nbytes}")
    return body[_SAID.size :]


def _combine(lower: Tensor, upper: Tensor) -> Tensor:
    size = min(len(lower), len(upper))  # bits of different lengths mean nothing
    for each in (lower, upper):
        _numbers(each.numpy().data)
    numbers = (each[: _SAID.size].view(torch.int64) for each in (lower, upper))
    bits = (each[_SAID.size : size] for each in (lower, upper))
    return torch.cat([torch.minimum(*numbers).view(torch.uint8), torch.bitwise_or(*bits)])
