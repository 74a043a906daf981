"""The handshake of every call of a layer: every rank that takes part learns what all pass.

Each rank states the shape and dtype of its tensor, and the state of autograd (see `opened`).
Tensors of up to `EAGER` bytes that the wire carries are sent with the statement; of more than 16
ranks up to a smaller size. If all tensors are so small, nothing more is sent.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..base._torch import waited
from ..base.memory import memory_of
from ..base.tensors import Shape, dtype_in, plain
from ..group.group import Group
from .fingerprint import UNKNOWN
from .mode import PLAIN, Mode
from .opening import opened
from .statement import room

EAGER = 4 << 10
"""Bytes of a tensor that may be sent in the handshake, at most."""

_HEAD = struct.Struct("<Bi")  # dimensions, bytes of the payload or -1


@dataclass(frozen=True, slots=True)
class Operand:
    """What one rank passes to a call.

    Attributes:
        shape: of its tensor; in backward, of the tensor that it passed to forward.
        payload: the bytes of its tensor, if they were sent along; writable.
    """

    shape: Shape
    payload: memoryview | None = None

    def pack(self) -> bytearray:
        ndim, count = len(self.shape), -1 if self.payload is None else len(self.payload)
        head = _HEAD.pack(ndim, count)
        return bytearray().join((head, struct.pack(f"<{ndim}q", *self.shape), self.payload or b""))

    def tensor(self, shape: Shape, dtype: torch.dtype) -> Tensor:
        """The tensor that was sent along. Raises ValueError if it has another size."""
        raw = self.payload or memoryview(b"")
        if len(raw) != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{len(raw)} bytes for {dtype} of shape {shape}")
        flat = torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)
        return flat.view(shape)

    @classmethod
    def unpack(cls, raw: memoryview) -> Operand:
        """Read an operand. Raises ValueError or struct.error if the bytes are none."""
        ndim, count = _HEAD.unpack_from(raw)
        shape = struct.unpack_from(f"<{ndim}q", raw, _HEAD.size)
        rest = raw[_HEAD.size + 8 * ndim :]
        if min(shape, default=0) < 0 or len(rest) != max(count, 0):
            raise ValueError(f"shape {shape}, {count} of {len(rest)} bytes")
        payload = None
        if count >= 0:
            payload = memoryview(bytearray(rest))  # where tensors may begin
        return cls(shape, payload)


@dataclass(frozen=True, slots=True)
class Heard:
    """What a call's ranks told each other.

    Attributes:
        dtype: that of their tensors, if anybody knows it.
        operands: what each of them brings.
        number: of the call, the same on all of them.
        records: whether some of them record gradients; then all take part in backward.
    """

    dtype: torch.dtype | None
    operands: dict[int, Operand]
    number: int
    records: bool


def handshake(
    group: Group,
    ranks: tuple[int, ...],
    call: str,
    fields: Mapping[str, object],
    operand: Operand,
    mode: Mode = PLAIN,
) -> Heard:
    """State what this rank brings and hear the others, in a call whose turn it is.

    Collective among `ranks`.

    Args:
        group: of the whole group.
        ranks: who takes part, ascending.
        call: name of the call.
        fields: what must be the same on all of them; None where this rank does not know. Among
            them the dtype.
        operand: what this rank brings.
        mode: of autograd.

    Raises:
        WeftError: as `opened`.
        WireError: a peer or a link failed.
    """
    opening = opened(among(group, ranks), call, fields, operand.pack(), mode=mode)
    operands = dict(zip(ranks, opening.read(Operand.unpack), strict=True))
    unknown = opening.fields["dtype"] == UNKNOWN
    dtype = None if unknown else opening.field("dtype", dtype_in)
    return Heard(dtype, operands, opening.number, opening.records)


def among(group: Group, ranks: tuple[int, ...]) -> Group:
    """The group of some ranks: itself if these are all."""
    return group if ranks == tuple(range(group.size)) else group.subset(ranks)


def payload_of(x: Tensor, ranks: tuple[int, ...]) -> memoryview | None:
    """The bytes of a tensor of the wire's that is sent in the handshake; None if it is not."""
    most = min(EAGER, room(len(ranks)))
    if x.numel() * x.element_size() > most:
        return None
    return memory_of(plain(waited(x).detach()))
