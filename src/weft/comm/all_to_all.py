"""`all_to_all`: a tensor from each rank to each, of any sizes, which nobody needs to know before.

The opening exchange tells every rank what comes from whom. Where a rank's tensors are small they
travel in it. All others go straight from where they are to where they belong, between every two
ranks at once.

The adjoint of sending tensors is sending their gradients back: the same collective again.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from ..wire import default
from ..wire.base import Wire, as_bytes
from .differentiable import applied
from .movement import STAGED, empty, host, moved, on_host, rounds_of
from .opening import NO_LIMIT, Mode, opened

__all__ = ["Scatter", "all_to_all", "check_round"]

_EAGER = 16 << 10  # bytes that a rank rather sends to all others than in a second round
_DIMS = 64  # as many as torch's tensors may have
_CAP = 1 + 8 * _DIMS  # bytes of a shape on its own


def all_to_all(
    inputs: Sequence[Tensor], group: Any = None, *, round_bytes: int | None = None
) -> list[Tensor]:
    """Send a tensor to each rank and receive one from each. Differentiable.

    Args:
        inputs: one for each rank of the group, in rank order, this one included; of one dtype,
            any, and on one device; of any shapes, which need not agree, also of no elements.
        group: None (the default group), a Wire, a ProcessGroup, or a 1-D DeviceMesh.
        round_bytes: None, or bytes: then it goes in rounds, each of which sends and receives, on
            no rank, more than so many bytes together, give or take one element of each tensor.
            Where ranks differ the smallest counts. Tensors of another device than the CPU go in
            rounds of 128 MiB anyway, or less.

    Returns:
        What each rank sent to this one, in rank order, on the device of the inputs. All of it is
        memory of its own. If an input of some rank requires a gradient, the results of all ranks
        do, and all must run backward; the gradient of an input is what comes back from where it
        was sent.

    Raises:
        WeftError: some rank's arguments are wrong or differ from the others'; the same text on
            every rank, naming the rank. The next call works.
        WireError: a peer or a link failed; names the culprit. The group is lost.

    Example:
        >>> import torch, weft
        >>> from weft.testing import run
        >>> def program(wire):
        ...     inputs = [torch.full((wire.rank + to,), wire.rank) for to in range(wire.size)]
        ...     return [tensor.tolist() for tensor in weft.all_to_all(inputs)]
        >>> run(2, program)
        [[[], [1]], [[0], [1, 1]]]
    """
    wire = default.resolve(group)
    error = _wrong(inputs, wire.size) or check_round(round_bytes)
    tensors = [torch.empty(0)] * wire.size if error else list(inputs)
    scatter = Scatter(wire, "all_to_all", error, limit=NO_LIMIT if error else round_bytes)
    return applied(scatter, tensors)


def _wrong(inputs: object, size: int) -> str | None:
    """What is wrong with what a caller passed, or None."""
    if not isinstance(inputs, list | tuple):
        return f"inputs is a {type(inputs).__name__}: pass a list of {size} tensors"
    for to, tensor in enumerate(inputs):
        if not isinstance(tensor, Tensor):
            return f"inputs[{to}] is a {type(tensor).__name__}: pass a tensor, empty if need be"
        if tensor.layout != torch.strided:
            return f"inputs[{to}] has layout {tensor.layout}: pass strided tensors"
        for what in ("dtype", "device"):
            first, this = getattr(inputs[0], what), getattr(tensor, what)
            if this != first:
                return f"inputs[{to}] has {what} {this}, inputs[0] has {first}: pass one {what}"
    if len(inputs) != size:
        return f"inputs has {len(inputs)} tensors for {size} ranks: pass one for each"
    return None


def check_round(round_bytes: object) -> str | None:
    """What is wrong with a caller's `round_bytes`, or None."""
    whole = isinstance(round_bytes, int) and not isinstance(round_bytes, bool)
    if round_bytes is None or (whole and round_bytes > 0):  # type: ignore[operator]  # an int
        return None
    return f"round_bytes is {round_bytes!r}: pass a positive number of bytes, or None"


