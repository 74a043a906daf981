"""A pool of processes that are kept for a whole test run, and run one body after the other.

Starting a process takes far longer than most tests, so it happens once; of groups those that were
used last are kept. The members of the pool are ranks, started by `bootstrap.local`. A thread of
each listens to this process; a member ends when this process ends, or closes the connection. If a
rank does not answer in time, it is asked for its stack. Then the whole pool is ended, and the next
run starts another.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import itertools
import os
import pickle
import queue
import signal
import sys
import threading
import time
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist

from ..base.errors import Error, WeftError
from ..base.pace import patient
from ..bootstrap.local import Rank, end, ends_with_launcher, pump, receive, send
from ..bootstrap.outcome import Outcome, place, results
from ..group.group import Group
from ..group.joining import connect
from ..rendezvous import places as rendezvous
from .pace import ANSWER, START
from .threads import outcome_on

_AFTERMATH = 5.0  # seconds that the other ranks have to notice that one died
_KEPT = 3  # groups

_Key = tuple[int, float]  # what groups are kept by: size, timeout


@dataclass(frozen=True, slots=True)
class _Job:
    """What a member runs, in a form that another process can load.

    A member finds the body by the file of its module and its qualified name, because pytest gives
    test modules names that cannot be imported. It unwraps the function `layers` times. The
    environment variables and the filters of warnings are sent along, because tests set them.
    """

    group: str
    kept: list[str]  # groups that this or a later job may have; a member closes its others before
    rank: int
    key: _Key
    module: str
    file: str
    qualname: str
    layers: int
    arguments: bytes
    environment: dict[str, str]
    filters: list[Any]

    def call(self, group: Group) -> Any:
        """Run the body with its arguments, in a member."""
        found: Any = load_module(self.module, self.file)
        for name in self.qualname.split("."):
            found = getattr(found, name)
        for _ in range(self.layers):
            found = found.__wrapped__
        args, kwargs = pickle.loads(self.arguments)
        return found(group, *args, **kwargs)


def load_module(name: str, file: str) -> types.ModuleType:
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
    """The job of rank 0; `run` fills in the groups, and makes the other ranks' jobs.

    Raises:
        WeftError: another process could not find the body, or its arguments cannot be pickled.
    """
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
    # a member has a main module of its own
    name = "__weft_main__" if body.__module__ == "__main__" else body.__module__
    where = (name, file, body.__qualname__, layers)
    return _Job("", [], 0, key, *where, arguments, environment, list(warnings.filters))


# This process.


def on_pool(
    key: _Key,
    body: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    limit: float,
) -> list[Outcome]:
    """Run `body(group, *args, **kwargs)` on processes of the pool; return each rank's outcome."""
    global _pool
    with _lock:
        job = _job(key, body, args, kwargs)
        if _pool is not None and not all(
            member.alive and member.process.is_alive() for member in _pool.members
        ):
            end_pool()
        _pool = _pool or _Pool()
        try:
            outcomes = _pool.run(key[0], job, limit)
        except BaseException:  # interrupted: later runs must not read the members' late answers
            end_pool()
            raise
        if any(each.hangs or each.died for each in outcomes):
            end_pool()
        return outcomes


