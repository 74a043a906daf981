"""The handshake of every call of a layer: every rank that takes part learns what all pass.

Each rank states the shape and dtype of its tensor, whether it needs a gradient, and what is wrong
with its arguments (see `opened`). Tensors on the host of up to `EAGER` bytes are sent with the
statement, if at most 16 ranks take part; if all tensors are so small, nothing more is sent.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..base._torch import waited
from ..base.devices import on_host
from ..base.errors import conclusion
from ..base.memory import memory_of
from ..base.tensors import Shape, dtype_in, plain
from ..group.group import Group
from .combining import DIRECT
from .fingerprint import UNKNOWN
from .opening import opened
from .statement import BODY

EAGER = 4 << 10
"""Bytes of a tensor that may be sent in the handshake, at most."""

_HEAD = struct.Struct("<IBBi")  # rank, flags, dimensions, bytes of the payload or -1
_NEEDS, _RECORDS = 1, 2


@dataclass(frozen=True, slots=True)
class Operand:
    """What one rank passes to a call.

    Attributes:
        shape: of its tensor; in backward, of the tensor that it passed to forward.
        needs: whether its tensor needs a gradient.
        records: whether it records gradients (`torch.is_grad_enabled`).
        payload: the bytes of its tensor, if they were sent along; writable.
    """

    shape: Shape
    needs: bool
    records: bool
    payload: memoryview | None = None

    def pack(self, rank: int) -> bytearray:
        flags = _NEEDS * self.needs | _RECORDS * self.records
        ndim, count = len(self.shape), -1 if self.payload is None else len(self.payload)
        head = _HEAD.pack(rank, flags, ndim, count)
        return bytearray().join((head, struct.pack(f"<{ndim}q", *self.shape), self.payload or b""))

    def tensor(self, shape: Shape, dtype: torch.dtype) -> Tensor:
        """The tensor that was sent along. Raises ValueError if it has another size."""
        raw = self.payload or memoryview(b"")
        if len(raw) != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{len(raw)} bytes for {dtype} of shape {shape}")
        flat = torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)
        return flat.view(shape)

    @classmethod
    def unpack(cls, raw: memoryview, ranks: Collection[int] = ()) -> dict[int, Operand]:
        """Read operands that follow one another; return them by rank.

        Args:
            raw: the bytes.
            ranks: whose they must be, if any are given.

        Raises:
            ValueError, struct.error: the bytes are invalid.
        """
        found, at = dict[int, Operand](), 0
        while at < len(raw):
            rank, flags, ndim, count = _HEAD.unpack_from(raw, at)
            shape = struct.unpack_from(f"<{ndim}q", raw, at + _HEAD.size)
            at += _HEAD.size + 8 * ndim
            payload = None
            if min(shape, default=0) < 0 or not -1 <= count <= len(raw) - at or rank in found:
                raise ValueError(f"rank {rank}, shape {shape}, {count} of {len(raw)} bytes")
            if count >= 0:
                payload = memoryview(bytearray(raw[at : at + count]))  # `raw` is given back
                at += count
            found[rank] = cls(shape, bool(flags & _NEEDS), bool(flags & _RECORDS), payload)
        if ranks and found.keys() != set(ranks):
            raise ValueError(f"they are of ranks {list(found)}, and not of {list(ranks)}")
        return found


@dataclass(frozen=True, slots=True)
class Heard:
    """What a call's ranks told each other.

    Attributes:
        dtype: that of their tensors, if anybody knows it.
        operands: what each of them brings.
        number: of the call, the same on all of them.
    """

    dtype: torch.dtype | None
    operands: dict[int, Operand]
    number: int


def handshake(
    group: Group,
    ranks: tuple[int, ...],
    call: str,
    fields: Mapping[str, object],
    error: str | None,
    operand: Operand,
) -> Heard:
    """State what this rank brings and hear the others, in a call whose turn it is.

    Collective among `ranks`.

    Args:
        group: of the whole group.
        ranks: who takes part, ascending.
        call: name of the call.
        fields: what must be the same on all of them; None where this rank does not know. Among
            them the dtype.
        error: what is wrong with this rank's arguments.
        operand: what this rank brings.

    Raises:
        WeftError: somebody's arguments are wrong, or do not go with the others'; or a rank needs a
            gradient, and another does not record any.
        WireError: a peer or a link failed.
    """
    packed = operand.pack(group.rank)
    if len(ranks) > DIRECT and len(packed) * len(ranks) > BODY:  # they follow one another
        error = error or (
            f"{call}: the shapes of {len(operand.shape)} dimensions that {len(ranks)} ranks tell "
            f"each other take more than {BODY} bytes: use fewer ranks, or fewer dimensions"
        )
        packed = bytearray()
    with opened(among(group, ranks), call, fields, error, packed, _one_behind_the_other) as opening:
        said: dict[int, Operand] = {}
        everyone = ranks if len(ranks) > DIRECT else ()  # else each body is of one rank
        for body in opening.read(Operand.unpack, everyone):
            said |= body
        unknown = opening.fields["dtype"] == UNKNOWN
        dtype = None if unknown else opening.field("dtype", dtype_in)
    asks = [group.rank_in_errors(rank) for rank, each in said.items() if each.needs]
    deaf = [group.rank_in_errors(rank) for rank, each in said.items() if not each.records]
    if asks and deaf:
        raise conclusion(
            f"{call}: rank {asks[0]} needs a gradient, and rank {deaf[0]} does not record any: "
            "call it under torch.no_grad() on all ranks that take part, or on none"
        )
    return Heard(dtype, said, opening.number)


def among(group: Group, ranks: tuple[int, ...]) -> Group:
    """The group of some ranks: itself if these are all."""
    return group if ranks == tuple(range(group.size)) else group.subset(ranks)


def payload_of(x: Tensor, ranks: tuple[int, ...]) -> memoryview | None:
    """The bytes of a tensor that is sent in the handshake; None if it is not."""
    if len(ranks) > DIRECT or x.numel() * x.element_size() > EAGER or not on_host(x):
        return None
    return memory_of(plain(waited(x).detach()))


def _one_behind_the_other(lower: memoryview, upper: memoryview) -> bytes:
    return b"".join((lower, upper))