@dataclass(slots=True)
class Scatter:
    """One tensor for each rank on its way, as a linear collective; its own adjoint.

    Attributes:
        wire: among whom.
        name: of the call.
        error: what is wrong with the tensors, or None.
        fields: what must be equal on all ranks, beside the dtype.
        limit: bytes of a round, or None.
    """

    wire: Wire
    name: str
    error: str | None = None
    fields: dict[str, object] = field(default_factory=dict)
    limit: int | None = None
    _number: int = 0

    def adjoint(self) -> Scatter:
        name = f"{self.name.partition(' ')[0]} backward of call {self._number}"
        return Scatter(self.wire, name, limit=self.limit)

    def run(self, tensors: Sequence[Tensor], mode: Mode) -> tuple[list[Tensor], bool]:
        def job() -> tuple[list[Tensor], bool]:
            with record_function(f"weft::{self.name.partition(' ')[0]}"):
                return self.now([tensor.detach().contiguous() for tensor in tensors], mode)

        return self.wire.worker.call(self.name, job)

    def now(self, tensors: Sequence[Tensor], mode: Mode) -> tuple[list[Tensor], bool]:
        """`run`, for contiguous tensors and inside of a call whose turn it is."""
        wire, like = self.wire, tensors[self.wire.rank]
        limit = min(self.limit or NO_LIMIT, NO_LIMIT if on_host(like) else STAGED)
        fields = {"dtype": None if self.error else like.dtype, **self.fields}
        own = None if self.error else _stated(tensors, min(limit, _EAGER))
        opening = opened(wire, self.name, fields, self.error, mode=mode, limit=limit, own=own)
        with opening as said:
            self._number = wire.sequence
            everyone = [_Statement.read(body, wire.size) for body in said.own]
            if everyone:
                shapes = [statement.shapes[wire.rank] for statement in everyone]
            else:
                shapes = _shapes(wire, tensors)
            results = [empty(shape, like) for shape in shapes]
            for source, statement in enumerate(everyone):
                if source != wire.rank:
                    statement.unload(results[source], wire.rank)
        results[wire.rank].copy_(like)
        eager = [statement.payload is not None for statement in everyone] or [False] * wire.size
        outgoing = {} if eager[wire.rank] else {peer: tensors[peer] for peer in wire.peers}
        incoming = {peer: results[peer] for peer in wire.peers if not eager[peer]}
        rounds = 1
        if said.limit != NO_LIMIT:
            rounds = rounds_of(_most(wire, [*outgoing.values(), *incoming.values()]), said.limit)
        moved(wire, outgoing, incoming, rounds)
        return results, said.records


@dataclass(frozen=True, slots=True)
class _Statement:
    """What a rank states: the shapes of its tensors and, where they are small, all their bytes."""

    shapes: list[tuple[int, ...]]
    payload: Tensor | None

    @classmethod
    def read(cls, body: Tensor, size: int) -> _Statement:
        raw = body.numpy().data
        ends = [*accumulate(raw[1 : 1 + size], initial=0)]
        dims = struct.unpack_from(f"<{ends[-1]}q", raw, 1 + size)
        shapes = [dims[start:end] for start, end in pairwise(ends)]
        return cls(shapes, body[1 + size + 8 * ends[-1] :] if raw[0] else None)

    def unload(self, result: Tensor, rank: int) -> None:
        """Copy what is for a rank to its place, if it is here."""
        if self.payload is None or not result.numel():
            return
        before = sum(map(math.prod, self.shapes[:rank])) * result.element_size()
        place = result if on_host(result) else torch.empty(result.shape, dtype=result.dtype)
        as_bytes(place).copy_(self.payload[before : before + result.nbytes])
        if place is not result:
            result.copy_(place)


def _stated(tensors: Sequence[Tensor], eager: int) -> bytes:
    """The body of this rank's statement, with its tensors if they are not above `eager` bytes."""
    here = sum(tensor.nbytes for tensor in tensors) <= eager
    dims = [dim for tensor in tensors for dim in tensor.shape]
    head = bytes([here, *(tensor.dim() for tensor in tensors)]) + struct.pack(
        f"<{len(dims)}q", *dims
    )
    return b"".join([head, *(as_bytes(host(t)).numpy().data for t in tensors)]) if here else head


def _shapes(wire: Wire, tensors: Sequence[Tensor]) -> list[tuple[int, ...]]:
    """Tell each peer the shape of what it will be sent; what comes from each rank."""
    texts = [torch.frombuffer(bytearray(_shape(tensor)), dtype=torch.uint8) for tensor in tensors]
    pending = wire.post_small(
        [(peer, texts[peer]) for peer in wire.peers], [(peer, _CAP) for peer in wire.peers]
    )
    heard = dict(zip(wire.peers, pending.wait(), strict=True)) | {wire.rank: texts[wire.rank]}
    shapes = [_read_shape(heard[rank].numpy().data) for rank in range(wire.size)]
    pending.release()
    return shapes


def _shape(tensor: Tensor) -> bytes:
    return struct.pack(f"<B{tensor.dim()}q", tensor.dim(), *tensor.shape)


def _read_shape(raw: memoryview) -> tuple[int, ...]:
    return struct.unpack_from(f"<{raw[0]}q", raw, 1)


def _most(wire: Wire, tensors: Sequence[Tensor]) -> int:
    """Bytes of the tensors of that rank which has the most of them."""
    most = torch.tensor([sum(tensor.nbytes for tensor in tensors)])
    wire.dense_all_reduce(most, "max").wait()
    return int(most)
