"""How every call here opens: all ranks state what they were asked, and learn three more things.

Beside the fingerprint and the error of `weft.agree`, a statement says whether this rank's tensors
record gradients, whether it is under `torch.no_grad()`, how much it may move at once, and the
digest of something that may differ. All that combines by minima, however many ranks there are; a
mask combines by "or". What a call states besides (shapes, small payloads) is heard from each rank,
where statements are direct.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..agree import BODY, Agreement, Private, agree, is_direct
from ..errors import WeftError
from ..wire.base import Pending, Wire

__all__ = ["NO_LIMIT", "ROOM", "Mode", "Opening", "following", "opened"]

NO_LIMIT = (1 << 63) - 1
"""The limit of a rank that has none."""

_NOBODY = NO_LIMIT
_SAID = struct.Struct("<5q")

_NO_MASK = torch.empty(0, dtype=torch.uint8)

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
        fields: the agreed fingerprint.
        records: whether some rank records gradients, so that all take part in backward.
        limit: the smallest of the limits.
        equal: whether all digests are.
        mask: the bits of all ranks together; means something where all masks have one length.
        own: what each rank stated of its own, in rank order; empty where statements are not
            direct. Valid inside of `opened`.
        private: what each rank said to this one alone, its own not included; as `own`.
        bodies, fingerprints: of the statements, in rank order; as `own`.
    """

    fields: dict[str, str]
    records: bool
    limit: int
    equal: bool
    mask: Tensor
    own: list[memoryview]
    private: list[memoryview]
    bodies: list[memoryview] = field(default_factory=list)
    fingerprints: list[bytes] = field(default_factory=list)


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
    mask: Tensor | None = None,
    own: memoryview | None = None,
    private: Sequence[Private] | None = None,
    meanwhile: Callable[[], object] = lambda: None,
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
        mask: uint8, 1-D, at most `ROOM` bytes, combined bit by bit.
        own: instead of a mask, at most `ROOM` bytes; only sent where statements
            are direct.
        private: what to say to each rank, in rank order, with the rest at most `ROOM` bytes; only
            where statements are direct.
        meanwhile, watch: as for `agree`.

    Raises:
        WeftError: a rank stated an error, fingerprints differ, or some ranks record gradients and
            others are under `torch.no_grad()`.
    """
    parts: list[bytes | memoryview] = [
        _SAID.pack(
            wire.rank if mode and mode.records else _NOBODY,
            wire.rank if mode and not mode.enabled else _NOBODY,
            limit,
            digest,
            ~digest,  # the largest becomes the smallest
        )
    ]
    if mask is not None:
        parts.append(mask.numpy().data)
    elif own is not None and is_direct(wire):
        parts.append(own)
    body = bytearray().join(parts)
    agreement = agree(
        wire,
        name,
        fields,
        error,
        body,
        _combine,
        meanwhile=meanwhile,
        watch=watch,
        private=private,
    )
    try:
        yield following(wire, name, agreement, masks=mask is not None)
    finally:
        agreement.release()


def following(wire: Wire, name: str, agreement: Agreement, *, masks: bool = False) -> Opening:
    """What follows from an agreement, in which what is said of its own may be masks.

    Raises:
        WeftError: some ranks record gradients and others are under `torch.no_grad()`.
    """
    heard = agreement.said
    said = [_SAID.unpack_from(each) for each in heard]
    recorder, without, limit, lowest, highest = map(min, zip(*said, strict=True))
    if recorder != _NOBODY and without != _NOBODY:
        raise WeftError(
            f"rank {recorder} records gradients of {name}, rank {without} is under "
            "torch.no_grad(): call it under the same mode on every rank"
        )
    rests = [each[_SAID.size :] for each in heard]
    bits = (torch.frombuffer(each, dtype=torch.uint8) for each in rests if each)
    return Opening(
        agreement.fields,
        recorder != _NOBODY,
        limit,
        lowest == ~highest,
        functools.reduce(_or, bits) if masks and rests[0] else _NO_MASK,
        rests if is_direct(wire) else [],
        agreement.private,
        heard,
        agreement.fingerprints,
    )


def _combine(lower: Tensor, upper: Tensor) -> Tensor:
    left, right = (_SAID.unpack_from(body.numpy().data) for body in (lower, upper))
    numbers = torch.frombuffer(bytearray(_SAID.pack(*map(min, left, right))), dtype=torch.uint8)
    return torch.cat([numbers, _or(lower[_SAID.size :], upper[_SAID.size :])])


def _or(left: Tensor, right: Tensor) -> Tensor:
    """The bits of both; of masks of different lengths, which mean nothing, what both have."""
    common = min(len(left), len(right))
    return left[:common] | right[:common]
