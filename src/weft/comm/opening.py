"""How every call here opens: all ranks state what they were asked, and learn three more things.

Beside the fingerprint and the error of `weft.agree`, a statement says whether this rank's tensors
record gradients, whether it is under `torch.no_grad()`, how much it may move at once, and the
digest of something that may differ. All that combines by minima, however many ranks there are; what
a call states besides (a mask, a small payload) is heard from each rank where statements are direct,
and else combined bit by bit, by "or".
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

from ..agree import BODY, Agreement, Private, agree
from ..errors import WeftError
from ..wire.base import Pending, Wire

NO_LIMIT = (1 << 63) - 1
"""The limit of a rank that has none."""

_NOBODY, _RANKS = NO_LIMIT, 1 << 31
_SAID = struct.Struct("<5q8x")  # so that any dtype may follow

ROOM = BODY - _SAID.size
"""Bytes that a call may state of its own."""


@dataclass(frozen=True, slots=True)
class Mode:
    """How autograd stood where the call was made.

    Attributes:
        records: a tensor of the call requires a gradient, and one would be recorded.
        enabled: gradients are recorded at all.
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
    """What all ranks said.

    Attributes:
        number: of the call, among those of the group.
        records: whether some rank records gradients, so that all take part in backward.
        limit: the smallest of the limits.
        equal: whether all digests are.
        private: what each rank said to this one alone, in rank order, its own not included; valid
            inside of `opened`.
    """

    number: int
    records: bool
    limit: int
    equal: bool
    private: list[memoryview]
    _agreement: Agreement

    def own(self, nbytes: int) -> list[memoryview]:
        """What each rank stated of its own, in so many bytes, in rank order; where statements are
        not direct, one for all, combined. Valid inside of `opened`."""
        return self._agreement.read(_own, nbytes)

    def mask(self, nbytes: int) -> list[int]:
        """The bits of what all stated of their own, in so many bytes."""
        said = [np.frombuffer(each, np.uint8) for each in self.own(nbytes)]
        return cast(list[int], np.bitwise_or.reduce(said).tolist())


@contextmanager
def opened(
    wire: Wire,
    name: str,
    fields: Mapping[str, object],
    error: str | None,
    *,
    mode: Mode | None = None,
    limit: int = NO_LIMIT,
    digest: int = 0,
    own: bytes | memoryview = b"",
    private: Sequence[Private] | None = None,
    watch: Callable[[Pending], object] = lambda pending: None,
) -> Iterator[Opening]:
    """Agree on a call; collective.

    Args:
        wire: among whom.
        name: of the call.
        fields: what must be equal on all ranks; None where this rank does not know.
        error: what this rank's caller did wrong.
        mode: of a call that is differentiable, else None.
        limit: what this rank may move at once, in units of the call's.
        digest: an int64 to be compared with the others'.
        own: at most `ROOM` bytes.
        private: what to say to each rank, in rank order, with the rest at most `ROOM` bytes; only
            where statements are direct.
        watch: as for `agree`.

    Raises:
        WeftError: a rank stated an error, fingerprints differ, or some ranks record gradients and
            others are under `torch.no_grad()`.
    """
    numbers = _SAID.pack(
        wire.rank if mode and mode.records else _NOBODY,
        wire.rank if mode and not mode.enabled else _NOBODY,
        limit,
        digest,
        ~digest,  # the largest becomes the smallest
    )
    body = bytearray().join([numbers, own])
    agreement = agree(wire, name, fields, error, body, _combine, watch=watch, private=private)
    try:
        said = agreement.read(_numbers)
        recorder, without, least, lowest, highest = map(min, zip(*said, strict=True))
        if recorder != _NOBODY and without != _NOBODY:
            raise WeftError(
                f"rank {recorder} records gradients of {name}, rank {without} is under "
                "torch.no_grad(): call it under the same mode on every rank"
            )
        yield Opening(
            agreement.number,
            recorder != _NOBODY,
            least,
            lowest == ~highest,
            agreement.private,
            agreement,
        )
    finally:
        agreement.release()


def _numbers(body: memoryview) -> tuple[int, ...]:
    """The numbers that a body begins with. Raises ValueError where it does not."""
    numbers = _SAID.unpack_from(body)
    if min(numbers[:3]) < 0 or any(_RANKS <= each < _NOBODY for each in numbers[:2]):
        raise ValueError(f"it says {numbers}")
    return numbers


def _own(body: memoryview, nbytes: int) -> memoryview:
    """What stands behind the numbers. Raises ValueError where that is not so many bytes."""
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
