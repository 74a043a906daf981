"""Processes kept for a whole test run, which run one body after another over real sockets.

Starting a process and its connections takes far longer than most tests; here both are made once.
The members come from multiprocessing's forkserver, one thread of each obeys this process, and a
member ends when this process does or lets go of it. Ranks that stop answering are asked where they
are, and then the whole pool is ended and started again.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import importlib.util
import multiprocessing
import multiprocessing.connection
import os
import pickle
import queue
import signal
import sys
import threading
import time
import traceback
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from typing import Any

import torch
import torch.distributed as dist

from ..bootstrap.local import start_forkserver
from ..errors import Error, WeftError
from ..wire import default
from ..wire.base import Wire
from ..wire.process_group import TRANSPORTS, connect
from .outcome import Outcome, RankFailure, place

__all__ = ["on_pool"]

_START = 60.0  # seconds that new processes may take to answer
_ANSWER = 2.0  # seconds that a rank has to say where it is
_AFTERMATH = 5.0  # seconds that the other ranks have to notice a death


def on_pool(
    size: int,
    body: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    timeout: float,
    limit: float,
    transport: str = "tcp",
) -> list[Outcome]:
    """Run `body(wire, *args, **kwargs)` on processes of the pool; what became of each rank."""
    global _pool
    with _lock:
        program = _Program.of(body, args, kwargs)
        if _pool is not None and not _pool.lives():
            _stop()
        if _pool is None:
            _pool = _Pool()
        try:
            _pool.grow(size)
            outcomes = _pool.run(size, program, timeout, limit, transport)
        except BaseException:  # interrupted: what the members still say belongs to no later run
            _stop()
            raise
        if any(each.hangs or each.died for each in outcomes):
            _stop()
        return outcomes


@dataclass(frozen=True, slots=True)
class _Program:
    """A body and its arguments, in a form that another process can load.

    The body is found by its module's name, or file where that name cannot be imported (pytest
    gives test modules such names), and its place in there; `layers` decorators are taken off.
    The environment and the filters of warnings go along, since tests set them.
    """

    module: str
    file: str | None
    qualname: str
    layers: int
    arguments: bytes
    environment: dict[str, str]
    filters: list[Any]

    @classmethod
    def of(
        cls, body: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> _Program:
        module = sys.modules.get(body.__module__)
        found: Any = module
        for name in body.__qualname__.split("."):
            found = getattr(found, name, None)
        layers = 0
        while found is not body and hasattr(found, "__wrapped__"):
            found, layers = found.__wrapped__, layers + 1
        if found is not body or module is None:
            raise WeftError(
                f"{body.__qualname__} of {body.__module__} cannot be found by other processes: "
                "make it a function at the top of a module, or run it on threads"
            )
        try:
            arguments = pickle.dumps((tuple(args), dict(kwargs)))
        except Exception as reason:
            raise WeftError(
                f"the arguments of {body.__qualname__} cannot travel to other processes: {reason}; "
                "run it on threads, or make them in the body"
            ) from reason
        return cls(
            module.__name__,
            getattr(module, "__file__", None),
            body.__qualname__,
            layers,
            arguments,
            {**os.environ, "OMP_NUM_THREADS": "1"},
            list(warnings.filters),
        )

    def load(self) -> Callable[[Wire], Any]:
        """The body with its arguments, in the process that runs it."""
        found: Any = _import(self.module, self.file)
        for name in self.qualname.split("."):
            found = getattr(found, name)
        for _ in range(self.layers):
            found = found.__wrapped__
        args, kwargs = pickle.loads(self.arguments)
        body: Callable[..., Any] = found
        return lambda wire: body(wire, *args, **kwargs)


def _import(name: str, file: str | None) -> types.ModuleType:
    if name in sys.modules:
        return sys.modules[name]
    try:
        found = importlib.util.find_spec(name)
    except ModuleNotFoundError:  # of a parent
        found = None
    if found is not None and (file is None or found.origin == file):
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(name, file) if file else None
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(f"no module {name} and no file to load it from")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


# This process.

_Key = tuple[str, int, float]


@dataclass(frozen=True, slots=True)
class _Job:
    """What a member is told to run: a rank's program on the wire of that name."""

    wire: str
    rank: int
    size: int
    timeout: float
    transport: str
    program: _Program

    @property
    def key(self) -> _Key:
        """What wires are kept by."""
        return (self.transport, self.size, self.timeout)


