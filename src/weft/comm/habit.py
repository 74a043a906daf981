"""Habits: what ranks say in a call that they made before just so is only compared.

An iteration of a training loop makes the calls of the one before, of tensors of the same shapes.
From the third such call on, what a rank says is put together already, but for the values, and so is
what it expects to hear. If it does hear that, what follows is known; else the statements are read,
as ever. What is said is what would be said without, so a rank needs no habit that others have.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..agree import concluded, is_direct, opening_of, rooms
from ..kernels.cpu_talk import Came, Program
from ..wire.base import Wire
from ..wire.routine import NUMBER, Script
from .opening import Opening, following

if TYPE_CHECKING:
    from .delivery import Delivery

__all__ = ["Habit", "known", "learn"]

_MANY = 64  # habits of one wire that are kept

Told = Mapping[int, tuple[bytes, int]]
"""What is said to each peer, or by it: what is always the same, and bytes of what follows."""


class Habit:
    """One call, as all ranks are used to make it.

    Attributes:
        records: as `Opening.records`.
        told: the bytes that are the same each time, by peer, of what this rank says.
        heard: the same of what the peers say.
        tails: what followed these (uint8, 1-D), by peer; valid until the next call.
        delivery: of an `all_to_all`, what becomes of them.
    """

    delivery: Delivery

    def __init__(self, wire: Wire, name: str, said: Opening, told: Told, heard: Told) -> None:
        self.records = said.records
        self.told = {peer: always for peer, (always, _) in told.items()}
        self.heard = {peer: always for peer, (always, _) in heard.items()}
        self.tails: dict[int, Tensor] = {}
        self._name = name
        self._steps = False

        def head(rank: int, always: bytes, tail: int) -> bytes:
            body = bytes(said.bodies[rank])
            private = len(always) + tail
            opening = opening_of(said.fingerprints[rank], rank, body, len(body), private)
            return b"".join([opening, bytes(-len(body) % 16), always])

        self._mine = head(wire.rank, b"", 0)
        expects = {peer: head(peer, *heard[peer]) for peer in wire.peers}
        lengths = {peer: len(expected) + heard[peer][1] for peer, expected in expects.items()}
        says = {peer: head(wire.rank, *told[peer]) for peer in wire.peers}
        messages = {peer: each + bytes(told[peer][1]) for peer, each in says.items()}
        self._routine = wire.routine(Script(messages, expects, lengths, rooms(wire)))
        self._tails = {peer: self._routine.said[peer][len(each) :] for peer, each in says.items()}
        for peer, expected in expects.items():
            self.tails[peer] = self._routine.heard[peer][
                NUMBER + len(expected) : NUMBER + lengths[peer]
            ]

    def follow(self, program: Program) -> None:
        """Carry out these steps with every `exchange`, where there is machine code for the wire."""
        self._routine.follow(program)
        self._steps = True

    def exchange(
        self,
        tails: Mapping[int, bytes | memoryview],
        meanwhile: Callable[[], object] = lambda: None,
        x: int = 0,
    ) -> Came:
        """Say what is expected and hear the others; collective.

        Args:
            tails: by peer, what follows what is always the same.
            meanwhile: work to do while the statements are under way, if there are no steps.
            x: the address of the tensor that steps are about.

        Returns:
            ALL: all is as expected, and all steps were carried out. UNREAD: all is as expected,
            but there are no steps, or not all of them were. OTHER: `news` has what followed.

        Raises:
            WireError: a peer or a link failed.
        """
        routine, wire = self._routine, self._routine.wire
        wire.sequence += 1
        for peer, place in self._tails.items():
            place[:] = tails[peer]
        came = routine.run(wire.sequence, (x, 0, 0), None if self._steps else meanwhile)
        if came is None:
            routine.start(wire.sequence)
            meanwhile()
            came = Came.UNREAD if routine.finish() else Came.OTHER
        return Came.UNREAD if came is Came.ALL and not self._steps else came

    def news(self) -> Opening:
        """What follows from what was heard instead of what was expected.

        Raises:
            WeftError: somebody's arguments are wrong, or do not go with the others'.
        """
        wire, heard = self._routine.wire, self._routine.heard
        number = wire.sequence.to_bytes(8, "little")
        mine = torch.frombuffer(bytearray(number + self._mine), dtype=torch.uint8)
        said = [mine if rank == wire.rank else heard[rank] for rank in range(wire.size)]
        return following(wire, self._name, concluded(wire, said))


def known(wire: Wire) -> dict[Hashable, Habit | None]:
    """The calls that were made on a wire before, by what they were made with."""
    found: dict[Hashable, Habit | None] = wire.kept.setdefault("calls", {})
    return found


def learn(
    wire: Wire, key: Hashable, name: str, said: Opening, told: Told, heard: Told
) -> Habit | None:
    """Remember a call; the second time it becomes a habit.

    Args:
        wire: among whom.
        key: what this rank brought, but for the values.
        name: of the call.
        said: what all said; inside of `opened`.
        told: what this rank said to each peer.
        heard: what each peer said to this rank.

    Returns:
        What it became, if it did.
    """
    if wire.size == 1 or not is_direct(wire):
        return None
    habits = known(wire)
    if key in habits:
        habits[key] = habit = Habit(wire, name, said, told, heard)
        return habit
    if len(habits) >= _MANY:
        habits.clear()
    habits[key] = None
    return None
