"""Messages through MPI, by mpi4py, for the wire over a process group (`torchdist`).

Best where MPI knows a faster way between ranks than TCP: a fabric between hosts. Only `Isend`,
`Irecv` and `Testsome` are used, on one duplicate of `COMM_WORLD`: no call of MPI's blocks. One
thread looks what is through, and sleeps in between instead of burning a core. Groups are told apart
by tags: each rank gives every wire of its own two numbers, from its `context` on, which are the
tags of what peers send to it there. MPI matches by receiver, sender and tag, so nobody has to agree
on anything, and making a group is no collective of MPI's.

Source: MPI: A Message-Passing Interface Standard, version 3.1, chapters 3 and 12.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.util import Finalize
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ..errors import WeftError, WireError
from .store import told
from .torchdist import Links

_YIELDS = 30  # looks with nothing but a yield between them, before a wait sleeps
_NAP = (2e-5, 5e-4)  # seconds of the shortest sleep of a wait, and of the longest at its start
_LONG_NAP = 5e-3  # seconds of the longest sleep of a wait that has lasted for seconds
_TEXT = 4096  # bytes of what `World.broadcast` carries


@dataclass(frozen=True, slots=True)
class World:
    """MPI, started in this process.

    Attributes:
        mpi: the module `mpi4py.MPI`.
        comm: weft's own duplicate of `COMM_WORLD`.
        rank, size: this rank and how many there are.
        contexts: numbers for the wires of this rank, of which each has two.
        limit: the first number that does not fit into a tag.
        process: the one that MPI was started in.
    """

    mpi: Any
    comm: Any
    rank: int
    size: int
    contexts: itertools.count[int]
    limit: int
    process: int

    def broadcast(self, text: str, timeout: float) -> str:
        """What rank 0 says, on every rank; collective.

        Raises:
            WireError: it did not come within `timeout` seconds.
        """
        buffer = bytearray(text.encode().ljust(_TEXT))
        with _turn:
            request = self.comm.Ibcast([buffer, self.mpi.BYTE], 0)
        _await(request, timeout, self.rank, "rank 0 did not say where the ranks meet")
        return bytes(buffer).decode().strip()


_turn = threading.RLock()  # of whoever calls MPI: its thread level may be only SERIALIZED
_world: World | None = None
_patience = math.inf  # seconds that the end of MPI waits for all ranks


def start(timeout: float) -> World:
    """Start MPI, unless it runs already; collective among all processes of `mpirun`.

    If it is started here, it ends when the process does, once all ranks have come that far.

    Raises:
        WeftError: mpi4py or an MPI library is missing, or it serves only one thread.
        WireError: not all ranks came within `timeout` seconds.
    """
    global _world
    with _turn:
        if _world is not None:
            if _world.process != os.getpid():
                raise WeftError(
                    "MPI runs in this process's parent and cannot be used after a fork: start "
                    "processes with the method 'spawn', or let only the parent communicate"
                )
            return _world
        mpi = load()
        if not mpi.Is_initialized():
            mpi.Init_thread(mpi.THREAD_MULTIPLE)
            Finalize(None, _finalize, exitpriority=-1)  # after the wires
        if mpi.Is_finalized():
            raise WeftError("MPI has ended in this process and cannot start again: start it anew")
        if mpi.Query_thread() < mpi.THREAD_SERIALIZED:
            raise WeftError(
                "this MPI serves one thread only, and weft's has several: start it with "
                "MPI_THREAD_MULTIPLE (mpi4py.rc.thread_level), or let weft.init() start it"
            )
        comm, request = mpi.COMM_WORLD.Idup()
    rank, size = mpi.COMM_WORLD.rank, mpi.COMM_WORLD.size
    _await(request, timeout, rank, f"the {size} ranks did not all start MPI")
    top = comm.Get_attr(mpi.TAG_UB) or 32767  # what the standard promises
    _world = World(mpi, comm, rank, size, itertools.count(0, 2), top + 1, os.getpid())
    return _world


def load() -> Any:
    """The module mpi4py.MPI; importing it must not start MPI, nor promise to end it."""
    try:
        rc: Any = importlib.import_module("mpi4py").rc
        before = rc.initialize, rc.finalize
        rc.initialize = rc.finalize = False
        try:
            return importlib.import_module("mpi4py.MPI")
        finally:
            rc.initialize, rc.finalize = before
    except ModuleNotFoundError as error:
        raise WeftError(
            "backend 'mpi' needs mpi4py, which is not installed: pip install weft[mpi]"
        ) from error
    except (ImportError, RuntimeError) as error:  # mpi4py finds its library when it is imported
        raise WeftError(
            f"mpi4py finds no MPI library ({error}): pip install weft[mpi] brings Open MPI, or "
            "install the cluster's and name it in MPI4PY_LIBMPI"
        ) from error


def _finalize() -> None:
    """End MPI with the process. MPI waits for all ranks; weft does it first, asleep."""
    world = _world
    if world is None or world.mpi.Is_finalized():
        return
    with _turn:
        request = world.mpi.COMM_WORLD.Ibarrier()
    if _came(request, _patience):  # a rank that died does not, and MPI would wait for it
        with _turn:
            world.mpi.Finalize()


def _came(request: Any, patience: float) -> bool:
    """Whether a request is through within so many seconds, which are slept away."""
    until, nap = time.monotonic() + patience, _Nap()
    while True:
        with _turn:
            if request.Test():
                return True
        if time.monotonic() > until:
            return False
        time.sleep(nap.seconds())


def _await(request: Any, timeout: float, rank: int, missing: str) -> None:
    if not _came(request, timeout):
        raise WireError(
            f"rank {rank}: {missing} within {timeout:g} s: see that mpirun started all of them",
            rank=rank,
        )


class _Nap:
    """The pauses of one wait: yields, then sleeps in proportion to how long it has lasted.

    Short ones first, since messages move only while somebody looks; a wait for a rank that is late
    by seconds costs next to nothing.
    """

    def __init__(self) -> None:
        self._looks = 0
        self._began = time.monotonic()

    def seconds(self) -> float:
        """How long the next one is."""
        self._looks += 1
        if self._looks <= _YIELDS:
            return 0.0
        waited = time.monotonic() - self._began
        return min(max(waited / 8, _NAP[0]), _NAP[1] + waited / 400, _LONG_NAP)


class _Request:
    """A message under way, with the `wait` of a torch Work."""

    def __init__(self, request: Any, buffer: Any) -> None:
        self.request, self._buffer = request, buffer  # MPI knows of that as long as it is under way
        self.through = threading.Event()
        self.error: Exception | None = None

    def wait(self, timeout: timedelta) -> None:
        """Wait until it is through.

        Raises:
            RuntimeError: from MPI.
        """
        self.through.wait(timeout.total_seconds())
        if self.error is not None:
            raise RuntimeError(str(self.error)) from self.error


class _Looker:
    """The thread that looks what is through: MPI moves messages only while somebody calls it."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._posted: list[_Request] = []
        self._stir = threading.Event()
        threading.Thread(target=self._look, name="weft mpi", daemon=True).start()

    def post(self, begin: Callable[[], Any], buffer: Any) -> _Request:
        """Begin a message."""
        with _turn:
            posted = _Request(begin(), buffer)
            self._posted.append(posted)
        self._stir.set()
        return posted

    def _look(self) -> None:
        nap = _Nap()
        while not self._world.mpi.Is_finalized():
            with _turn:
                through = self._through()
            if through or self._stir.is_set():
                nap = _Nap()
            self._stir.clear()
            for each in through:
                each.through.set()
            del through
            self._stir.wait(nap.seconds() if self._posted else None)

    def _through(self) -> list[_Request]:
        """What is through since the last look; with the turn."""
        try:
            found = self._world.mpi.Request.Testsome([each.request for each in self._posted]) or ()
        except Exception as error:  # mpi4py's, of whatever went wrong in MPI
            found = range(len(self._posted))
            for each in self._posted:
                each.error = error
        through = [self._posted[at] for at in found]
        self._posted = [each for each in self._posted if each not in through]
        return through


