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
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..agree import DIRECT, concluded, opening_of, rooms
from ..grid import Box, Shape
from ..kernels.cpu_talk import Came
from ..plan import Plan
from ..wire.base import Wire, as_bytes
from ..wire.memory import fresh
from ..wire.part import Part
from ..wire.routine import NUMBER, Routine, Script
from .across import TICKETS
from .carry import BITS
from .crossing import Crossing, crossing
from .opening import Opening, Statement
from .recipe import recipe

__all__ = ["Habit", "learn"]

_PRIVATE = 32 << 10
"""Bytes that may be told to one rank in the opening message; more is better moved where it lies."""

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
        tells: bytes that this rank tells each other one alone.
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
    tells: dict[int, int]
    private: dict[int, int]
    lends: bool
    _routine: Routine | None = None
    _for: Callable[[], Wire | None] = lambda: None  # the wire that the rest was made for
    _written: list[tuple[int, memoryview]] = field(default_factory=list)  # what is new each time
    _seen: dict[int, Tensor] = field(default_factory=dict)
    _boxes: dict[int, Tensor] = field(default_factory=dict)
    _made: bool = False  # whether machine code makes the result, which has this shape
    _shape: Shape | None = None
    _across: Crossing | None = None  # how, where tensors are lent

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
        routine, size = self._over(wire), self.sizes[wire.rank]
        number = self._numbered(wire)
        payload = ctypes.string_at(x.data_ptr(), size) if size else b""
        for peer, message in self._written:
            if size:
                message[:size] = payload
            if tickets is not None:
                message[-TICKETS:] = tickets[peer]
            elif self.takes is not None:
                _tell(x, self.takes.get(peer, ()), message[size + -size % 16 :])
        came = None
        if self.lends and not self._made:  # else its steps would be carried out, too
            came = routine.run(number, meanwhile=meanwhile)
        if came is None:
            routine.start(number)
            meanwhile()
            came = Came.ALL if routine.finish() else Came.OTHER
        return None if came is Came.ALL else self._news(wire, x, number)

    def at_once(self, wire: Wire, x: Tensor, nothing: Shape) -> Opening | Tensor | None:
        """`exchange`, and what follows from it, in one go; None: nothing was done.

        Args:
            wire: of the whole group.
            x: this rank's tensor: of the CPU, plain.
            nothing: the shape of the result where a rank has none.
        """
        routine, across = self._over(wire), self._across
        if not self._made:
            return None
        y = fresh(nothing if self._shape is None else self._shape, x.dtype)
        lease = wire.lease(across.workspace) if across is not None and across.workspace else None
        at = x.data_ptr(), y.data_ptr(), 0 if lease is None else lease.tensor.data_ptr()
        number = self._numbered(wire)
        came = routine.run(number, at)
        if came is None:
            wire.sequence -= len(self.ranks) == wire.size
            return None
        found = y if came is not Came.OTHER else self._news(wire, x, number)
        if across is not None and came is not Came.OTHER:
            found = self._closed(wire, across, came, x, y, at)
        if lease is not None:
            lease.release()
        return found

    def _closed(
        self,
        wire: Wire,
        across: Crossing,
        came: Came,
        x: Tensor,
        y: Tensor,
        at: tuple[int, int, int],
    ) -> Tensor:
        """The result, once what was lent has been read."""
        stage = 0
        while came is Came.ALL and stage < len(across.closes):
            stage += 1
            ends = across.closes[stage - 1]
            ran = ends.run(0, at)
            came = ran or Came.OTHER
            if ran is None:  # nothing was done: `go_on` looks at what is heard
                ends.start(0)
                ends.finish()
            elif ran is not Came.OTHER:
                wire.traffic.add(across.lent[stage - 1])
        if came is Came.ALL:
            return y
        bits = BITS.get(x.dtype, x.dtype)
        return across.go_on(stage, came, x.view(bits), y.view(bits), self._boxes).view(x.dtype)

    def _numbered(self, wire: Wire) -> int:
        """The number of the call that begins."""
        if len(self.ranks) < wire.size:
            return 1  # as a part of a wire counts, which is made for each call
        wire.sequence += 1
        return wire.sequence

    def _news(self, wire: Wire, x: Tensor, number: int) -> Opening:
        """What follows, since it is not what was expected."""
        me, ranks, routine = wire.rank, self.ranks, self._routine
        assert routine is not None
        size = self.sizes[me]
        payload = ctypes.string_at(x.data_ptr(), size) if size else b""
        part = wire if len(ranks) == wire.size else Part(wire, ranks)
        mine = number.to_bytes(8, "little") + self.heads[me] + payload
        own = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        said_by = [own if rank == me else routine.heard[rank] for rank in ranks]
        agreement = concluded(part, said_by)
        said: dict[int, Statement] = {}
        for body in agreement.said:
            said.update(Statement.unpack(body))
        return Opening.following(agreement, said, self.call, x.dtype)

    def _over(self, wire: Wire) -> Routine:
        """What says and hears all that on a wire."""
        routine = self._routine
        return routine if routine is not None and self._for() is wire else self._prepare(wire)

    def _prepare(self, wire: Wire) -> Routine:
        """Make what says and hears all that on a wire."""
        at, me = self.ranks.index(wire.rank), wire.rank
        peers = (*self.ranks[at + 1 :], *self.ranks[:at])
        common = self.takes is None and not self.lends

        def behind(source: int, told: int) -> int:
            """Bytes behind a head: a tensor, and what is told in private behind a gap."""
            size = self.sizes[source]
            return size if common else size + -size % 16 + told

        says = {
            peer: self.heads[peer] + bytes(behind(me, self.tells.get(peer, 0))) for peer in peers
        }
        lengths = {
            peer: len(self.expected[peer]) + behind(peer, self.private.get(peer, 0))
            for peer in peers
        }
        script = Script(says, self.expected, lengths, rooms(wire), common)
        self._routine = routine = wire.routine(script)
        self._written = [
            (peer, routine.said[peer][len(self.heads[peer]) :])
            for peer in peers[: 1 if common else None]
        ]
        self._seen = {}
        for peer in peers if self.eager else ():
            if peer in self.plan.have.shapes:
                shape, start = self.plan.have.shapes[peer], NUMBER + len(self.expected[peer])
                memory = routine.heard[peer][start : start + self.sizes[peer]]
                self._seen[peer] = memory.view(self.opening.dtype).view(shape)
        self._boxes = {}
        for peer, size in self.private.items():
            start = NUMBER + len(self.expected[peer]) + self.sizes[peer]
            start += -start % 16
            self._boxes[peer] = routine.heard[peer][start : start + size]
        self._made, self._across, self._shape = False, None, self.plan.local(me).result
        if self.lends:
            self._cross(wire, routine)
        elif self.eager or self.takes is not None:
            self._follow(routine, me)
        self._for = weakref.ref(wire)
        return routine

    def _follow(self, routine: Routine, me: int) -> None:
        """Have machine code do all of it, if it can."""
        size = self.sizes[me]
        told = {peer: message[size + -size % 16 :] for peer, message in self._written}
        heard = dict(self._boxes)
        for peer, tensor in self._seen.items():
            heard[peer] = as_bytes(tensor)
        found = recipe(
            self.plan,
            me,
            self.opening.dtype,
            [message for _, message in self._written if size],
            {peer: told[peer] for peer in self.takes or ()},
            {peer: memory.numpy().data for peer, memory in heard.items()},
            eager=self.eager,
        )
        if found is not None:
            routine.follow(found)
            self._made = True

    def _cross(self, wire: Wire, routine: Routine) -> None:
        """Have machine code read what others lend, if it can."""
        tickets = {
            peer: torch.frombuffer(message[-TICKETS:], dtype=torch.uint8)
            for peer, message in self._written
        }
        size = self.sizes[wire.rank]
        payloads = [message for _, message in self._written if size]
        found = crossing(self.plan, wire, self.opening.dtype, payloads, tickets, self._boxes)
        if found is not None:
            routine.follow(found.opens)
            self._made, self._across = True, found

    def tensors(self, wire: Wire, x: Tensor) -> dict[int, Tensor]:
        """The tensors of all that bring one, where they travelled in the opening."""
        return {**self._seen, wire.rank: x}

    @property
    def boxes(self) -> dict[int, Tensor]:
        """What was told to this rank in private, by rank."""
        return self._boxes


def _tell(x: Tensor, takes: Sequence[Box], place: memoryview) -> None:
    """Write boxes of a tensor one behind the other."""
    at = 0
    for take in takes:
        values = x[take.slices].contiguous()
        size = values.numel() * values.element_size()
        place[at : at + size] = ctypes.string_at(values.data_ptr(), size)
        at += size


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
        {rank: private[wire.rank, rank] for rank in others if (wire.rank, rank) in private},
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
