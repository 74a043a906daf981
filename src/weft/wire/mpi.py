"""The wire over MPI: the messages of the process-group wire, moved by mpi4py.

Here is what moves messages (`MpiMover`) and what joins ranks (`join`); all else, the waits, the
deadlines, the watcher that names culprits, is the process-group wire's. Best where MPI knows a
faster way between ranks than TCP: shared memory on one host, a fabric between hosts.

Only `Isend`, `Irecv`, `Test` and `Cancel` are used, on one duplicate of `COMM_WORLD`: no call of
MPI's blocks, so a wait sleeps between two looks instead of burning a core, and a deadline is a
deadline. Groups are told apart by tags: each rank gives every wire of its own a number, its
`context`, and peers that send to it there put that number into the tag. MPI matches by receiver,
sender and tag, so nobody has to agree on anything, and making a group is no collective of MPI's.

Source: MPI: A Message-Passing Interface Standard, version 3.1, chapters 3 and 12.
"""

from __future__ import annotations

import atexit
import importlib
import itertools
import json
import math
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ..errors import WeftError, WireError
from .interface import own_address
from .joined import Joined
from .mesh import Door, Listener
from .mover import Lost, Message

__all__ = ["MpiConnections", "MpiMover", "World", "join", "load", "start"]

_CHANNELS = 4096  # what a tag has for the channel; the rest of it is the context
_SMALL = _CHANNELS - 1  # the channel of the lane of small messages
_HIGH = _CHANNELS - 64  # channels from here on are powers of two, by their exponent
_BLOCK = 1 << 30  # bytes above which a message is described to MPI in blocks of so many
_TICK = 0.004  # seconds between two looks of the thread
_GRACE = 0.25  # seconds in which what a rank sent before it left may still come in
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
        contexts: numbers for the wires of this rank, each once.
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
_made: weakref.WeakSet[MpiConnections] = weakref.WeakSet()
_abandoned: list[_Order] = []  # messages that MPI may still write to or read from
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
            atexit.register(_finalize)
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
    limit = (top + 1) // _CHANNELS
    _world = World(mpi, comm, rank, size, itertools.count(), limit, os.getpid())
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
    if world is None or world.process != os.getpid() or world.mpi.Is_finalized():
        return
    for connections in list(_made):
        connections.close()
    with _turn:
        request = world.mpi.COMM_WORLD.Ibarrier()
    until, nap = time.monotonic() + _patience, _Nap()
    while not _tested(request):
        if time.monotonic() > until:
            return  # a rank that died does not come, and MPI would wait for it
        nap()
    world.mpi.Finalize()


def _tested(request: Any) -> bool:
    with _turn:
        return bool(request.Test())


def _await(request: Any, timeout: float, rank: int, missing: str) -> None:
    until, nap = time.monotonic() + timeout, _Nap()
    while not _tested(request):
        if time.monotonic() > until:
            raise WireError(
                f"rank {rank}: {missing} within {timeout:g} s: see that mpirun started all of them",
                rank=rank,
            )
        nap()


class _Nap:
    """The pauses of one wait: yields, then sleeps in proportion to how long it has lasted.

    Short ones first, since messages move only while somebody looks; a wait for a rank that is late
    by seconds costs next to nothing.
    """

    def __init__(self) -> None:
        self._looks = 0
        self._began = time.monotonic()

    def __call__(self) -> None:
        self._looks += 1
        if self._looks <= _YIELDS:
            time.sleep(0)
            return
        waited = time.monotonic() - self._began
        time.sleep(min(max(waited / 8, _NAP[0]), _NAP[1] + waited / 400, _LONG_NAP))


@dataclass(slots=True, eq=False)
class _Order:
    """One message under way; the buffer must live as long as MPI knows of it."""

    request: Any
    buffer: memoryview
    peer: int
    receives: bool
    kind: Any  # a datatype of MPI's that was made for this message, or None
    done: bool = False
    error: str = ""

    def test(self) -> bool:
        """Whether it is through; with the turn."""
        if self.done:
            return True
        try:
            self.done = bool(self.request.Test())
        except Exception as error:  # mpi4py's, of whatever went wrong in MPI
            self.done, self.error = True, str(error)
        if self.done and self.kind is not None:
            self.kind.Free()
            self.kind = None
        return self.done