class _Messages:
    """The `send` and `recv` of a process group, through MPI."""

    def __init__(self, world: World, context: int, peers: Sequence[Sequence[int]]) -> None:
        """`peers`: of each its rank in the world, and its context."""
        self._world, self._context, self._peers = world, context, peers
        self._looker = _looker(world.process)

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> _Request:
        """As a ProcessGroup's, of one uint8 tensor, with a tag of 0 or 1."""
        target, context = self._peers[peer]
        comm, buffer = self._world.comm, [tensors[0].numpy(), self._world.mpi.BYTE]
        return self._looker.post(lambda: comm.Isend(buffer, target, context + tag), buffer)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> _Request:
        """As a ProcessGroup's, of one uint8 tensor."""
        source, _ = self._peers[peer]
        comm, buffer = self._world.comm, [tensors[0].numpy(), self._world.mpi.BYTE]
        return self._looker.post(lambda: comm.Irecv(buffer, source, self._context + tag), buffer)


@functools.cache
def _looker(process: int) -> _Looker:
    """The one thread of a process."""
    assert _world is not None and process == os.getpid()
    return _Looker(_world)


class MpiLinks(Links):
    """What joins one rank to all others through MPI."""

    def __init__(self, group: _Messages, rank: int, size: int, timeout: float) -> None:
        super().__init__(group, rank, size)
        self._timeout = timeout

    def cut(self) -> None:
        """End all waits; that of the end of MPI, too, has a deadline from now on."""
        global _patience
        super().cut()
        _patience = self._timeout


def join(store: dist.Store, rank: int, size: int, timeout: float) -> MpiLinks:
    """Join the ranks that meet at a store; collective. For `process_group.connect`.

    Raises:
        RuntimeError: from the store.
        WeftError: MPI cannot be had, or this process has had more wires than tags can tell apart.
    """
    deadline = time.monotonic() + timeout
    world = start(timeout)
    context = next(world.contexts)
    if context + 1 >= world.limit:
        raise WeftError(
            f"rank {rank}: this MPI's tags tell {world.limit // 2} wires apart, and there were as "
            "many: make fewer groups"
        )
    missing, left = "came, and then did not say its number in MPI", deadline - time.monotonic()
    places = told(store, "mpi", [world.rank, context], rank, size, left, missing)
    numbers = [number for number, _ in places]
    if len(set(numbers)) != size:  # mpi4py of another MPI than mpirun's, or no mpirun
        raise WeftError(
            f"the {size} ranks have the numbers {numbers} in MPI, which does not see that they "
            "belong together: start them with the mpirun of the MPI that mpi4py finds"
        )
    return MpiLinks(_Messages(world, context, places), rank, size, timeout)
