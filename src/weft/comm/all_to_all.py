"""`all_to_all`: a tensor from each rank to each, of any sizes, which nobody needs to know before.

In the opening exchange every rank tells every other what it is going to send it, and sends it along
if it is small: one round. A peer on the same host is told where a larger tensor lies, and reads it
there at once (`wire.loans`). All others go straight from where they are to where they belong,
between every two ranks at once. A call that is made again is opened by a `habit`.

The adjoint of sending tensors is sending their gradients back: the same collective again.
"""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .._torch import profiled, uncompiled
from ..agree import is_direct
from ..tensors import has_elements, lacking
from ..wire import default
from ..wire.base import Wire, as_bytes, plain
from ..wire.loans import Loans
from .delivery import Coming, Delivery
from .differentiable import applied
from .habit import Habit, known, learn
from .movement import (
    STAGED,
    empty,
    host,
    is_movable,
    moved,
    on_host,
    rounds_of,
)
from .opening import NO_LIMIT, Mode, Opening, opened

__all__ = ["Scatter", "all_to_all", "check_round"]

_EAGER = 128 << 10  # bytes of a tensor that rather goes along with its shape than in a second round
_NEAR = 16 << 10  # the same where the other rank can rather read it
_APART, _HERE, _LENT = range(3)  # where a tensor is: not in the statement, in it, to be read
_DIMS = 64  # as many as torch's tensors may have
_CAP = 8 + 8 * _DIMS + 8  # bytes of a shape on its own
_ALIGNED = 16  # bytes, to a multiple of which it is filled up, so that any dtype may follow


@uncompiled
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
            Where ranks differ the smallest counts, but a rank that says None may send tensors of
            up to 128 KiB at once. Tensors of another device than the CPU go in rounds of 128 MiB
            anyway, or less.

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
    return scattered(wire, inputs, round_bytes, check_round(round_bytes))


def scattered(
    wire: Wire,
    inputs: Sequence[Tensor],
    limit: int | None,
    error: str | None,
    name: str = "inputs",
) -> list[Tensor]:
    """`all_to_all`, for a caller whose arguments have other names.

    Args:
        wire: among whom.
        inputs: as for `all_to_all`.
        limit: bytes of a round, or None.
        error: what is wrong with the caller's other arguments, or None.
        name: what the caller calls the inputs.
    """
    error = _wrong(inputs, wire.size, name) or error
    tensors = [torch.empty(0)] * wire.size if error else list(inputs)
    scatter = Scatter(wire, "all_to_all", error, limit=NO_LIMIT if error else limit)
    return applied(scatter, tensors)


