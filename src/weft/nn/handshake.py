"""The handshake of every call of a layer: all that take part learn what all bring.

Shapes, dtypes, whether gradients are needed, and what is wrong with anybody's arguments travel in
one small message between all ranks of a group (`weft.agree`), on every call, also where `shape=`
was told: a promise that one rank broke would otherwise be a hang. Tensors of up to `EAGER` bytes
travel in the same message, and then nothing is left to be sent.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..agree import DIRECT, agree
from ..errors import WeftError
from ..grid import Shape
from ..wire.base import Wire, as_bytes, plain
from ..wire.part import Part

EAGER = 4 << 10
"""Bytes of a tensor that may travel in the handshake."""

_HEAD = struct.Struct("<IBBi")  # rank, flags, dimensions, bytes of the payload or -1
_NEEDS, _RECORDS = 1, 2


@dataclass(frozen=True, slots=True)
class Statement:
    """What one rank brings.

    Attributes:
        shape: of its tensor, or of the tensor whose movement is undone.
        needs: whether a gradient of the result is asked of it.
        records: whether it records what a gradient needs.
        payload: the bytes of its tensor, if they are few and travelled along; writable.
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
        """The tensor that travelled along."""
        if not self.payload:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self.payload, dtype=dtype).view(shape)

    @classmethod
    def unpack(cls, raw: memoryview) -> Iterator[tuple[int, Statement]]:
        """The statements that lie behind each other, each with its rank."""
        at = 0
        while at < len(raw):
            rank, flags, ndim, count = _HEAD.unpack_from(raw, at)
            shape = struct.unpack_from(f"<{ndim}q", raw, at + _HEAD.size)
            at += _HEAD.size + 8 * ndim
            payload = None
            if count >= 0:
                payload = memoryview(bytearray(raw[at : at + count]))  # `raw` is given back
                at += count
            yield rank, cls(shape, bool(flags & _NEEDS), bool(flags & _RECORDS), payload)


def handshake(
    wire: Wire,
    ranks: tuple[int, ...],
    call: str,
    fields: Mapping[str, object],
    error: str | None,
    statement: Statement,
) -> tuple[dict[str, str], dict[int, Statement]]:
    """State what this rank brings and hear the others; collective among `ranks`.

    Args:
        wire: of the whole group.
        ranks: who takes part, ascending.
        call: name of the call.
        fields: what must be the same on all of them; None where this rank does not know.
        error: what is wrong with this rank's arguments.
        statement: what this rank brings.

    Returns:
        The fields that they agreed on, and what each of them brings.

    Raises:
        WeftError: somebody's arguments are wrong, or do not go with the others'; or a rank needs a
            gradient, and another does not record any.
        WireError: a peer or a link failed.
    """

    def hear() -> tuple[dict[str, str], dict[int, Statement]]:
        packed = statement.pack(wire.rank)
        agreement = agree(among(wire, ranks), call, fields, error, packed, _one_behind_the_other)
        try:
            bodies = map(Statement.unpack, agreement.said)
            return agreement.fields, {rank: each for body in bodies for rank, each in body}
        finally:
            agreement.release()

    agreed, said = wire.worker.call(call, hear)
    asks = next((rank for rank, each in said.items() if each.needs), None)
    deaf = next((rank for rank, each in said.items() if not each.records), None)
    if asks is not None and deaf is not None:
        raise WeftError(
            f"{call}: rank {asks} needs a gradient, and rank {deaf} does not record any: call it "
            "under torch.no_grad() on all ranks that take part, or on none"
        )
    return agreed, said


def among(wire: Wire, ranks: tuple[int, ...]) -> Wire:
    """The wire of some ranks: itself if these are all."""
    return wire if ranks == tuple(range(wire.size)) else Part(wire, ranks)


def payload_of(x: Tensor, ranks: tuple[int, ...]) -> memoryview | None:
    """The bytes of a tensor that is small enough to travel in the handshake."""
    if len(ranks) > DIRECT or x.numel() * x.element_size() > EAGER:
        return None
    return as_bytes(plain(x.detach().cpu())).numpy().data


def _one_behind_the_other(lower: Tensor, upper: Tensor) -> Tensor:
    return torch.cat((lower, upper))