class _Pool:
    """The members, in rank order: a run of `size` ranks uses the first `size`."""

    def __init__(self) -> None:
        self._store = dist.TCPStore(
            "127.0.0.1",
            0,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=_START),
        )
        self._members: list[_Member] = []
        self._generation: Counter[_Key] = Counter()

    def lives(self) -> bool:
        """Whether nobody died since the last run."""
        return all(member.process.is_alive() for member in self._members)

    def grow(self, size: int) -> None:
        """Start members until there are `size`."""
        new = [_Member.start(rank, self._store.port) for rank in range(len(self._members), size)]
        self._members += new  # first, so that they are ended whatever happens now
        deadline = time.monotonic() + _START
        for member in new:
            member.meet(max(0.0, deadline - time.monotonic()))

    def run(
        self, size: int, program: _Program, timeout: float, limit: float, transport: str
    ) -> list[Outcome]:
        """Run a program on the first `size` members."""
        key = (transport, size, timeout)
        name = f"{transport}-{size}-{timeout}-{self._generation[key]}"
        members = self._members[:size]
        for rank, member in enumerate(members):
            member.tell(_Job(name, rank, size, timeout, transport, program))
        outcomes, healthy = self._gather(members, limit)
        if not healthy:
            self._generation[key] += 1  # the next run connects anew
        return outcomes

    def _gather(self, members: Sequence[_Member], limit: float) -> tuple[list[Outcome], bool]:
        outcomes: dict[int, Outcome] = {}
        healthy = True
        waiting = {member.connection: member for member in members}
        deadline = time.monotonic() + limit
        last_words = False
        while waiting:
            remaining = max(0.0, deadline - time.monotonic())
            ready = multiprocessing.connection.wait(list(waiting), remaining)
            if not ready:
                if last_words:
                    break
                last_words, deadline = True, time.monotonic() + _ANSWER
                for member in waiting.values():
                    member.tell(None)  # where are you?
            for connection in ready:
                assert isinstance(connection, Connection)
                member = waiting[connection]
                try:
                    outcome, fine = pickle.loads(connection.recv_bytes())
                except (EOFError, ConnectionError):
                    outcome, fine = Outcome(member.rank, died=member.fate()), False
                    deadline = min(deadline, time.monotonic() + _AFTERMATH)
                outcomes[member.rank] = outcome
                healthy = healthy and fine
                del waiting[connection]
        for member in waiting.values():
            outcomes[member.rank] = Outcome(member.rank, hangs="it does not even say where")
        return [outcomes[rank] for rank in sorted(outcomes)], healthy

    def stop(self) -> None:
        """End the members: at once those that run something."""
        for member in self._members:
            member.connection.close()
        for member in self._members:
            member.end()


@dataclass(slots=True)
class _Member:
    """One process of the pool, as this process sees it."""

    rank: int
    process: ForkServerProcess
    connection: Connection

    @classmethod
    def start(cls, rank: int, port: int) -> _Member:
        context = multiprocessing.get_context("forkserver")
        here, there = context.Pipe()
        process = context.Process(
            target=_serve, args=(there, port), name=f"weft pool {rank}", daemon=True
        )
        with _no_main():
            start_forkserver(context)
            process.start()
        there.close()
        return cls(rank, process, here)

    def meet(self, seconds: float) -> None:
        """Wait until it is there and takes jobs."""
        try:
            if self.connection.poll(seconds):
                self.connection.recv_bytes()
                return
            why = f"has not started in {_START} s"
        except (EOFError, ConnectionError):
            why = self.fate()
        raise RankFailure(f"rank {self.rank} {why} (processes)")

    def tell(self, message: object) -> None:
        with contextlib.suppress(ConnectionError):  # its death is noticed when it is heard
            self.connection.send_bytes(pickle.dumps(message))

    def fate(self) -> str:
        """How its process ended."""
        self.process.join(_ANSWER)
        code = self.process.exitcode
        if code is None:
            return "closed its connection"
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"exited with status {code}"

    def end(self) -> None:
        self.process.join(_ANSWER)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.process.close()