class MpiMover:
    """Moves the messages of one wire; the face of `mover.Mover`, the bytes through MPI.

    Attributes:
        lines, small: by peer, its rank in the world and its context, for either lane.
        context: this rank's own.
    """

    def __init__(
        self,
        world: World,
        context: int,
        peers: Mapping[int, tuple[int, int]],
        left: Callable[[], Set[int]],
    ) -> None:
        """
        Args:
            world: MPI.
            context: this rank's own number for the wire.
            peers: of each peer its rank in the world, and its context.
            left: says which peers said bye.
        """
        self.lines = dict(peers)
        self.small = dict(peers)
        self.context = context
        self._world, self._left = world, left
        self._under_way: dict[int, _Order] = {}
        self._ended = ""  # why nothing moves any more
        self._thread: threading.Thread | None = None
        self._stir = threading.Event()
        self._process = os.getpid()

    def lends(self, peer: int) -> bool:
        """False: MPI has ways of its own within a host."""
        return False

    def read(self, peer: int, address: int, into: memoryview) -> bool:
        """False: nothing is lent."""
        return False

    def post(
        self,
        lines: Mapping[int, tuple[int, int]],
        sends: Sequence[Message],
        recvs: Sequence[Message],
        at: int,
    ) -> list[_Order]:
        """Start sending messages and receiving others, on channel `at` of a lane.

        Returns:
            What `finish` wants, receives first.

        Raises:
            WeftError: the channel does not fit into a tag.
        """
        channel = _SMALL if lines is self.small else _channel(at)
        orders: list[_Order] = []
        with _turn:
            if self._ended:  # between the wire's look at the watcher and here
                return [_Order(None, m, p, False, None, True, self._ended) for p, m, _ in recvs]
            _sweep()
            comm = self._world.comm
            for peer, buffer, _ in recvs:
                source, _ = lines[peer]
                spec, kind = self._described(buffer)
                request = comm.Irecv(spec, source, self.context * _CHANNELS + channel)
                orders.append(_Order(request, buffer, peer, True, kind))
            for peer, message, _ in sends:
                target, context = lines[peer]
                spec, kind = self._described(message)
                request = comm.Isend(spec, target, context * _CHANNELS + channel)
                orders.append(_Order(request, message, peer, False, kind))
            self._under_way.update((id(order), order) for order in orders)
        if orders and lines is self.lines and not self._stir.is_set():
            self._rouse()
        return orders

    def _described(self, buffer: memoryview) -> tuple[list[Any], Any]:
        """A buffer as mpi4py takes it; MPI counts to 2^31, so a large one is counted in blocks."""
        byte = self._world.mpi.BYTE
        if buffer.nbytes <= _BLOCK:
            return [buffer, buffer.nbytes, byte], None
        blocks, rest = divmod(buffer.nbytes, _BLOCK)
        block = byte.Create_contiguous(_BLOCK)
        kind = self._world.mpi.Datatype.Create_struct(
            [blocks, rest], [0, blocks * _BLOCK], [block, byte]
        ).Commit()
        block.Free()
        return [buffer, 1, kind], kind

    def finish(self, orders: Iterable[_Order], limit: float, at: Callable[[int], None]) -> None:
        """Wait until all of these are through; other threads may wait for others meanwhile.

        Raises:
            Lost: a peer left, MPI refused a message, the wire was ended, or the limit passed.
        """
        until = time.monotonic() + limit
        for number, order in enumerate(orders):
            if not order.done:
                at(number)
                self._finish(order, until)
            with _turn:
                self._under_way.pop(id(order), None)
            if order.error:
                raise Lost(order.error)

    def over(self, orders: Sequence[_Order]) -> bool:
        """Whether `finish` has nothing to do: it forgets what is through, and says what failed."""
        return not orders

    def arrived(self, orders: Iterable[_Order]) -> list[bool]:
        """Which of these are through; `finish` looks at one after the other."""
        with _turn:
            return [order.test() for order in orders]

    def _finish(self, order: _Order, until: float) -> None:
        nap, gone = _Nap(), 0.0
        while True:
            with _turn:
                if order.test():
                    return
            now = time.monotonic()
            if self._ended:
                raise Lost(self._ended)
            if now > until:
                raise Lost("it did not come in time")
            if order.peer in self._left():
                gone = gone or now
                if now > gone + _GRACE:
                    raise Lost(f"rank {order.peer} left")
            nap()

    def _rouse(self) -> None:
        """Have the thread look in: MPI moves large messages only while somebody calls it."""
        self._stir.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._look_in, name="weft mpi", daemon=True)
            self._thread.start()

    def _look_in(self) -> None:
        while True:
            self._stir.wait()
            time.sleep(_TICK)
            with _turn:
                if self._ended:
                    return
                waiting = [order for order in self._under_way.values() if not order.test()]
                if not waiting:  # each was looked at: that is what moves them
                    self._stir.clear()

    def cut(self) -> None:
        """End all waits; any thread may call it."""
        self._ended = self._ended or "the wire is broken"

    def close(self) -> None:
        """Take back what has not come yet, which ends all waits. What was sent still arrives."""
        self._ended = self._ended or "the wire is closed"
        if os.getpid() != self._process:
            return  # MPI is the parent's
        with _turn:
            for order in self._under_way.values():
                if not order.test() and order.receives:
                    order.request.Cancel()
            _abandoned.extend(order for order in self._under_way.values() if not order.test())
            self._under_way.clear()
            self._stir.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()