def _wrong(inputs: object, size: int, name: str) -> str | None:
    """What is wrong with what a caller passed under that name, or None."""
    if not isinstance(inputs, list | tuple):
        return f"{name} is a {type(inputs).__name__}: pass a list of {size} tensors"
    for to, tensor in enumerate(inputs):
        if not isinstance(tensor, Tensor):
            return f"{name}[{to}] is a {type(tensor).__name__}: pass a tensor, empty if need be"
        if not has_elements(tensor):
            return f"{name}[{to}] is {lacking(tensor)}: pass strided tensors with data"
        for what in ("dtype", "device"):
            first, this = getattr(inputs[0], what), getattr(tensor, what)
            if this != first:
                return f"{name}[{to}] has {what} {this}, {name}[0] has {first}: pass one {what}"
        if not is_movable(tensor.dtype):
            return f"{name}[{to}] is {tensor.dtype}, which torch does not copy: view another dtype"
    if len(inputs) != size:
        return f"{name} has {len(inputs)} tensors for {size} ranks: pass one for each"
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
            # a range as torch.profiler.record_function makes it, for a fiftieth of the time
            with profiled(f"weft::{self.name.partition(' ')[0]}"):
                return self.now([plain(tensor.detach()) for tensor in tensors], mode)

        return self.wire.worker.call(self.name, job)

    def now(self, tensors: Sequence[Tensor], mode: Mode) -> tuple[list[Tensor], bool]:
        """`run`, for plain tensors and inside of a call whose turn it is."""
        wire, like = self.wire, tensors[self.wire.rank]
        key: Hashable = None
        # backward calls name the call that they belong to, so none is made twice
        if (
            " " not in self.name
            and self.error is None
            and self.limit in (None, NO_LIMIT)
            and on_host(like)
        ):
            shapes = tuple([tensor.shape for tensor in tensors])
            key = self.name, like.dtype, mode, *self.fields.values(), shapes
        habit = known(wire).get(key)
        if habit is not None:
            return self._again(habit, tensors)
        limit = min(self.limit or NO_LIMIT, NO_LIMIT if on_host(like) else STAGED)
        fields = {"dtype": None if self.error else like.dtype, **self.fields}
        # what all others send along comes to no more than a round, either
        eager = _EAGER if limit == NO_LIMIT else min(_EAGER, limit // (2 * wire.size))
        loans = Loans(wire)
        private: list[tuple[bytes, bytes | memoryview]] | None = None
        if is_direct(wire) and not self.error:
            lender = loans if limit == NO_LIMIT else None
            private = [
                _stated(tensor, eager, to, lender) if to != wire.rank else (b"", b"")
                for to, tensor in enumerate(tensors)
            ]
        opening = opened(
            wire, self.name, fields, self.error, mode=mode, limit=limit, private=private
        )
        with opening as said:
            if key is not None and private is not None:
                self._learn(key, said, private, tensors)
            told = {peer: private[peer][0][0] if private else _APART for peer in wire.peers}
            return self._moved(tensors, said, told, loans)

    def _moved(
        self, tensors: Sequence[Tensor], said: Opening, told: Mapping[int, int], loans: Loans
    ) -> tuple[list[Tensor], bool]:
        """The results of a call that was opened; `told` is where each peer was told to look."""
        wire, like = self.wire, tensors[self.wire.rank]
        self._number = wire.sequence
        results = list(tensors)
        outgoing: dict[int, Tensor] = {}
        incoming: dict[int, Tensor] = {}
        heard = said.private if is_direct(wire) else _shapes(wire, tensors)
        lends = said.limit == NO_LIMIT  # else what was lent goes in rounds, too
        for peer in wire.peers:
            where, shape, payload = _read(heard[peer])
            if where == _HERE:
                results[peer] = _made(payload, shape, like)
            else:
                results[peer] = empty(shape, like)
                if where == _LENT and lends:
                    loans.take(peer, payload, results[peer])
                else:
                    incoming[peer] = results[peer]
            if told[peer] == _APART or (told[peer] == _LENT and not lends):
                outgoing[peer] = tensors[peer]
        results[wire.rank] = empty(tuple(like.shape), like).copy_(like)
        rounds = 1
        if said.limit != NO_LIMIT:
            rounds = rounds_of(_most(wire, [*outgoing.values(), *incoming.values()]), said.limit)
        moved(wire, outgoing, incoming, rounds)
        if lends:
            loans.settle()
        return results, said.records

    def _again(self, habit: Habit, tensors: Sequence[Tensor]) -> tuple[list[Tensor], bool]:
        """`now`, of tensors of the same shapes as before."""
        wire, like = self.wire, tensors[self.wire.rank]
        loans = Loans(wire)
        tails: dict[int, bytes] = {}
        for peer, always in habit.told.items():
            tensor = tensors[peer]
            if always[0] == _LENT:
                tails[peer] = loans.ticket(peer, tensor)
            else:
                tails[peer] = ctypes.string_at(tensor.data_ptr(), tensor.nbytes)
        results = habit.delivery.ended(habit, tails, like, loans)
        if results is None:
            told = {peer: always[0] for peer, always in habit.told.items()}
            return self._moved(tensors, habit.news(), told, loans)
        self._number = wire.sequence
        return results, habit.records

    def _learn(
        self,
        key: Hashable,
        said: Opening,
        private: Sequence[tuple[bytes, bytes | memoryview]],
        tensors: Sequence[Tensor],
    ) -> None:
        """Remember a call in which all that is not lent is told at once."""
        wire, like = self.wire, tensors[self.wire.rank]
        told = {peer: (private[peer][0], len(private[peer][1])) for peer in wire.peers}
        heard: dict[int, tuple[bytes, int]] = {}
        coming = {wire.rank: Coming(tuple(like.shape), like.nbytes)}
        for peer in wire.peers:
            where, shape, tail = _read(said.private[peer])
            heard[peer] = bytes(said.private[peer][: -len(tail) or None]), len(tail)
            nbytes = math.prod(shape) * like.itemsize
            coming[peer] = Coming(shape, nbytes, where == _LENT)
        every = [always[0] for always, _ in (*told.values(), *heard.values())]
        if said.limit != NO_LIMIT or _APART in every:
            return
        habit = learn(wire, key, self.name, said, told, heard)
        if habit is not None:
            lends = {peer: tensors[peer].nbytes for peer in wire.peers if told[peer][0][0] == _LENT}
            habit.delivery = Delivery(wire, habit, lends, coming)


def _stated(
    tensor: Tensor, eager: int, to: int, loans: Loans | None
) -> tuple[bytes, bytes | memoryview]:
    """A tensor's shape, with its bytes if they are few, or with where it lies if `to` can read."""
    if tensor.nbytes > _NEAR and loans is not None and loans.wire.lends(to):
        return _shape(tensor, _LENT), loans.ticket(to, tensor)
    if tensor.nbytes <= eager:
        return _shape(tensor, _HERE), as_bytes(host(tensor)).numpy().data
    return _shape(tensor, _APART), b""


def _made(payload: bytes | memoryview, shape: tuple[int, ...], like: Tensor) -> Tensor:
    """A tensor of bytes that came with its shape, in memory of its own."""
    if not payload:
        return empty(shape, like)
    result = torch.frombuffer(bytearray(payload), dtype=like.dtype).view(shape)
    return result if on_host(like) else result.to(like.device)


def _shapes(wire: Wire, tensors: Sequence[Tensor]) -> list[memoryview]:
    """Tell each peer the shape of what it will be sent; what each rank told this one."""
    texts = [
        torch.frombuffer(bytearray(_shape(tensor, _APART)), dtype=torch.uint8) for tensor in tensors
    ]
    pending = wire.post_small(
        [(peer, texts[peer]) for peer in wire.peers], [(peer, _CAP) for peer in wire.peers]
    )
    heard = dict(zip(wire.peers, pending.wait(), strict=True)) | {wire.rank: texts[wire.rank]}
    shapes = [memoryview(bytes(heard[rank].numpy().data)) for rank in range(wire.size)]
    pending.release()
    return shapes


def _shape(tensor: Tensor, where: int) -> bytes:
    """Where a tensor is, and its shape."""
    dims = tensor.dim()
    return struct.pack(f"<BB6x{dims}q", where, dims, *tensor.shape) + bytes(
        -(8 + 8 * dims) % _ALIGNED
    )


def _read(raw: bytes | memoryview) -> tuple[int, tuple[int, ...], bytes | memoryview]:
    """Where a tensor is, its shape, and what follows: its bytes, or its ticket."""
    where, dims = raw[0], raw[1]
    end = 8 + 8 * dims
    return where, struct.unpack_from(f"<{dims}q", raw, 8), raw[end + -end % _ALIGNED :]


def _most(wire: Wire, tensors: Sequence[Tensor]) -> int:
    """Bytes of the tensors of that rank which has the most of them."""
    most = torch.tensor([sum(tensor.nbytes for tensor in tensors)])
    wire.dense_all_reduce(most, "max").wait()
    return int(most)
