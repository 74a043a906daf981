"""The wire over MPI, by mpi4py; how messages travel is told in `framed`.

Use it if MPI has a faster way between ranks than TCP, such as a fabric between hosts. Wires, and
the control links of groups, differ by tags: each rank gives each of them a number, its `context`,
and peers use it as the tag of messages to this rank. MPI matches by receiver, sender and tag. So
ranks need not agree on tags, and making a group is no collective of MPI.

Source: MPI: A Message-Passing Interface Standard, version 3.1, chapters 3 and 12.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from torch import Tensor

from ..base.errors import WeftError
from ..rendezvous.mpi import Request, World, start_mpi
from .factory import Start
from .framed import FramedWire
from .interface import Failure


class Messages:
    """What carries frames: `send` and `recv` of one uint8 tensor, as a process group has them."""

    def __init__(self, world: World, context: int, peers: Sequence[Sequence[int]]) -> None:
        """`peers`: of each its rank in the world, and its context."""
        self._world = world
        self._context = context
        self._peers = peers

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Request:
        target, context = self._peers[peer]
        return self._world.post(self, self._world.comm.Isend, tensors[0], target, context)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Request:
        source, _ = self._peers[peer]
        return self._world.post(self, self._world.comm.Irecv, tensors[0], source, self._context)

    def end_waits(self, peers: Sequence[int]) -> None:
        """See `Carrier`: those for all peers end."""
        self._world.end_waits(self)

    def abandon(self) -> None:
        """See `Carrier`: MPI does not tell of its connections."""


class MpiWire(FramedWire):
    """One rank's end of a group whose messages go through MPI."""

    def __init__(self, messages: Messages, rank: int, size: int, timeout: float) -> None:
        super().__init__(messages, rank, size)
        self._world = messages._world
        self._timeout = timeout
        self._is_closing = False

    def abort(self, failure: Failure) -> None:
        super().abort(failure)
        if not self._is_closing:
            self._world.patience = self._timeout  # not all ranks may come to the end of MPI

    def close(self) -> None:
        self._is_closing = True
        super().close()


def make(start: Start) -> MpiWire:
    """Make this rank's end of the wire; for the registry.

    Raises:
        WeftError: as `carrier`.
    """
    wire = MpiWire(carrier(start), start.rank, start.size, start.timeout)
    wire.start()
    return wire


def carrier(start: Start) -> Messages:
    """What carries the frames of a wire, or of control links, between these ranks; collective.

    Raises:
        WeftError: MPI cannot be had, or this process has had more groups than tags can tell apart.
    """
    world = start_mpi(start.timeout)
    context = _context(world, start.rank)
    own = json.dumps([world.rank, context]).encode()
    places = [json.loads(each) for each in start.exchange(own)]
    _check_places(places)
    return Messages(world, context, places)


def _check_places(places: list[list[int]]) -> None:
    """Raise WeftError, unless all ranks are in one world of MPI, each with a number of its own."""
    numbers = [number for number, _ in places]
    if len(set(numbers)) != len(numbers):  # mpi4py of another MPI than mpirun's, or no mpirun
        raise WeftError(
            f"the {len(numbers)} ranks have the numbers {numbers} in MPI, which does not see that "
            "they belong together: start them with the mpirun of the MPI that mpi4py finds"
        )


def _context(world: World, rank: int) -> int:
    """A number for what carries messages to this rank."""
    context = next(world.contexts)
    if context >= world.limit:
        raise WeftError(
            f"rank {rank}: this MPI's tags tell {world.limit // 2} groups apart, and there were as "
            "many: make fewer groups"
        )
    return context
