"""Plans carried out at once: every rank reads what it wants where the others have it.

For calls that became a habit, among ranks that can all read each other's memory, of tensors for
which waking each other up costs more than moving them. The opening message, in which nothing else
is news, says where the tensors lie; behind it everything is read, and a last small message lets
their owners go (`wire.loans`).

A sum that only one rank wants is made there. One that all want each makes for itself, or of a large
one a part, and reads the parts of the others. Values add up in the order of the schedule that
the first such call took, so that not one bit changes when it becomes a habit.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..grid import Box
from ..plan import Plan
from ..wire.arithmetic import cut, reduce_parts
from ..wire.base import Wire
from ..wire.loans import TICKET, Loans
from ..wire.memory import Lease, fresh, typed
from .carry import BITS, Result, order_of_addition, packed, place_for, split
from .opening import Opening

if TYPE_CHECKING:
    from .habit import Habit

__all__ = ["TICKETS", "Boxes", "Sum", "exchanged", "flat", "in_parts"]

TICKETS = 2 * TICKET
"""Bytes in which a rank says to another where it may read."""

_WHOLE = 512 << 10  # bytes up to which each rank rather reads all of what all want the sum of


def exchanged(habit: Habit, wire: Wire, x: Tensor) -> Opening | Tensor:
    """The result of a rank in a call that is made again, or what ranks said instead; collective.

    Args:
        habit: one that lends.
        wire: of the whole group.
        x: this rank's tensor: of the CPU, plain.
    """
    bits = x.view(BITS.get(x.dtype, x.dtype))
    crossing = (Sum if in_parts(habit.plan, x) else Boxes)(habit.plan, bits, wire)
    news = habit.exchange(wire, x, crossing.begin, crossing.tickets)
    found = crossing.ended(habit.boxes).view(x.dtype) if news is None else news
    for lease in crossing.leases:
        lease.release()
    return found


def in_parts(plan: Plan, x: Tensor) -> bool:
    """Whether each rank makes a part of a sum that all want."""
    large = plan.hint == "all_reduce" and x.nbytes > _WHOLE
    return large and x.dtype is not torch.complex32


class _Crossing(abc.ABC):
    """One rank's part in a plan.

    Attributes:
        tickets: for the other ranks; of zeros where nothing is lent.
        leases: memory that is needed until the end.
    """

    def __init__(self, plan: Plan, x: Tensor, wire: Wire) -> None:
        self._plan, self._x, self._wire = plan, x, wire
        self.tickets = dict.fromkeys(range(wire.size), bytes(TICKETS))
        self.leases: list[Lease] = []

    @abc.abstractmethod
    def begin(self) -> None:
        """What can be done before the others are heard."""

    @abc.abstractmethod
    def ended(self, told: Mapping[int, Tensor]) -> Tensor:
        """The result, given the tickets that the others told."""


class Boxes(_Crossing):
    """Each box from its rank to those that want it."""

    def __init__(self, plan: Plan, x: Tensor, wire: Wire) -> None:
        super().__init__(plan, x, wire)
        self._local, self.loans = plan.local(wire.rank), Loans(wire)
        self._order = order_of_addition(plan, wire.rank, x.dtype)
        self._into: Result | None = None
        for peer, takes in self._local.sends.items():
            ticket = self.loans.ticket(peer, packed(x, takes, wire, self.leases))
            self.tickets[peer] = ticket + bytes(TICKETS - TICKET)

    def begin(self) -> None:
        local = self._local
        if local.result is None:
            return
        first = local.own if self._order[:1] == [self._wire.rank] else ()
        box = first[0][1] if first else self._first()
        self._into = Result(local, self._x.dtype, box)
        self._add_own(first)

    def _first(self) -> Box | None:
        """The box that is written first, where that is another rank's."""
        return self._local.recvs[self._order[0]][0] if self._order else None

    def _add_own(self, moves: Sequence[tuple[Box, Box]]) -> None:
        for take, put in moves:
            assert self._into is not None
            self._into.write(put.slices, self._x[take.slices])

    def ended(self, told: Mapping[int, Tensor]) -> Tensor:
        local, wire, x = self._local, self._wire, self._x
        recvs = local.recvs
        places = {
            peer: place_for(local, peer, self._into, x.dtype, wire, self.leases)
            for peer in wire.peers
            if peer in recvs
        }
        for peer, (place, _) in places.items():
            self.loans.take(peer, told[peer][:TICKET].numpy().data, place)

        def add() -> None:
            for number, rank in enumerate(self._order):
                if rank == wire.rank:
                    self._add_own(local.own if number else ())
                elif places[rank][1]:
                    assert self._into is not None
                    for put, values in split(places[rank][0], recvs[rank], x.dtype):
                        self._into.write(put.slices, values)

        self.loans.settle(add)
        return x.new_empty(0) if self._into is None else self._into.done(x.dtype)


class Sum(_Crossing):
    """A sum that all want: each rank adds up one part of it."""

    def __init__(self, plan: Plan, x: Tensor, wire: Wire, y: Tensor | None = None) -> None:
        super().__init__(plan, x, wire)
        self._ranks = plan.ranks
        self._y = fresh(tuple(x.shape), x.dtype) if y is None else y
        self._from, self._to = (flat(tensor) for tensor in (x, self._y))
        self._part = cut(self._to, len(self._ranks))
        self.terms, self.sums = Loans(wire), Loans(wire)
        self._own = self._piece(self._to, wire.rank)
        for peer in self._peers:
            term = self.terms.ticket(peer, self._piece(self._from, peer))
            self.tickets[peer] = term + self.sums.ticket(peer, self._own)

    @property
    def _peers(self) -> list[int]:
        return [peer for peer in self._wire.peers if peer in self._ranks]

    def _piece(self, of: Tensor, rank: int) -> Tensor:
        """The part that a rank adds up; it may be empty."""
        start = self._ranks.index(rank) * self._part
        return of[start : start + self._part]

    def begin(self) -> None:
        self._own.copy_(self._piece(self._from, self._wire.rank))

    def ended(self, told: Mapping[int, Tensor]) -> Tensor:
        own, peers = self._own, self._peers
        self.leases.append(self._wire.lease(len(peers) * own.nbytes))
        slots = typed(self.leases[-1].tensor, (len(peers), len(own)), own.dtype)
        terms = dict(zip(peers, slots, strict=True)) | {self._wire.rank: own}
        for peer in peers:
            self.terms.take(peer, told[peer][:TICKET].numpy().data, terms[peer])

        def add() -> None:
            reduce_parts([terms[rank] for rank in self._ranks], own)

        self.terms.settle(add, opens=True)
        return self.shared(told)

    def shared(self, told: Mapping[int, Tensor]) -> Tensor:
        """The result, once all have made their parts of it."""
        for peer in self._peers:
            self.sums.take(peer, told[peer][TICKET:].numpy().data, self._piece(self._to, peer))
        self.sums.settle()
        return self._y


def flat(tensor: Tensor) -> Tensor:
    """The elements one after the other, complex ones as two numbers."""
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).view(-1)
