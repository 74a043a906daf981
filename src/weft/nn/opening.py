"""The opening of every movement: all that take part learn what all bring.

Shapes, dtypes, whether gradients are needed, and what is wrong with anybody's arguments travel in
one small message between all ranks of a group (`weft.agree`), on every call, also where `shape=`
was told: a promise that one rank broke would otherwise be a hang. Tensors of up to `EAGER` bytes
travel in the same message, and then nothing is left to be sent.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..agree import DIRECT, Agreement, agree
from ..errors import WeftError
from ..grid import Shape
from ..wire.base import Wire, as_bytes
from ..wire.part import Part
from .movement import Movement

__all__ = ["EAGER", "Opening", "Statement", "among", "opened", "payload_of"]

EAGER = 4 << 10
"""Bytes of a tensor that may travel in the opening message."""

# rank, gradient, dimensions, bytes of the payload
_ENTRY = struct.Struct("<IBBxxI4x")
_ALIGNED = 16  # bytes, to a multiple of which a payload begins
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
    payload: memoryview | None

    def pack(self, rank: int) -> bytearray:
        count = None if self.payload is None else len(self.payload)
        gap = bytes(-len(self.payload or b"") % _ALIGNED)
        return bytearray().join((self.head(rank, count), self.payload or b"", gap))

    def head(self, rank: int, count: int | None) -> bytes:
        """All but the payload, which has so many bytes, or does not travel along."""
        flags = _NEEDS * self.needs | _RECORDS * self.records
        ndim, size = len(self.shape), 0xFFFFFFFF if count is None else count
        head = _ENTRY.pack(rank, flags, ndim, size)
        shape = struct.pack(f"<{ndim}q", *self.shape)
        return b"".join((head, shape, bytes(8 * ndim % _ALIGNED)))

    @classmethod
    def unpack(cls, raw: memoryview) -> dict[int, Statement]:
        """The statements that lie behind each other, by rank."""
        at, found = 0, {}
        while at < len(raw):
            rank, flags, ndim, count = _ENTRY.unpack_from(raw, at)
            at += _ENTRY.size
            shape = struct.unpack_from(f"<{ndim}q", raw, at)
            at += 8 * ndim + 8 * ndim % _ALIGNED
            payload = None
            if count != 0xFFFFFFFF:
                payload = memoryview(bytearray(raw[at : at + count]))  # its own: that is given back
                at += count + -count % _ALIGNED
            needs, records = bool(flags & _NEEDS), bool(flags & _RECORDS)
            found[rank] = cls(shape, needs, records, payload)
        return found


@dataclass(frozen=True, slots=True)
class Opening:
    """What came of it, the same on all ranks that take part.

    Attributes:
        said: what each of them brings.
        dtype: of the tensor that moves.
        needs: whether anybody asks for a gradient, so that all take part in finding it.
    """

    said: Mapping[int, Statement]
    dtype: torch.dtype
    needs: bool

    @classmethod
    def following(
        cls, agreement: Agreement, said: Mapping[int, Statement], call: str, own: torch.dtype
    ) -> Opening:
        """What follows from what all said; `own` is the dtype where nobody's says anything.

        Raises:
            WeftError: a rank needs a gradient, and another does not record any.
        """
        _check(said, call)
        name = agreement.fields["dtype"]
        return cls(
            said,
            own if name == "?" else getattr(torch, name.removeprefix("torch.")),
            any(each.needs for each in said.values()),
        )

    def tensors(self, shapes: Mapping[int, Shape]) -> Mapping[int, Tensor] | None:
        """The tensors of these ranks, if all of them were small enough to come along."""
        found = {}
        for rank, shape in shapes.items():
            payload = self.said[rank].payload
            if payload is None:
                return None
            if payload:
                found[rank] = torch.frombuffer(payload, dtype=self.dtype).view(shape)
            else:
                found[rank] = torch.empty(shape, dtype=self.dtype)
        return found


def among(wire: Wire, ranks: tuple[int, ...]) -> Wire:
    """The wire of some ranks: itself if these are all."""
    return wire if ranks == tuple(range(wire.size)) else Part(wire, ranks)


def opened(
    wire: Wire,
    movement: Movement,
    ranks: tuple[int, ...],
    statement: Statement,
    *,
    call: str,
    dtype: torch.dtype | None,
    own: torch.dtype,
    error: str | None,
    mode: str = "",
) -> Opening:
    """State what this rank brings and hear the others; collective among `ranks`.

    Args:
        wire: of the whole group.
        movement: what is to be done.
        ranks: who takes part, ascending.
        statement: what this rank brings.
        call: name of the call.
        dtype: of its tensor; None if it has no volume, so that its dtype says nothing.
        own: the dtype to use where nobody's says anything.
        error: what is wrong with this rank's arguments.
        mode: what else must be the same on all of them.

    Raises:
        WeftError: somebody's arguments are wrong, or do not go with the others'.
        WireError: a peer or a link failed.
    """
    fields = {
        "partition": movement.grids,
        "arguments": movement.arguments,
        "dtype": dtype,
        "mode": mode,
    }
    part = among(wire, ranks)
    agreement = agree(part, call, fields, error, statement.pack(wire.rank), _behind)
    try:
        said: dict[int, Statement] = {}
        for number, body in enumerate(agreement.said):
            if number == part.rank and len(agreement.said) == part.size:
                said[wire.rank] = statement  # as it was said
            else:
                said.update(Statement.unpack(body))
    finally:
        agreement.release()
    return Opening.following(agreement, said, call, own)


def payload_of(x: Tensor, ranks: tuple[int, ...]) -> memoryview | None:
    """The bytes of a tensor that is small enough to travel in the opening."""
    if len(ranks) > DIRECT or x.numel() * x.element_size() > EAGER:
        return None
    return as_bytes(x.detach().cpu().resolve_conj().resolve_neg().contiguous()).numpy().data


def _behind(lower: Tensor, upper: Tensor) -> Tensor:
    return torch.cat((lower, upper))


def _check(said: Mapping[int, Statement], call: str) -> None:
    """All that take part must be able to take part in finding the gradient."""
    asks = next((rank for rank, each in said.items() if each.needs), None)
    if asks is None:
        return
    deaf = next((rank for rank, each in said.items() if not each.records), None)
    if deaf is not None:
        raise WeftError(
            f"{call}: rank {asks} needs a gradient, and rank {deaf} does not record any: call it "
            "under torch.no_grad() on all ranks that take part, or on none"
        )
