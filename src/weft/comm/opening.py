"""How every call here opens: all ranks state what they were asked, and learn three more things.

Beside the fingerprint and the error of `weft.agree`, a statement says whether this rank's tensors
record gradients, whether it is under `torch.no_grad()`, and how much it may move at once. These are
minima over the ranks, so they combine however many ranks there are. What a call states besides
(shapes, small payloads) is heard from each rank where statements are direct.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from ..agree import BODY, agree, is_direct
from ..errors import WeftError
from ..wire.base import Pending, Wire, as_bytes

__all__ = ["NO_LIMIT", "ROOM", "Mode", "Opening", "opened"]

NO_LIMIT = (1 << 63) - 1
"""The limit of a rank that has none."""

_NOBODY = NO_LIMIT
_SAID = 24  # bytes of the three numbers

ROOM = BODY - _SAID
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
        own: what each rank stated of its own, in rank order; empty where statements are not
            direct. Valid inside of `opened`.
    """

    fields: dict[str, str]
    records: bool
    limit: int
    own: list[Tensor]


@contextmanager
def opened(
    wire: Wire,
    name: str,
    fields: Mapping[str, object],
    error: str | None,
    *,
    mode: Mode | None = None,
    limit: int = NO_LIMIT,
    own: Tensor | None = None,
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
        own: uint8, 1-D, at most `ROOM` bytes; only sent where statements are direct.
        watch: as for `agree`.

    Raises:
        WeftError: a rank stated an error, fingerprints differ, or some ranks record gradients and
            others are under `torch.no_grad()`.
    """
    nobody = _NOBODY
    first = [wire.rank if mode and mode.records else nobody]
    first.append(wire.rank if mode and not mode.enabled else nobody)
    body = as_bytes(torch.tensor([*first, limit]))
    if own is not None and is_direct(wire):
        body = torch.cat([body, own])
    agreement = agree(wire, name, fields, error, body, _combine, watch=watch)
    try:
        said = [body[:_SAID].view(torch.int64) for body in agreement.bodies]
        recorder, without, least = torch.stack(said).amin(0).tolist()
        if recorder != nobody and without != nobody:
            raise WeftError(
                f"rank {recorder} records gradients of {name}, rank {without} is under "
                "torch.no_grad(): call it under the same mode on every rank"
            )
        heard = [body[_SAID:] for body in agreement.bodies] if is_direct(wire) else []
        yield Opening(agreement.fields, recorder != nobody, least, heard)
    finally:
        agreement.release()


def _combine(lower: Tensor, upper: Tensor) -> Tensor:
    return as_bytes(torch.minimum(lower.view(torch.int64), upper.view(torch.int64)))
