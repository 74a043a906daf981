"""The terms of a call: of four numbers of each rank all know the smallest.

In the body of its statement a rank says whether its tensors record gradients, whether it is under
`torch.no_grad()`, and a digest of something that may differ. A call may add bytes of its own (a
mask, a small payload): if statements are direct, each rank gets those of every rank; else they are
combined by bitwise "or".
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

from ..base.errors import conclusion
from ..group.group import Group
from ..group.pending import Awaited
from .opening import Opening, opened
from .statement import BODY, Private

_NOBODY, _RANKS = (1 << 63) - 1, 1 << 31
# this rank if it records, this rank if it is under no_grad (else `_NOBODY`), the digest, and its
# complement, of which the smallest is that of the largest
_SAID = struct.Struct("<4q")

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
class Terms:
    """What the ranks of a call said together.

    Attributes:
        records: whether some rank records gradients; then all take part in backward.
        equal: whether all digests are equal.
        opening: the rest.
    """

    records: bool
    equal: bool
    opening: Opening

    def own(self, nbytes: int | None = None) -> list[memoryview]:
        """The call's own bytes of each rank, in rank order; if statements are not direct, one item:
        all combined. Valid inside `agreed`.

        Raises:
            WireError: those of a rank are not `nbytes`, if that is given.
        """
        return self.opening.read(_own, nbytes)

    def mask(self, nbytes: int) -> list[int]:
        """The call's own bytes of all ranks, combined by bitwise "or"."""
        said = [np.frombuffer(each, np.uint8) for each in self.own(nbytes)]
        return cast(list[int], np.bitwise_or.reduce(said).tolist())


@contextmanager
def agreed(
    group: Group,
    call: str,
    fields: Mapping[str, object],
    error: str | None,
    *,
    mode: Mode | None = None,
    digest: int = 0,
    own: bytes | memoryview = b"",
    private: Sequence[Private] | None = None,
    watch: Callable[[Awaited], object] | None = None,
) -> Iterator[Terms]:
    """Open a call on these terms; collective.

    Args:
        group: the ranks that take part.
        call: its name.
        fields: values that must be equal on all ranks; None: this rank does not know the value.
        error: what is wrong with this rank's arguments.
        mode: of a differentiable call, else None.
        digest: an int64 to be compared with the others'.
        own: bytes of the call's own, at most `ROOM`.
        private: as for `opened`, with `own` at most `ROOM` bytes.
        watch: as for `opened`.

    Raises:
        WeftError: a rank stated an error, fingerprints differ, or some ranks record gradients and
            others are under `torch.no_grad()`.
    """
    rank = group.rank_in_errors(group.rank)
    numbers = _SAID.pack(
        rank if mode and mode.records else _NOBODY,
        rank if mode and not mode.enabled else _NOBODY,
        digest,
        ~digest,
    )
    body = bytearray().join([numbers, own])
    with opened(
        group, call, fields, error, body, _combine, watch=watch, private=private
    ) as opening:
        said = zip(*opening.read(_numbers), strict=True)
        recorder, without, lowest, highest = map(min, said)
        if recorder != _NOBODY and without != _NOBODY:
            raise conclusion(
                f"rank {recorder} records gradients of {call}, rank {without} is under "
                "torch.no_grad(): call it under the same mode on every rank"
            )
        yield Terms(recorder != _NOBODY, lowest == ~highest, opening)


def _numbers(body: memoryview) -> tuple[int, ...]:
    """The numbers at the start of a body. Raises ValueError if they are invalid."""
    numbers = _SAID.unpack_from(body)
    if min(numbers[:2]) < 0 or any(_RANKS <= each < _NOBODY for each in numbers[:2]):
        raise ValueError(f"it says {numbers}")
    return numbers


def _own(body: memoryview, nbytes: int | None) -> memoryview:
    """The bytes after the numbers. Raises ValueError if they are not `nbytes`."""
    own = body[_SAID.size :]
    if nbytes is not None and len(own) != nbytes:
        raise ValueError(f"{len(own)} bytes for {nbytes}")
    return own


def _combine(lower: memoryview, upper: memoryview) -> bytes:
    numbers = map(min, _numbers(lower), _numbers(upper))
    size = min(len(lower), len(upper))  # bits of different lengths mean nothing
    bits = (np.frombuffer(each[_SAID.size : size], np.uint8) for each in (lower, upper))
    return _SAID.pack(*numbers) + np.bitwise_or(*bits).tobytes()
