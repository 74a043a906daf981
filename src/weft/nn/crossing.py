"""What `across` does, as steps of machine code, for a habit that lends.

The steps go with the opening and with the bytes that end each loan, so a call is two or three
exchanges and next to no Python. Where something comes otherwise, above all where memory cannot be
read after all, `across` goes on from there: what was told and said is the same.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..grid import Box
from ..kernels.cpu_talk import IN_X, IN_Y, IN_Z, Came, Lender, Program, Steps
from ..plan import Plan
from ..wire.arithmetic import cut
from ..wire.base import Wire
from ..wire.loans import TICKET, closing
from ..wire.routine import Routine
from .across import Boxes, Sum, flat, in_parts
from .carry import BITS, order_of_addition
from .recipe import Making, model, written

__all__ = ["Crossing", "crossing"]

_PIECE = 256 << 10  # bytes that are read at once, if they are not read to where they belong
_ALIGNED = 64  # bytes, to a multiple of which each part of the workspace begins

Tickets = Mapping[int, Tensor]
"""By rank: what it is told, or tells, in private (uint8)."""


class Crossing(abc.ABC):
    """One rank's part in a plan.

    Attributes:
        opens: the steps that go with the opening.
        closes: how loans end, one after the other, each with its steps.
        lent: for each of these what was lent until then: (to whom, bytes).
        workspace: bytes that z must have.
    """

    opens: Program
    closes: tuple[Routine, ...]
    lent: tuple[list[tuple[int, int]], ...]

    def __init__(self, plan: Plan, wire: Wire, dtype: torch.dtype) -> None:
        self._plan, self._wire, self._dtype = plan, wire, dtype
        self.workspace = 0

    @abc.abstractmethod
    def make(self, payloads: Sequence[memoryview], tickets: Tickets, told: Tickets) -> None:
        """Make the steps.

        Args:
            payloads: where to write all of this rank's tensor.
            tickets: where to write what the others are told.
            told: where to find what they tell.

        Raises:
            NotInSteps: there is no step for something.
        """

    @abc.abstractmethod
    def go_on(self, stage: int, came: Came, x: Tensor, y: Tensor, told: Tickets) -> Tensor:
        """The result, where something came otherwise.

        Args:
            stage: in which exchange: 0 is the opening, and those of `closes` follow.
            came: what came of that.
            x: this rank's tensor.
            y: the result, as far as it was made.
            told: what the others told.
        """

    def _room(self, elements: int) -> Tensor:
        """A model of a part of the workspace."""
        size = self._dtype.itemsize
        start = self.workspace // size
        self.workspace += -(-elements * size // _ALIGNED) * _ALIGNED
        whole = torch.empty(start + elements, dtype=self._dtype, device="meta")
        return whole[start:]

    def _lender(self, peer: int) -> Lender:
        found = self._wire.lender(peer)
        if found is None:
            raise NotInSteps
        return found


class NotInSteps(Exception):
    """Something cannot be done in steps."""


def crossing(
    plan: Plan,
    wire: Wire,
    dtype: torch.dtype,
    payloads: Sequence[memoryview],
    tickets: Tickets,
    told: Tickets,
) -> Crossing | None:
    """The crossing of this rank, made; None if there is no step for something."""
    bits = BITS.get(dtype, dtype)
    shape = plan.have.shapes.get(wire.rank)
    kind = _Sum if shape is not None and in_parts(plan, model(shape, dtype)) else _Boxes
    found = kind(plan, wire, bits)
    try:
        found.make(payloads, tickets, told)
    except NotInSteps:
        return None
    return found


def _need(fine: bool) -> None:
    if not fine:
        raise NotInSteps


def _parts(room: Tensor, boxes: Sequence[Box]) -> list[tuple[Box, Tensor]]:
    """The boxes that lie in a room one behind the other."""
    at, found = 0, []
    for box in boxes:
        found.append((box, room[at : at + box.volume].view(box.shape)))
        at += box.volume
    return found


class _Boxes(Crossing):
    """As `across.Boxes`."""

    def make(self, payloads: Sequence[memoryview], tickets: Tickets, told: Tickets) -> None:
        plan, me, dtype = self._plan, self._wire.rank, self._dtype
        local, order = plan.local(me), order_of_addition(plan, me, dtype)
        x, steps = model(plan.have.shapes.get(me), dtype), Steps()
        _need(written(steps, payloads, x))
        sizes = {peer: sum(take.volume for take in takes) for peer, takes in local.sends.items()}
        self.lent = ([(peer, size * dtype.itemsize) for peer, size in sizes.items()],)
        for peer, takes in local.sends.items():
            views = [x[take.slices] for take in takes]
            if len(views) == 1 and views[0].is_contiguous():
                steps.tell(tickets[peer], (IN_X, views[0]))
                continue
            room = self._room(sizes[peer])
            for (_, place), view in zip(_parts(room, takes), views, strict=True):
                _need(steps.copy((IN_Z, place), (IN_X, view)))
            steps.tell(tickets[peer], (IN_Z, room))
        steps.then()
        if local.result is None:
            steps.then()
        else:
            first = local.own if order[:1] == [me] else []
            box = first[0][1] if first else local.recvs[order[0]][0] if order else None
            into = Making(steps, local, dtype, box)
            for take, put in first:
                into.write(put, (IN_X, x[take.slices]))
            steps.then()
            self._read_all(into, x, order, told)
            _need(into.fine)
        self.opens = steps.done()
        self.closes = (closing(self._wire, local.recvs, local.sends),)

    def _read_all(self, into: Making, x: Tensor, order: Sequence[int], told: Tickets) -> None:
        """Read what others lend, and write or add it where it belongs.

        It is brought there in pieces, as far as it can be, which are in the cache yet then.
        """
        me, size = self._wire.rank, self._dtype.itemsize
        local, piece = self._plan.local(me), _PIECE // size
        views = {rank: [into.y[put.slices] for put in puts] for rank, puts in local.recvs.items()}
        sizes = [
            min(view.numel(), piece) if view.is_contiguous() else view.numel()
            for each in views.values()
            for view in each
            if local.adds or not view.is_contiguous()
        ]
        slot = self._room(max(sizes, default=0))
        own_first = order[:1] == [me]
        if not local.adds:  # each in another order, so that not all read from one rank
            order = [rank for rank in (me, *self._wire.peers) if rank in order]
        for rank in order[own_first:]:
            if rank == me:
                for take, put in local.own:
                    into.write(put, (IN_X, x[take.slices]))
                continue
            ticket, lender, behind = told[rank][:TICKET], self._lender(rank), 0
            for view in views[rank]:
                adds = into.adds()
                if view.is_contiguous() and not adds:
                    _need(into.steps.read((IN_Y, view), ticket, lender, behind))
                    behind += view.numel() * size
                    continue
                parts = torch.split(view.view(-1), piece) if view.is_contiguous() else (view,)
                bring = into.steps.add if adds else into.steps.copy
                for part in parts:
                    place = IN_Z, slot[: part.numel()].view(part.shape)
                    _need(into.steps.read(place, ticket, lender, behind))
                    _need(bring((IN_Y, part), place))
                    behind += part.numel() * size

    def go_on(self, stage: int, came: Came, x: Tensor, y: Tensor, told: Tickets) -> Tensor:
        python = Boxes(self._plan, x, self._wire)
        if not stage:
            python.begin()
            y = python.ended(told)
        else:
            python.loans.took(self._plan.local(self._wire.rank).recvs)
            python.loans.heard(self.closes[0])
        for lease in python.leases:
            lease.release()
        return y


class _Sum(Crossing):
    """As `across.Sum`."""

    def make(self, payloads: Sequence[memoryview], tickets: Tickets, told: Tickets) -> None:
        plan, me, dtype = self._plan, self._wire.rank, self._dtype
        ranks, shape = plan.ranks, plan.have.shapes[me]
        peers = [peer for peer in self._wire.peers if peer in ranks]
        x, y = flat(model(shape, dtype)), flat(model(shape, dtype))
        part = cut(x, len(ranks))

        def piece(of: Tensor, rank: int) -> Tensor:
            start = ranks.index(rank) * part
            return of[start : start + part]

        own = IN_Y, piece(y, me)
        steps = Steps()
        _need(written(steps, payloads, x))
        for peer in peers:
            steps.tell(tickets[peer][:TICKET], (IN_X, piece(x, peer)))
            steps.tell(tickets[peer][TICKET:], own)
        steps.then()
        _need(steps.copy(own, (IN_X, piece(x, me))))
        steps.then()
        self._dtype = x.dtype
        terms = {peer: (IN_Z, self._room(own[1].numel())) for peer in peers} | {me: own}
        for peer in peers:
            _need(steps.read(terms[peer], told[peer][:TICKET], self._lender(peer)))
        total, *others = (terms[rank] for rank in ranks)
        for each in others[:-1]:
            _need(steps.add(total, each))
        if ranks[-1] == me:
            _need(steps.add(own, total))
        else:
            _need(steps.add(total, others[-1]))
            if ranks[0] != me:
                _need(steps.copy(own, total))
        self.opens = steps.done()

        shares = Steps()
        shares.then()
        shares.then()
        for peer in peers:
            place = IN_Y, piece(y, peer)
            _need(shares.read(place, told[peer][TICKET:], self._lender(peer)))
        self.closes = tuple(closing(self._wire, peers, peers) for _ in range(2))
        self.closes[0].follow(shares.done())
        size = x.element_size()
        self.lent = (
            [(peer, piece(x, peer).numel() * size) for peer in peers],
            [(peer, own[1].numel() * size) for peer in peers],
        )
        self._peers = peers

    def go_on(self, stage: int, came: Came, x: Tensor, y: Tensor, told: Tickets) -> Tensor:
        python = Sum(self._plan, x, self._wire, y)
        if not stage:
            python.begin()
            python.ended(told)
        elif stage == 1:
            if came is Came.OTHER:
                python.terms.took(self._peers)
                python.terms.heard(self.closes[0], opens=True)
            python.shared(told)
        else:
            python.sums.took(self._peers)
            python.sums.heard(self.closes[1])
        for lease in python.leases:
            lease.release()
        return y
