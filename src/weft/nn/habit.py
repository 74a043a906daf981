"""Habits: what ranks say in a call that they made before just so is only compared.

An iteration of a training loop makes the calls of the one before, with tensors of the same shapes.
From the second such call on, a rank has a *habit*: the bytes that it and the others are going to
say, and what followed from them. If everybody says what he is expected to, the opening costs one
comparison for each peer; else the statements are read and concluded from, as ever.

A habit is also a guess at what the others bring, so small boxes of a large tensor can be told to
those who want them in the opening message, before it is known that they do. A statement names the
guess it was made with, by a digest of everything that all ranks are expected to say. So if one
rank finds its expectations met, every rank does: nothing is decided from one rank's data.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..agree import CAP, DIRECT, concluded, opening_of
from ..grid import Box
from ..plan import Plan
from ..wire.base import Persistent, Wire
from ..wire.loans import TICKET
from ..wire.part import Part
from .opening import Opening, Statement

__all__ = ["TICKETS", "Habit", "learn"]

_PRIVATE = 32 << 10
"""Bytes that may be told to one rank in the opening message; more is better moved where it lies."""

TICKETS = 2 * TICKET
"""Bytes in which a rank says to another where it may read."""

_READ = 8 << 20  # bytes of a tensor up to which it is read at once, instead of in turns

_MANY = 64  # habits of one layer that are kept


@dataclass(slots=True)
class Habit:
    """One call, as all ranks are used to make it.

    Attributes:
        call: as errors name it.
        ranks: who takes part, ascending.
        opening: what follows from it; the payloads in it are those of another time.
        plan: of the movement, or of its adjoint.
        eager: whether all tensors travel in the opening.
        takes: the boxes that are told to each rank in private, if the plan moves boxes so.
        heads: what this rank says to each other one, but for number and tensors.
        expected: the same of what it hears.
        sizes: bytes of the tensor that each rank tells all.
        private: bytes that each other rank tells this one alone.
        lends: whether these say where tensors lie, which are then read (`across`).
    """

    call: str
    ranks: tuple[int, ...]
    opening: Opening
    plan: Plan
    eager: bool
    takes: Mapping[int, Sequence[Box]] | None
    heads: dict[int, bytes]
    expected: dict[int, bytes]
    sizes: dict[int, int]
    private: dict[int, int]
    lends: bool
    _inbox: dict[int, Tensor] | None = None  # of the wire that the rest was made for
    _peers: tuple[int, ...] = ()
    _exchange: Persistent | None = None
    _heard: list[tuple[memoryview, bytes]] = field(default_factory=list)
    _seen: dict[int, Tensor] = field(default_factory=dict)

    def exchange(
        self,
        wire: Wire,
        x: Tensor,
        meanwhile: Callable[[], object] = lambda: None,
        tickets: Mapping[int, bytes] | None = None,
    ) -> Opening | None:
        """Say what is expected and hear the others; collective.

        Args:
            wire: of the whole group.
            x: this rank's tensor: of the CPU, plain.
            meanwhile: work to do while the statements are under way.
            tickets: what to tell the other ranks in private, if the habit lends.

        Returns:
            None: all is as expected, and `tensors` or `boxes` has what was told, until the next
            call. Else what followed instead.

        Raises:
            WeftError: somebody's arguments are wrong, or do not go with the others'.
            WireError: a peer or a link failed.
        """
        me, ranks = wire.rank, self.ranks
        if self._inbox is not wire.inbox:
            self._read_from(wire)
        if len(ranks) == wire.size:
            wire.sequence += 1
            number = wire.sequence.to_bytes(8, "little")
        else:
            number = _FIRST  # as a part of a wire counts, which is made for each call
        size = self.sizes[me]
        payload = ctypes.string_at(x.data_ptr(), size) if size else b""
        mine = bytearray().join((number, self.heads[me], payload))
        takes = self.takes
        if takes is None and tickets is None:
            messages = [mine] * len(self._peers)
        else:
            common, messages = (payload, bytes(-size % 16)), []
            for peer in self._peers:
                told = [tickets[peer]] if tickets else _told(x, (takes or {}).get(peer, ()))
                messages.append(bytearray().join((number, self.heads[peer], *common, *told)))
        assert self._exchange is not None
        pending = self._exchange.start(messages)
        meanwhile()
        pending.wait()
        for raw, expected in self._heard:
            # not the views themselves, which are compared item by item
            if raw.tobytes() != number + expected:
                break
        else:
            return None
        part = wire if len(ranks) == wire.size else Part(wire, ranks)
        own = torch.frombuffer(mine, dtype=torch.uint8)
        said_by = [own if rank == me else wire.inbox[rank] for rank in ranks]
        agreement = concluded(part, said_by)
        said: dict[int, Statement] = {}
        for body in agreement.said:
            said.update(Statement.unpack(body))
        return Opening.following(agreement, said, self.call, x.dtype)

    def _read_from(self, wire: Wire) -> None:
        """Find in the inbox of a wire what is going to be heard."""
        at, inbox = self.ranks.index(wire.rank), wire.inbox
        peers = (*self.ranks[at + 1 :], *self.ranks[:at])
        for peer in peers:
            if peer not in inbox:
                inbox[peer] = torch.empty(CAP, dtype=torch.uint8)
        self._peers = peers
        self._exchange = wire.persistent([(peer, inbox[peer]) for peer in peers])
        self._heard = [
            (inbox[peer][: 8 + len(self.expected[peer])].numpy().data, self.expected[peer])
            for peer in peers
        ]
        self._seen = {}
        for peer in peers if self.eager else ():
            if peer in self.plan.have.shapes:
                shape, start = self.plan.have.shapes[peer], 8 + len(self.expected[peer])
                memory = inbox[peer][start : start + self.sizes[peer]]
                self._seen[peer] = memory.view(self.opening.dtype).view(shape)
        self._inbox = inbox

    def tensors(self, wire: Wire, x: Tensor) -> dict[int, Tensor]:
        """The tensors of all that bring one, where they travelled in the opening."""
        return {**self._seen, wire.rank: x}

    def boxes(self, wire: Wire) -> dict[int, Tensor]:
        """What was told to this rank in private, by rank."""
        found = {}
        for rank, size in self.private.items():
            start = 8 + len(self.expected[rank]) + self.sizes[rank]
            start += -start % 16
            found[rank] = wire.inbox[rank][start : start + size]
        return found


_FIRST = (1).to_bytes(8, "little")


def _told(x: Tensor, takes: Sequence[Box]) -> list[bytes]:
    pieces = []
    for take in takes:
        values = x[take.slices].contiguous()
        pieces.append(ctypes.string_at(values.data_ptr(), values.numel() * values.element_size()))
    return pieces


def learn(
    habits: dict[object, object],
    key: object,
    wire: Wire,
    ranks: tuple[int, ...],
    call: str,
    opening: Opening,
    plan: Plan,
) -> None:
    """Remember a call; the second time it becomes a habit.

    Args:
        habits: those of the movement.
        key: what this rank brought, but for the values.
        wire: of the whole group.
        ranks: who took part.
        call: as errors name it.
        opening: what all said.
        plan: what follows from it.
    """
    if not 2 <= len(ranks) <= DIRECT:
        return
    said = {rank: replace(opening.said[rank], payload=None, guess=0) for rank in ranks}
    payloads = {rank: opening.said[rank].payload for rank in ranks}
    sizes = {rank: None if each is None else len(each) for rank, each in payloads.items()}
    everything = repr((sorted(opening.fingerprints.items()), said, sizes))
    digest = hashlib.blake2b(everything.encode(), digest_size=8).digest()
    if habits.get(key) != digest:
        if len(habits) >= _MANY:
            habits.clear()
        habits[key] = digest
        return
    guess = int.from_bytes(digest, "little")
    eager = all(sizes[rank] is not None for rank in plan.have.shapes)
    private = {} if eager else _told_at_once(plan, opening.dtype)
    small = bool(private)
    lends = not (eager or small) and _most(plan) * opening.dtype.itemsize <= _READ
    lends = lends and all(each.lends for each in said.values())
    if lends:
        private = {(one, to): TICKETS for one in ranks for to in ranks if one != to}

    def head(source: int, to: int) -> bytes:
        body = replace(said[source], guess=guess).head(source, sizes[source])
        size = len(body) + (sizes[source] or 0)
        told = private.get((source, to), 0)
        return opening_of(opening.fingerprints[source], source, body, size, told)

    others = [rank for rank in ranks if rank != wire.rank]
    habits[key] = Habit(
        call,
        ranks,
        replace(opening, said=said),
        plan,
        eager,
        plan.local(wire.rank).sends if small else None,
        {rank: head(wire.rank, rank) for rank in ranks},
        {rank: head(rank, wire.rank) for rank in others},
        {rank: size or 0 for rank, size in sizes.items()},
        {rank: private[rank, wire.rank] for rank in others if (rank, wire.rank) in private},
        lends,
    )


def _most(plan: Plan) -> int:
    """Elements of the largest tensor that is moved or made."""
    return max(
        math.prod(shape) for side in (plan.have, plan.want) for shape in side.shapes.values()
    )


def _told_at_once(plan: Plan, dtype: torch.dtype) -> dict[tuple[int, int], int]:
    """Bytes that each rank tells each other one in private: (from, to); none if it is too much.

    Every rank finds the same.
    """
    if plan.hint is not None:
        return {}
    found: dict[tuple[int, int], int] = {}
    for move in plan.moves:
        if move.source != move.destination:
            pair = move.source, move.destination
            found[pair] = found.get(pair, 0) + move.take.volume * dtype.itemsize
    return found if max(found.values(), default=_PRIVATE + 1) <= _PRIVATE else {}
