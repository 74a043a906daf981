"""Small messages, many at once: what `weft.wire.routine` says and hears them with.

The one thing here that is no arithmetic. It is here since machine code is made here: a few small
messages cost ten times as much in Python as in the system calls that move them, and so does
bringing what is in them to its place.

`talk_table` says what frames, tables, steps and records are.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .compile import Key, Loops, compiler
from .cpu_copy import spans
from .talk_table import (
    ADD,
    ARENA,
    COPY,
    FD,
    FRAME,
    GOT,
    GUARD,
    HERE,
    IN_X,
    IN_Y,
    IN_Z,
    INWARD,
    LIKE,
    MODEL,
    OUTWARD,
    PLACE,
    READ,
    RECORD,
    ROW,
    SEEN,
    SENT,
    SIZE,
    STEP,
    TELL,
    WANT,
    ZERO,
)

__all__ = [
    "HERE",
    "IN_X",
    "IN_Y",
    "IN_Z",
    "KEY",
    "Came",
    "Lender",
    "Path",
    "Place",
    "Program",
    "Steps",
    "Talk",
    "lender",
]

KEY: Key = ("talk",)
"""The one set of loops."""

_ADDED = (torch.float32, torch.float64, torch.int32, torch.int64)
_WORKS = sys.platform == "linux" and sys.byteorder == "little"  # whose numbers the loops know

Place = tuple[int, Tensor]
"""Where a view of a tensor lies: `HERE`, or of a model of a tensor that is given with each call, of
its shape, dtype and contiguous: `IN_X`, `IN_Y`, `IN_Z`."""

Path = tuple[int, int, int]
"""How a peer is reached: by a socket that does not block, and addresses of a pipe to it and of one
from it, whose bell the socket is then; 0: by the socket alone."""

Lender = NDArray[np.int64]
"""The record of a process whose memory may be read."""


class _Kept(bytearray):
    """The memory of a record, and what must not go before it."""

    holds: object = None


def lender(
    process: int,
    address: int,
    guard: bytes,
    arena: tuple[int, int, int, int] = (0, 0, 0, 0),
    holds: object = None,
) -> Lender:
    """The record of a process with a guard (16 bytes) at that address (`weft.wire.lent`).

    Args:
        process: its number.
        address: of the guard, there.
        guard: what is there.
        arena: its address there, its bytes, its address here, and that of the guard in it.
        holds: what keeps the arena here; as long as there is a record, it is held.
    """
    memory = _Kept(8 * RECORD)
    memory.holds = holds
    record = np.frombuffer(memory, np.int64)
    record[0], record[GUARD] = process, address
    record[GUARD + 1 : SEEN] = np.frombuffer(guard, np.int64)
    record[ARENA:RECORD] = arena
    return record


class Steps:
    """Boxes that are moved, each time alike, between tensors x, y, z and memory that stays."""

    def __init__(self) -> None:
        self._steps: list[list[int]] = []
        self._memory: list[object] = []  # whose addresses are in the steps
        self._ends: list[int] = []  # of what comes before, and of what comes meanwhile

    def copy(self, to: Place, source: Place) -> bool:
        """Move a box; False: no step does that."""
        return self._step(COPY, to, source)

    def zero(self, to: Place) -> bool:
        """Fill a box with zeros; False: no step does that."""
        return self._step(ZERO, to, to)

    def add(self, to: Place, source: Place) -> bool:
        """Add a box to another; False: no step does that."""
        dtype = source[1].dtype
        if dtype.is_complex:
            to, source = ((at, torch.view_as_real(view)) for at, view in (to, source))
            dtype = source[1].dtype
        return dtype in _ADDED and self._step(ADD + _ADDED.index(dtype), to, source)

    def tell(self, to: Tensor, source: Place) -> None:
        """Write into 8 bytes where something lies."""
        self._memory.append(to)
        where, at = self._at(source)
        self._steps.append([TELL, where, at, 0, 0, HERE, to.data_ptr(), 0, 0, 1, 1, 8, 0])

    def read(self, to: Place, ticket: Tensor, whose: Lender, behind: int = 0) -> bool:
        """Fill a box from another process, so many bytes behind where its ticket of 8 bytes says.

        If it cannot be read the steps end there. False: the box does not lie in one piece.
        """
        view = to[1]
        if not view.numel():
            return True
        self._memory += [ticket, whose]
        where, at = self._at(to)
        source = [READ, HERE, ticket.data_ptr(), behind, 0]
        count = view.numel() * view.element_size()
        self._steps.append([*source, where, at, 0, 0, 1, 1, count, int(whose.ctypes.data)])
        return view.is_contiguous()

    def then(self) -> None:
        """What follows is for later: once all was said, and the second time once all was heard."""
        self._ends.append(len(self._steps))

    def done(self) -> Program:
        """The steps, for `Talk.run`."""
        before, meanwhile = self._ends
        table = np.array(self._steps, np.int64).reshape(-1, STEP)
        counts = before, meanwhile - before, len(table) - meanwhile
        return Program(table, counts, self._memory)

    def _step(self, what: int, to: Place, source: Place) -> bool:
        if not to[1].numel():
            return True
        found = spans(to[1], source[1])
        if found is None:
            return False
        width, (rows, to_row, from_row), (planes, to_plane, from_plane) = found
        row = [what, *self._at(source), from_plane, from_row, *self._at(to), to_plane, to_row]
        each = source[1].element_size() if what >= ADD else 1
        self._steps.append([*row, planes, rows, width // each, 0])
        return True

    def _at(self, place: Place) -> tuple[int, int]:
        where, view = place
        if where == HERE:
            self._memory.append(view)
            return where, view.data_ptr()
        return where, int(view.storage_offset()) * view.element_size()


@dataclass(frozen=True, slots=True)
class Program:
    """Steps, made; how many come before anything is said, meanwhile, and after all was heard."""

    table: NDArray[np.int64]
    counts: tuple[int, int, int]
    memory: list[object]


_NO_STEPS = Program(np.zeros((0, STEP), np.int64), (0, 0, 0), [])


class Came(enum.Enum):
    """What came of a `Talk.run`."""

    ALL = enum.auto()
    """All frames are there, all are what is expected, and all steps were carried out."""
    OTHER = enum.auto()
    """Some are not, or not yet: the last steps were not carried out, and frames may not have been
    sent whole."""
    UNREAD = enum.auto()
    """All are, but a step could not read what a peer lent; those behind it were not carried out."""


class Talk:
    """Frames that are exchanged with some peers again and again, in the same memory.

    Attributes:
        frames: what to send to each, if anything; what it is numbered is written into it.
        places: where to receive from each that sends something; the length of one is that of the
            frame that is expected.
        bound: whether it was told how these are reached.
    """

    def __init__(
        self, frames: Sequence[bytearray], places: Sequence[memoryview], models: Sequence[bytes]
    ) -> None:
        """Prepare; the models are what frames are expected to begin with, but for their numbers."""
        self.frames, self.places, self.bound = frames, places, False
        self._table = np.zeros(ROW * len(frames) + 2, np.int64)
        self._rows = self._table[:-2].reshape(-1, ROW)
        self._address = self._table.ctypes.data
        self._memory = []  # whose addresses are in the table
        each = enumerate(zip(frames, places, models, strict=True))
        for number, (frame, place, model) in each:
            arrays = [
                np.frombuffer(memory or bytes(1), np.uint8) for memory in (frame, place, model)
            ]
            self._memory += arrays
            at = [array.ctypes.data for array in arrays]
            self._rows[number, [FRAME, PLACE, MODEL]] = at
            self._rows[number, [SIZE, WANT, LIKE]] = len(frame), len(place), len(model)
        self._loops: Loops = {}
        self._program, self._steps, self._counts = _NO_STEPS, 0, _NO_STEPS.counts

    def bind(self, paths: Sequence[Path]) -> bool:
        """Take these ways; False: there is no machine code to do it with."""
        self._loops = (compiler.loops(KEY) if _WORKS else None) or {}
        self._rows[:, [FD, OUTWARD, INWARD]] = np.array(paths, np.int64).reshape(-1, 3)
        self.bound = bool(self._loops)
        return self.bound

    def follow(self, program: Program) -> None:
        """Carry out these steps with every `run`."""
        self._program = program
        self._steps, self._counts = program.table.ctypes.data, program.counts

    def run(
        self,
        number: int,
        awake: int,
        at: tuple[int, int, int] = (0, 0, 0),
        meanwhile: Callable[[], object] | None = None,
    ) -> Came:
        """Say all frames, with this number, and look for the peers' for so many nanoseconds.

        Args:
            number: of the call.
            awake: that time.
            at: addresses of the tensors x, y and z that steps are about.
            meanwhile: what to do between the two.
        """
        talk, table, peers = self._loops["talk"], self._address, len(self.frames)
        rest = awake, self._steps, *self._counts, *at
        if meanwhile is None:
            other = talk(table, peers, number, 3, *rest)
        else:
            talk(table, peers, number, 1, *rest)
            meanwhile()
            other = talk(table, peers, number, 2, *rest)
        return Came.ALL if not other else Came.OTHER if other > 0 else Came.UNREAD

    def carry(self, stage: int, at: tuple[int, int, int]) -> Came:
        """Carry out the steps before anything is said (0), meanwhile (1), or after all (2)."""
        first, count = sum(self._counts[:stage]), self._counts[stage]
        left = self._loops["carry"](self._steps + 8 * STEP * first, count, *at)
        return Came.UNREAD if left else Came.ALL

    def came(self, peer: int, count: int) -> None:
        """So many bytes of what that peer says, by its row, lie in their place already."""
        self._rows[peer, GOT] = count

    def left(self) -> list[tuple[int, int]]:
        """Of each peer, after a `run` that was not as expected: bytes sent to it, and heard."""
        found = list(zip(self._rows[:, SENT].tolist(), self._rows[:, GOT].tolist(), strict=True))
        self._rows[:, GOT] = 0
        return found
