"""Processes kept for a whole test run, which run one body after another over real sockets.

Starting a process and its connections takes far longer than most tests; here both are made once.
The members come from multiprocessing's forkserver, one thread of each listens to this process, and
a member ends when this process does or lets go of it. Ranks that stop answering are asked where
they are, and then the whole pool is ended and started again.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import multiprocessing
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
from multiprocessing import connection as connections
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
from .pace import patient

_START = 60.0  # seconds that new processes may take to answer
_ANSWER = 2.0  # seconds that a rank has to say where it is
_AFTERMATH = 5.0  # seconds that the other ranks have to notice a death

_Key = tuple[str, int, float]  # what wires are kept by: transport, size, timeout


@dataclass(frozen=True, slots=True)
class _Job:
    """What a member is told to run, in a form that another process can load.

    The body is found by the file of its module, since pytest gives test modules names that cannot
    be imported, and its place in there; `layers` decorators are taken off. The environment and the
    filters of warnings go along, since tests set them.
    """

    wire: str
    rank: int
    key: _Key
    module: str
    file: str
    qualname: str
    layers: int
    arguments: bytes
    environment: dict[str, str]
    filters: list[Any]

    def load(self) -> Callable[[Wire], Any]:
        """The body with its arguments, in the process that runs it."""
        found: Any = _loaded(self.module, self.file)
        for name in self.qualname.split("."):
            found = getattr(found, name)
        for _ in range(self.layers):
            found = found.__wrapped__
        args, kwargs = pickle.loads(self.arguments)
        body: Callable[..., Any] = found
        return lambda wire: body(wire, *args, **kwargs)


def _loaded(name: str, file: str) -> types.ModuleType:
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(sys.modules[name])
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def _job(
    key: _Key, body: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> _Job:
    """What rank 0 is told to run on the first wire of that key."""
    module = sys.modules.get(body.__module__)
    file = getattr(module, "__file__", None)
    found: Any = module
    for name in body.__qualname__.split("."):
        found = getattr(found, name, None)
    layers = 0
    while found is not body and hasattr(found, "__wrapped__"):
        found, layers = found.__wrapped__, layers + 1
    if found is not body or file is None:
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
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    where = (body.__module__, file, body.__qualname__, layers)
    return _Job("", 0, key, *where, arguments, environment, list(warnings.filters))


# This process.


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
        job = _job((transport, size, timeout), body, args, kwargs)
        if _pool is not None and not all(member.process.is_alive() for member in _pool.members):
            _stop()
        _pool = _pool or _Pool()
        try:
            outcomes = _pool.run(size, job, limit)
        except BaseException:  # interrupted: what the members still say belongs to no later run
            _stop()
            raise
        if any(each.hangs or each.died for each in outcomes):
            _stop()
        return outcomes


class _Pool:
    """The members, in rank order: a run of some ranks uses the first ones."""

    def __init__(self) -> None:
        limit = timedelta(seconds=patient(_START))
        self._store = dist.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=limit
        )
        self.members: list[_Member] = []
        self._broken: Counter[_Key] = Counter()  # how many wires of a key were

    def run(self, size: int, job: _Job, limit: float) -> list[Outcome]:
        """Run a job on the first members, after starting those that there are not."""
        ranks = range(len(self.members), size)
        new = [_Member(rank, self._store.port) for rank in ranks]
        self.members += new  # first, so that they are ended whatever happens now
        deadline = time.monotonic() + patient(_START)
        for member in new:
            member.meet(max(0.0, deadline - time.monotonic()))
        wire = f"{job.key}-{self._broken[job.key]}"
        for member in self.members[:size]:
            member.tell(replace(job, wire=wire, rank=member.rank))
        outcomes, healthy = self._gather(self.members[:size], limit)
        if not healthy:
            self._broken[job.key] += 1  # the next run connects anew
        return outcomes

    def _gather(self, members: Sequence[_Member], limit: float) -> tuple[list[Outcome], bool]:
        outcomes = {
            each.rank: Outcome(each.rank, hangs="it does not even say where") for each in members
        }
        healthy, asked = True, False
        waiting = {member.connection: member for member in members}
        deadline = time.monotonic() + limit
        while waiting:
            ready = connections.wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready and asked:
                break
            if not ready:
                asked, deadline = True, time.monotonic() + patient(_ANSWER)
                for member in waiting.values():
                    member.tell(None)  # where are you?
            for connection in ready:
                member = waiting.pop(connection)  # type: ignore[call-overload]  # only these are
                try:
                    outcomes[member.rank], fine = member.connection.recv()
                except (EOFError, ConnectionError):
                    outcomes[member.rank], fine = Outcome(member.rank, died=member.fate()), False
                    deadline = min(deadline, time.monotonic() + patient(_AFTERMATH))
                healthy = healthy and fine
        return [outcomes[rank] for rank in sorted(outcomes)], healthy and not waiting


class _Member:
    """One process of the pool, as this process sees it."""

    def __init__(self, rank: int, port: int) -> None:
        self.rank = rank
        context = multiprocessing.get_context("forkserver")
        self.connection, there = context.Pipe()
        self.process: ForkServerProcess = context.Process(
            target=_serve, args=(there, port), name=f"weft pool {rank}", daemon=True
        )
        with _no_main():
            start_forkserver(context)
            self.process.start()
        there.close()

    def meet(self, seconds: float) -> None:
        """Wait until it is there and takes jobs."""
        try:
            if self.connection.poll(seconds):
                self.connection.recv()
                return
            why = "has not started in time"
        except (EOFError, ConnectionError):
            why = self.fate()
        raise RankFailure(f"rank {self.rank} {why} (processes)")

    def tell(self, message: _Job | None) -> None:
        with contextlib.suppress(ConnectionError):  # its death is noticed when it is heard
            self.connection.send(message)

    def fate(self) -> str:
        """How its process ended."""
        self.process.join(patient(_ANSWER))
        code = self.process.exitcode
        if code is None:
            return "closed its connection"
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"exited with status {code}"

    def end(self) -> None:
        self.process.join(patient(_ANSWER))
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
    """End the members: at once those that run something."""
    global _pool
    pool, _pool = _pool, None
    for member in pool.members if pool is not None else ():
        member.connection.close()
    for member in pool.members if pool is not None else ():
        member.end()


# A member.


def _serve(connection: Connection, port: int) -> None:
    """What a process of the pool does: run what it is told to, until nobody tells it any more."""
    os.setsid()  # a Ctrl-C is for the process that runs the tests
    torch.set_num_threads(1)
    limit = timedelta(seconds=patient(_START))
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=limit)
    listener = _Listener(connection)
    listener.say("here")
    wires: dict[_Key, tuple[str, Wire]] = {}
    while (job := listener.jobs.get()) is not None:
        outcome = _run(job, store, wires)
        listener.runs = None
        listener.answer(outcome, healthy=_is_usable(wires.get(job.key)))
    for _, wire in wires.values():
        wire.close()


class _Listener:
    """The thread that listens, and what it hears; a job is answered once, by whoever does first."""

    def __init__(self, connection: Connection) -> None:
        self.jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self.runs: _Job | None = None
        self._connection = connection
        self._lock = threading.Lock()
        threading.Thread(target=self._listen, daemon=True).start()

    def say(self, message: object) -> None:
        with self._lock, contextlib.suppress(ConnectionError):  # nobody is there any more
            self._connection.send(message)

    def answer(self, outcome: Outcome, *, healthy: bool) -> None:
        try:
            pickle.loads(pickle.dumps(outcome))
        except Exception as reason:
            what = outcome.value if outcome.error is None else outcome.error
            text = f"{type(what).__name__} {what} cannot be pickled: {reason}"
            outcome = replace(outcome, value=None, error=WeftError(text))
        self.say((outcome, healthy))

    def _listen(self) -> None:
        while True:
            try:
                job = self._connection.recv()
            except (EOFError, OSError):
                if self.runs is not None:
                    os._exit(1)  # nobody wants to know how that ends
                self.jobs.put(None)
                return
            if job is not None:
                self.runs = job
                self.jobs.put(job)
            elif self.runs is not None:  # this process ends afterwards: an answer more is no harm
                where = place(threading.main_thread(), __file__)
                self.answer(Outcome(self.runs.rank, hangs=where), healthy=False)


def _run(job: _Job, store: dist.Store, wires: dict[_Key, tuple[str, Wire]]) -> Outcome:
    """Run one rank's program; what became of it."""
    name, wire = wires.pop(job.key, ("", None))
    transport, size, timeout = job.key
    try:
        if wire is not None and name != job.wire:
            wire.close()
            wire = None
        if wire is None:
            way = TRANSPORTS[transport]
            wire = connect(store, job.rank, size, timeout, name=job.wire, transport=way)
        wires[job.key] = (job.wire, wire)
        with warnings.catch_warnings():
            warnings.filters[:] = job.filters  # type: ignore[index]  # typed as a Sequence
            if os.environ != job.environment:
                os.environ.clear()
                os.environ.update(job.environment)
            body = job.load()
            default.set(wire)
            try:
                return Outcome(job.rank, body(wire))
            finally:
                default.clear("the body has ended")
    except BaseException as error:
        if wire is not None:
            wire.abort(f"{type(error).__name__}: {error}")
        return Outcome(job.rank, error=error, trace=_trace(error))


def _trace(error: BaseException) -> str:
    """The traceback as text, without the frames of this file that lead to the body."""
    at = error.__traceback__
    while at is not None and at.tb_next is not None and at.tb_frame.f_code.co_filename == __file__:
        at = at.tb_next
    return "".join(traceback.format_exception(error.with_traceback(at)))


def _is_usable(kept: tuple[str, Wire] | None) -> bool:
    """Whether a wire can be used again: whoever raised has aborted it."""
    try:
        if kept is not None:
            kept[1].post().wait()
    except Error:
        return False
    return kept is not None
