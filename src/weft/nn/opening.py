"""The opening of every movement: all that take part learn what all bring.

Shapes, dtypes, whether gradients are needed, and what is wrong with anybody's arguments travel in
one small message between all ranks of a group (`weft.agree`), on every call, also where `shape=`
was told: a promise that one rank broke would otherwise be a hang. Tensors of up to `EAGER` bytes
travel in the same message, and then nothing is left to be sent.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..agree import DIRECT, agree
from ..errors import WeftError
from ..grid import Shape
from ..wire.base import Wire, as_bytes
from ..wire.hosts import digest_of
from ..wire.part import Part
from .movement import Movement

__all__ = ["EAGER", "Opening", "Statement", "among", "host_of", "opened", "payload_of"]

EAGER = 4 << 10
"""Bytes of a tensor that may travel in the opening message."""

_ENTRY = struct.Struct("<IBBHIQ")  # rank, gradient, dimensions, 0, bytes of the payload, host
_NEEDS, _RECORDS = 1, 2


@dataclass(frozen=True, slots=True)
class Statement:
    """What one rank brings.

    Attributes:
        shape: of its tensor, or of the tensor whose movement is undone.
        needs: whether a gradient of the result is asked of it.
        records: whether it records what a gradient needs.
        payload: the bytes of its tensor, if they are few and travelled along; writable.
        host: where it is, as a number.
    """

    shape: Shape
    needs: bool
    records: bool
    payload: memoryview | None
    host: int

    def pack(self, rank: int) -> bytearray:
        sizes = struct.pack(f"<{len(self.shape)}q", *self.shape)
        count = 0xFFFFFFFF if self.payload is None else len(self.payload)
        flags = _NEEDS * self.needs | _RECORDS * self.records
        head = _ENTRY.pack(rank, flags, len(self.shape), 0, count, self.host)
        return bytearray().join((head, sizes, self.payload or b""))

    @classmethod
    def unpack(cls, raw: memoryview) -> dict[int, Statement]:
        """The statements that lie behind each other, by rank."""
        at, found = 0, {}
        while at < len(raw):
            rank, flags, ndim, _, count, host = _ENTRY.unpack_from(raw, at)
            at += _ENTRY.size
            shape = struct.unpack_from(f"<{ndim}q", raw, at)
            at += 8 * ndim
            payload = None
            if count != 0xFFFFFFFF:
                payload = memoryview(bytearray(raw[at : at + count]))  # its own: that is given back
                at += count
            needs, records = bool(flags & _NEEDS), bool(flags & _RECORDS)
            found[rank] = cls(shape, needs, records, payload, host)
        return found


@dataclass(frozen=True, slots=True)
class Opening:
    """What came of it, the same on all ranks that take part.

    Attributes:
        said: what each of them brings.
        dtype: of the tensor that moves.
        needs: whether anybody asks for a gradient, so that all take part in finding it.
        together: whether all of them are on one host.
    """

    said: Mapping[int, Statement]
    dtype: torch.dtype
    needs: bool
    together: bool

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
    _check(said, call)
    name = agreement.fields["dtype"]
    agreed = own if name == "?" else getattr(torch, name.removeprefix("torch."))
    needs = any(each.needs for each in said.values())
    return Opening(said, agreed, needs, len({each.host for each in said.values()}) == 1)


@functools.cache
def host_of(machine: str) -> int:
    """The number of the host that this process is on, given the name of its machine."""
    return int.from_bytes(digest_of(machine)[:8], "little")


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
