"""The terms of a call: what every rank says of autograd, a digest, and bytes of the call's own.

In the body of its statement a rank says whether its tensors record gradients, whether it is under
`torch.no_grad()`, and a digest of something that may differ. A call may add bytes of its own, such
as a mask or a small payload, of which each rank gets those of every rank.
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

# whether this rank records, whether it is under no_grad, and the digest
_TERMS = struct.Struct("<??6xq")


ROOM = BODY - _TERMS.size
"""Bytes of its own that a call may add."""


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

    def own(self, nbytes: int) -> list[memoryview]:
        """The call's own bytes of each rank, in rank order. Valid inside `agreed`.

        Raises:
            WireError: those of a rank are not `nbytes`.
        """
        return self.opening.read(_own, nbytes)

    def mask(self, nbytes: int) -> list[int]:
        """The call's own bytes of all ranks, combined by bitwise "or"."""
        masks = [np.frombuffer(each, np.uint8) for each in self.own(nbytes)]
        return cast(list[int], np.bitwise_or.reduce(masks).tolist())


@contextmanager
def agreed(
    group: Group,
    call: str,
    fields: Mapping[str, object],
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
        mode: of a differentiable call, else None.
        digest: an int64 to be compared with the others'.
        own: bytes of the call's own, at most `ROOM`.
        private: as for `opened`, with `own` at most `ROOM` bytes.
        watch: as for `opened`.

    Raises:
        WeftError: a rank tells an error, fingerprints differ, or some ranks record gradients and
            others are under `torch.no_grad()`.
    """
    terms = _TERMS.pack(
        mode is not None and mode.records,
        mode is not None and not mode.enabled,
        digest,
    )
    body = bytearray().join([terms, own])
    with opened(group, call, fields, None, body, watch=watch, private=private) as opening:
        recording, without, digests = zip(*opening.read(_TERMS.unpack_from), strict=True)
        records = any(recording)
        if records and any(without):
            recorder, other = (
                group.rank_in_errors(each.index(True)) for each in (recording, without)
            )
            raise conclusion(
                f"rank {recorder} records gradients of {call}, rank {other} is under "
                "torch.no_grad(): call it under the same mode on every rank"
            )
        yield Terms(records, len({*digests}) == 1, opening)


def _own(body: memoryview, nbytes: int) -> memoryview:
    """The bytes after the terms. Raises ValueError if they are not `nbytes`."""
    own = body[_TERMS.size :]
    if len(own) != nbytes:
        raise ValueError(f"{len(own)} bytes for {nbytes}")
    return own