def _channel(at: int) -> int:
    """A channel's place in a tag."""
    if 0 <= at < _HIGH:
        return at
    if at > 0 and at & (at - 1) == 0 and _HIGH + at.bit_length() < _SMALL:
        return _HIGH + at.bit_length()
    raise WeftError(
        f"channel {at} does not fit into a tag of MPI's: use one below {_HIGH}, or a power of two"
    )


def _sweep() -> None:
    """Let go of the messages of closed wires that are through; with the turn."""
    if _abandoned:
        _abandoned[:] = [order for order in _abandoned if not order.test()]


class MpiConnections(Joined):
    """What joins one rank to all others: MPI for messages, side sockets for the watcher."""

    def __init__(
        self,
        world: World,
        context: int,
        peers: Mapping[int, tuple[int, int]],
        side: Mapping[int, socket.socket],
        timeout: float,
    ) -> None:
        super().__init__(side)
        self.mover = MpiMover(world, context, peers, self._left)
        self._timeout = timeout
        _made.add(self)

    def _left(self) -> Set[int]:
        return self.watch.left.keys() if self.watch is not None else frozenset()

    def introduce(self, host: bytes) -> None:
        """Nothing: MPI knows by itself who is on its host."""

    def cut(self) -> None:
        """End all waits; that of the end of MPI, too, has a deadline from now on."""
        global _patience
        super().cut()
        _patience = self._timeout


def join(store: dist.Store, rank: int, size: int, timeout: float) -> MpiConnections:
    """Join the ranks that meet at a store; collective. For `process_group.connect`.

    Raises:
        RuntimeError: from the store.
        OSError: from the sockets.
        WeftError: MPI cannot be had, or this process has had more wires than tags can tell apart.
    """
    deadline = time.monotonic() + timeout
    world = start(timeout)
    context = next(world.contexts)
    if context >= world.limit:
        raise WeftError(
            f"rank {rank}: this MPI's tags tell {world.limit} wires apart, and there were as many: "
            "make fewer groups"
        )
    with Listener(own_address(store), size) as listener:
        own = listener.door
        here = [own.host, own.port, own.token.hex(), world.rank, context]
        store.set(f"{rank}", json.dumps(here))
        peers = [peer for peer in range(size) if peer != rank]
        left = max(deadline - time.monotonic(), 0.001)
        store.wait([f"{peer}" for peer in peers], timedelta(seconds=left))
        doors, places = {}, {}
        for peer in peers:
            host, port, token, number, its = json.loads(store.get(f"{peer}"))
            doors[peer] = Door(host, port, bytes.fromhex(token))
            places[peer] = (number, its)
        numbers = [places[peer][0] if peer != rank else world.rank for peer in range(size)]
        if len(set(numbers)) != size:  # mpi4py of another MPI than mpirun's, or no mpirun
            raise WeftError(
                f"the {size} ranks have the numbers {numbers} in MPI, which does not see that they "
                "belong together: start them with the mpirun of the MPI that mpi4py finds"
            )
        mesh = listener.mesh(rank, doors, ("side",), deadline)
    return MpiConnections(world, context, places, mesh.lanes["side"], timeout)


def _after_fork() -> None:
    """A child has no MPI: what is its parent's it must not touch."""
    for connections in list(_made):
        connections.cut()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