class _Pool:
    """The members, in rank order. A run of `size` ranks uses the first `size` members."""

    def __init__(self) -> None:
        self._store = rendezvous.host(rendezvous.LOOPBACK)
        self.members: list[Rank] = []
        self._said: dict[int, Any] = {}  # answers by rank
        self._kept: dict[_Key, str] = {}  # names of groups, that of the one used last at the end
        self._numbers = itertools.count()  # of new groups

    def run(self, size: int, job: _Job, limit: float) -> list[Outcome]:
        """Run a job on the first `size` members; start those that are missing."""
        self._grow(size)
        members = self.members[:size]
        group = self._kept.pop(job.key, None) or f"{job.key}-{next(self._numbers)}"
        self._kept[job.key] = group
        if len(self._kept) > _KEPT:
            del self._kept[next(iter(self._kept))]
        kept = [*self._kept.values()]
        self._said.clear()
        for member in members:
            member.tell(replace(job, group=group, kept=kept, rank=member.number))
        if not self._hear(members, limit):
            left = [member for member in members if member.alive]
            if left == members:
                for member in left:
                    member.tell(None)  # asks for its stack
            self._hear(left, patient(ANSWER if left == members else _AFTERMATH))
        outcomes, healthy = [], True
        for member in members:
            told, fine = self._said.get(member.number, (None, False))
            healthy = healthy and fine
            silent = Outcome(member.number, hangs="gave no answer, not even where it is")
            outcomes.append(pickle.loads(told) if told else member.outcome or silent)
        if not healthy:
            del self._kept[job.key]  # the next run connects anew
        return outcomes

    def _grow(self, size: int) -> None:
        """Start the members that are missing, and wait until they are ready."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        body = pickle.dumps((_serve, (self._store.port,)))
        new = range(len(self.members), size)
        # multiprocessing would import the caller's main script (pytest's, say) in a member
        main = sys.modules["__main__"]
        sys.modules["__main__"] = types.ModuleType("__main__")
        try:
            for rank in new:
                self.members.append(Rank.start(rank, environment, "", body))
        finally:
            sys.modules["__main__"] = main
        members = self.members[new.start :]
        if not self._hear(members, patient(START)):
            late = "has not started in time"
            results([each.outcome or Outcome(each.number, hangs=late) for each in members], "pool")

    def _hear(self, members: Sequence[Rank], seconds: float) -> bool:
        """Wait until all of these have answered or one has died; return whether all have."""

        def have_answered() -> bool:
            return all(member.number in self._said for member in members)

        def is_enough() -> bool:
            return have_answered() or not all(member.alive for member in members)

        pump(members, self._said.__setitem__, time.monotonic() + seconds, is_enough)
        return have_answered()


_pool: _Pool | None = None
_lock = threading.Lock()


@atexit.register
def end_pool() -> None:
    """End the members: at once those that run something."""
    global _pool
    pool, _pool = _pool, None
    if pool is not None:
        for member in pool.members:
            member.connection.close()
        pump(pool.members, lambda rank, said: None, time.monotonic() + patient(ANSWER))
        end(pool.members, [(signal.SIGKILL, 10.0)])


# A member.


def _serve(port: int) -> None:
    """The program of a member: run the jobs that it receives, until the connection is closed."""
    store = rendezvous.connect(rendezvous.LOOPBACK, port, patient(START))
    jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
    runs: list[_Job] = []  # the job that it has not answered yet, if any

    def listen() -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                job = receive()
                if job is not None:
                    runs.append(job)
                    jobs.put(job)
                elif runs:  # the pool is ended afterwards, so a second answer does no harm
                    where = place(threading.main_thread())
                    _answer(Outcome(runs[0].rank, hangs=where), healthy=False)
        if runs:
            os._exit(1)  # nobody waits for its answer
        jobs.put(None)

    threading.Thread(target=listen, daemon=True).start()
    ends_with_launcher()
    send("here")
    groups: dict[str, Group] = {}
    while (job := jobs.get()) is not None:
        outcome = _run(job, store, groups)
        runs.clear()
        _answer(outcome, healthy=_is_usable(groups.get(job.group)))
    for group in groups.values():
        group.close()


def _answer(outcome: Outcome, *, healthy: bool) -> None:
    with contextlib.suppress(ConnectionError):  # nobody is there any more
        send((outcome.packed(), healthy))


def _run(job: _Job, store: dist.Store, groups: dict[str, Group]) -> Outcome:
    """Run one rank's program; return its outcome."""
    made = Outcome.of(job.rank, _connected, job, store, groups)
    if made.error is not None:
        return made
    with warnings.catch_warnings():
        warnings.filters[:] = job.filters  # type: ignore[index]  # typed as a Sequence
        if os.environ != job.environment:
            os.environ.clear()
            os.environ.update(job.environment)
        return outcome_on(made.value, job.call)


def _connected(job: _Job, store: dist.Store, groups: dict[str, Group]) -> Group:
    """The job's group: one that was kept, or a new one."""
    for name in [each for each in groups if each not in job.kept]:
        groups.pop(name).close()
    if job.group not in groups:
        size, timeout = job.key
        # the limit is of waits: on a busy machine ranks may take longer to meet
        group = connect(store, job.rank, size, START, name=job.group)
        group.set_timeout(timeout)
        groups[job.group] = group
    return groups[job.group]


def _is_usable(group: Group | None) -> bool:
    """Whether a group can be used again. A rank that raises aborts its group."""
    try:
        if group is not None:
            group.post().wait()
    except Error:
        return False
    return group is not None