@contextlib.contextmanager
def _no_main() -> Iterator[None]:
    """Keep multiprocessing from importing the caller's main script (pytest's, say) in a member."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


_pool: _Pool | None = None
_lock = threading.Lock()


@atexit.register
def _stop() -> None:
    global _pool
    pool, _pool = _pool, None
    if pool is not None:
        pool.stop()


# A member.


def _serve(connection: Connection, port: int) -> None:
    """What a process of the pool does: run what it is told to, until nobody tells it any more."""
    os.setsid()  # a Ctrl-C is for the process that runs the tests
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=_START))
    jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
    post = _Post(connection)
    threading.Thread(target=_obey, args=(connection, jobs, post), daemon=True).start()
    connection.send_bytes(b"here")
    wires: dict[_Key, tuple[str, Wire]] = {}
    while (job := jobs.get()) is not None:
        outcome, healthy = _run(job, store, wires)
        post.busy = False
        post.send(outcome, healthy)
    for _, wire in wires.values():
        wire.close()


class _Post:
    """The way back: one outcome for each job, from the rank itself or from whoever asked it.

    Attributes:
        job: what is to be answered, if anything is.
        busy: whether the rank still runs something, answered or not.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self.job: _Job | None = None
        self.busy = False

    def send(self, outcome: Outcome, healthy: bool) -> None:
        with self._lock:
            if self.job is None:
                return  # it was told where this rank hung, and takes no more
            self.job = None
            try:
                data = pickle.dumps((outcome, healthy))
                pickle.loads(data)
            except Exception as reason:
                data = pickle.dumps((_portable(outcome, reason), healthy))
            with contextlib.suppress(ConnectionError):  # nobody is there any more
                self._connection.send_bytes(data)


def _portable(outcome: Outcome, reason: Exception) -> Outcome:
    what = outcome.value if outcome.error is None else outcome.error
    text = f"{type(what).__name__} {what} cannot be pickled: {reason}"
    return replace(outcome, value=None, error=WeftError(text))


def _obey(connection: Connection, jobs: queue.SimpleQueue[_Job | None], post: _Post) -> None:
    """The thread that listens."""
    while True:
        try:
            message = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            if post.busy:
                os._exit(1)  # it runs something, and nobody wants to know how that ends
            jobs.put(None)
            return
        if message is not None:
            post.job, post.busy = message, True
            jobs.put(message)
        elif post.job is not None:
            where = place(threading.main_thread(), __file__)
            post.send(Outcome(post.job.rank, hangs=where), False)


def _run(job: _Job, store: dist.Store, wires: dict[_Key, tuple[str, Wire]]) -> tuple[Outcome, bool]:
    """Run one rank's program; what became of it, and whether its wire can be used again."""
    key = job.key
    name, wire = wires.pop(key, ("", None))
    try:
        if wire is not None and name != job.wire:
            wire.close()
            wire = None
        if wire is None:
            way = TRANSPORTS[job.transport]
            wire = connect(store, job.rank, job.size, job.timeout, name=job.wire, transport=way)
        wires[key] = (job.wire, wire)
        with warnings.catch_warnings():
            warnings.filters[:] = job.program.filters  # type: ignore[index]  # typed as a Sequence
            if os.environ != job.program.environment:
                os.environ.clear()
                os.environ.update(job.program.environment)
            body = job.program.load()
            default.set(wire)
            try:
                value = body(wire)
            finally:
                default.clear("the body has ended")
        return Outcome(job.rank, value), _usable(wire)
    except BaseException as error:
        if wire is not None:
            wire.abort(f"{type(error).__name__}: {error}")
        return Outcome(job.rank, error=error, trace=_trace(error)), False


def _trace(error: BaseException) -> str:
    """The traceback as text, without the frames of this file that lead to the body."""
    at = error.__traceback__
    while at is not None and at.tb_next is not None and at.tb_frame.f_code.co_filename == __file__:
        at = at.tb_next
    return "".join(traceback.format_exception(error.with_traceback(at)))


def _usable(wire: Wire) -> bool:
    try:
        wire.post().wait()
    except Error:
        return False
    return True
