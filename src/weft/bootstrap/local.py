"""Ranks as processes of this machine: one function starts them, waits, and leaves nothing behind.

What `weft demo`, `weft bench --ranks` and the tests use where a person would type `torchrun`. The
processes come from multiprocessing's forkserver, which imports torch, weft and more (`PRELOAD`)
once, so a rank starts in tens of milliseconds, and never from a fork of the caller, which may have
threads. They find each other as under torchrun: `RANK`, `WORLD_SIZE` and the like are in their
environment, and the store of the rendezvous is hosted by the caller on a port that the system
chose, so there are no two ranks that want the same one.

Each rank leads a session of its own (as under torchrun), so a Ctrl-C reaches it once, from the
launcher, and not twice; what a rank started itself ends with it; and each rank ends when the
launcher is gone, however that died. Only what left the rank's process group is left alone, and,
where the launcher and then the rank have gone, what ignores SIGTERM, or was started by a rank that
has promised to end by itself (`ends_with_launcher`).
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, TypeVar

import torch

from ..base.arguments import wrong_timeout
from ..base.cores import cores_of_process
from ..base.errors import WeftError
from ..base.latch import NAP, deadline_of
from ..rendezvous.places import LOOPBACK
from ..rendezvous.places import host as host_store
from .outcome import Outcome, results

T = TypeVar("T")

PRELOAD = ["torch", "weft.bootstrap.init", "weft.comm", "weft.bootstrap.local"]
"""What the server imports, where each rank would; a program may add to it before it launches."""

_THREADS = {
    # with its pool of threads OpenBLAS would make the server a process with threads, and those must
    # not fork; torch's own threads are not touched by it
    "OPENBLAS_NUM_THREADS": "1",
    # threads of torch that wait do not spin, on cores that other ranks want: a step of the graph's
    # demo took one process with two threads 472 ms, and takes it 22
    "OMP_WAIT_POLICY": "PASSIVE",
}
"""Variables that the server and the ranks have, unless the environment sets them otherwise."""
_LATE = "had not finished and was ended"
PATIENCE = 10  # seconds: a rank that takes nothing of what it is told for so long is told no more
GRACE = 5.0  # seconds that the other ranks have to end by themselves, after a failure or Ctrl-C
_LENGTH = struct.Struct("!Q")  # of a message of a rank, before it
_READ = 1 << 18  # bytes that are read at once
LADDER = ((signal.SIGINT, 1.0), (signal.SIGTERM, 1.0), (signal.SIGKILL, 10.0))


def launch(
    size: int,
    target: Callable[..., T],
    args: Sequence[Any] = (),
    *,
    on_message: Callable[[int, Any], None] | None = None,
    timeout: float | None = None,
    env: Mapping[str, str] | None = None,
) -> list[T]:
    """Run `target(*args)` in `size` new processes, the ranks; return their results in rank order.

    The ranks have the caller's environment and working directory, and the variables that torchrun
    sets. `OMP_NUM_THREADS`, unless it is set, is each rank's share of the cores. Their output is
    the caller's, unless the caller redirected its own after the first launch. If a rank returns
    without `weft.shutdown`, it is called for it.

    Args:
        size: the number of ranks.
        target: a function that a new process can import: one at the top of a module. A script calls
            `launch` below `if __name__ == "__main__":`, since new processes import it.
        args: its arguments on every rank. They and the results are pickled.
        on_message: called as `on_message(rank, thing)` for each `thing` that a rank passes to
            `send`.
        timeout: seconds that all of it may take; None: no limit.
        env: environment variables of the ranks, besides the caller's own.

    Raises:
        RankFailure: a rank was killed, ended without a result, or did not end in time. It is a
            `WireError`.
        WeftError: `size` is below 1, or `timeout` no number of seconds.
        Exception: what a rank raised, with notes that say which rank, and how the others ended. If
            several raised, one that is no WireError: a WireError is likely a consequence.
        KeyboardInterrupt: Ctrl-C; the ranks got it, too, and had some seconds to end.

    Example:
        >>> launch(2, os.getenv, ["RANK"])
        ['0', '1']
    """
    if size < 1:
        raise WeftError(f"a launch needs at least 1 rank, not {size}")
    if timeout is not None and (error := wrong_timeout(timeout)):
        raise WeftError(error)
    store = host_store(LOOPBACK)
    body = folder_of(target.__module__), pickle.dumps((target, tuple(args)))
    ranks: list[Rank] = []
    deadline = deadline_of(timeout)
    listen = on_message or _ignore
    try:
        for number in range(size):
            ranks.append(
                Rank.start(number, _environment(number, size, store.port, env or {}), *body)
            )
        pump(ranks, listen, deadline, lambda: _decided(ranks))
        if _decided(ranks):
            pump(ranks, listen, time.monotonic() + GRACE)
    except KeyboardInterrupt:
        end(ranks, ((signal.SIGINT, GRACE), *LADDER[1:]), listen)
        raise
    finally:
        end(ranks, LADDER)
        del store  # the ranks are gone, nobody asks it any more
    return results([rank.outcome or Outcome(rank.number) for rank in ranks], "processes")


def send(thing: object) -> None:
    """Send an object from a rank to the `on_message` of the `launch` that started it.

    Any thread of the rank may call it. The object is pickled.

    Raises:
        WeftError: this process is not a rank that `launch` started.

    Example:
        >>> said = []
        >>> launch(1, send, ["ready"], on_message=lambda rank, thing: said.append((rank, thing)))
        [None]
        >>> said
        [(0, 'ready')]
    """
    if _launcher is None:
        raise WeftError("send: this process was not started by weft.bootstrap.local.launch")
    _tell(pickle.dumps(thing))


def receive() -> Any:
    """The next thing that whoever started this rank tells it.

    Raises:
        EOFError, OSError: nobody does any more.
    """
    assert _launcher is not None  # this is a rank
    return _launcher.recv()


def ends_with_launcher() -> None:
    """Promise that this process ends soon, and well, once `receive` has raised.

    A process that does not say so gets SIGTERM when whoever started it is gone, and then its peers
    see a death, of which they tell.
    """
    global _has_promised
    _has_promised = True


# The launcher's side.

Listen = Callable[[int, Any], None]


def _ignore(rank: int, thing: object) -> None:
    pass


@dataclass(slots=True, eq=False)
class Rank:
    """The process of one rank, as whoever started it sees it.

    Attributes:
        number: which rank.
        process: that process.
        connection: to it, for messages both ways.
        outcome: how it ended, once that is known.
        alive: whether the process is there.
        ended: whether the launcher ended it.
        is_deaf: whether it did not take what it was told.
        unread: the beginning of a message that has not come whole. No read waits for the rest: the
            rank may have been stopped in its middle.
    """

    number: int
    process: ForkServerProcess
    connection: Connection
    outcome: Outcome | None = None
    alive: bool = True
    ended: bool = False
    is_deaf: bool = False
    unread: bytearray = field(default_factory=bytearray)

    @classmethod
    def start(cls, number: int, environment: Mapping[str, str], folder: str, body: bytes) -> Rank:
        """Start one with this environment.

        Args:
            number: which rank.
            environment: all of its variables.
            folder: what must be on its path for `body`, or nothing.
            body: a pickled function with its arguments.
        """
        context = multiprocessing.get_context("forkserver")
        _start_server(context)
        ours, theirs = context.Pipe()
        _limit_sends(ours, PATIENCE)
        process = context.Process(
            target=_run, args=(number, environment, theirs, folder, body), name=f"rank {number}"
        )
        with theirs:
            process.start()
        return cls(number, process, ours)

    def tell(self, thing: object) -> None:
        """Send it an object, for `receive`; one that is gone, or stopped, need not get it."""
        if self.is_deaf:
            return
        try:
            self.connection.send(thing)
        except OSError:
            self.is_deaf = True  # and may have got half of it

    def hear(self, listen: Listen) -> None:
        """Read what has come, and handle the messages that are whole."""
        if self.connection.closed:
            return
        try:
            came = os.read(self.connection.fileno(), _READ)
        except OSError:
            came = b""
        if not came:  # the rank is going; the sentinel tells how
            self.connection.close()
            return
        self.unread += came
        while message := _first_of(self.unread):
            said = pickle.loads(message)
            if not isinstance(said, Outcome):
                listen(self.number, said)
            elif self.ended:
                self.outcome = Outcome(self.number, hangs=f"{_LATE}; it was here:\n{said.trace}")
            else:
                self.outcome = said

    def bury(self, listen: Listen) -> None:
        """Handle the end of the process: read its last messages, and note how it ended."""
        self.process.join()
        assert self.process.pid is not None  # it was started
        with contextlib.suppress(ProcessLookupError, PermissionError):  # there are none
            # what the rank started itself (data loaders) must not outlive it
            os.killpg(self.process.pid, signal.SIGKILL)
        while not self.connection.closed and self.connection.poll():
            self.hear(listen)
        self.alive = False
        if self.outcome is None and self.ended:
            self.outcome = Outcome(self.number, hangs=_LATE)
        elif self.outcome is None:
            code = self.process.exitcode or 0
            how = f"exited with status {code}"
            if code < 0:
                how = f"was killed by {signal.Signals(-code).name}"
            self.outcome = Outcome(self.number, died=f"{how} before it had a result")
        self.process.close()
        self.connection.close()

    def kill(self, number: signal.Signals) -> None:
        assert self.process.pid is not None  # it was started
        self.ended = True
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, number)


def pump(
    ranks: Iterable[Rank],
    listen: Listen,
    deadline: float,
    enough: Callable[[], bool] = lambda: False,
) -> None:
    """Read messages of the ranks until all are gone, the deadline passes, or `enough()`."""
    while not enough():
        alive = [rank for rank in ranks if rank.alive]
        sources: dict[Any, Callable[[Listen], None]] = {}
        for rank in alive:
            sources[rank.process.sentinel] = rank.bury
            if not rank.connection.closed:
                sources[rank.connection] = rank.hear
        left = deadline - time.monotonic()
        if not alive or left <= 0:
            return
        for source in multiprocessing.connection.wait(list(sources), min(left, NAP)):
            sources[source](listen)


def end(
    ranks: Sequence[Rank], ladder: Sequence[tuple[signal.Signals, float]], listen: Listen = _ignore
) -> None:
    """End the ranks that are left, more firmly each time; a second Ctrl-C takes the next rung."""
    for number, patience in ladder:
        left = [rank for rank in ranks if rank.alive]
        for rank in left:
            rank.kill(number)
        try:
            pump(left, listen, time.monotonic() + patience)
        except KeyboardInterrupt:
            continue


def _limit_sends(connection: Connection, seconds: int) -> None:
    """Have a send raise an OSError where the other end takes nothing for so long."""
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        same.setblocking(True)  # whatever `socket.setdefaulttimeout` was given
        timeval = struct.pack("ll", seconds, 0)
        same.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)


def _first_of(unread: bytearray) -> bytes:
    """Take the first message of what came; b"": it has not come whole."""
    if len(unread) < _LENGTH.size:
        return b""
    end = _LENGTH.size + _LENGTH.unpack_from(unread)[0]
    if len(unread) < end:
        return b""
    message = bytes(memoryview(unread)[_LENGTH.size : end])
    del unread[:end]
    return message


def _decided(ranks: Sequence[Rank]) -> bool:
    """Whether the end of the launch is decided: a rank failed, or all have results."""
    known = [rank.outcome for rank in ranks if rank.outcome is not None]
    return len(known) == len(ranks) or any(each.error or each.died for each in known)


def _environment(rank: int, size: int, port: int, extra: Mapping[str, str]) -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if name != "TORCHELASTIC_RUN_ID"}
    env.setdefault("OMP_NUM_THREADS", str(max(1, cores_of_process() // size)))
    env.update(
        RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(size),
        GROUP_RANK="0",
        GROUP_WORLD_SIZE="1",
        MASTER_ADDR=LOOPBACK,
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",  # env:// then only connects, and rank 0 hosts nothing
        TORCHELASTIC_RESTART_COUNT="0",
    )
    return {**env, **extra}


def _start_server(context: multiprocessing.context.ForkServerContext) -> None:
    # if a server runs already, it stays as it is
    context.set_forkserver_preload([*PRELOAD, "weft.bootstrap.preload"])
    unset = [name for name in _THREADS if name not in os.environ]
    os.environ.update({name: _THREADS[name] for name in unset})
    try:
        forkserver.ensure_running()
    finally:
        for name in unset:
            del os.environ[name]


def folder_of(module: str) -> str:
    """What a process must have on its path to import a module by its name.

    Some loaders (pytest's) import files that are on no path: then it is the folder that the dotted
    name counts from.
    """
    file = getattr(sys.modules.get(module), "__file__", None)
    if module == "__main__" or file is None:
        return ""
    path, depth = Path(file).with_suffix(""), module.count(".") + 1
    path = path.parent if path.name == "__init__" else path
    return str(path.parents[depth - 1]) if path.parts[-depth:] == tuple(module.split(".")) else ""


# The rank's side.


_launcher: Connection | None = None  # set in a rank, for the life of the process
_has_promised = False  # by `ends_with_launcher`
_turn = threading.Lock()


def _tell(told: bytes) -> None:
    assert _launcher is not None  # this is a rank
    with _turn:
        # in one write, if it is short: between two the handler of a signal may raise, and what is
        # said next would be taken for the rest
        left = memoryview(_LENGTH.pack(len(told)) + told)
        while left:
            left = left[os.write(_launcher.fileno(), left) :]


def _run(
    number: int, environment: dict[str, str], connection: Connection, folder: str, body: bytes
) -> None:
    """What a rank's process does."""
    global _launcher
    os.setsid()
    threading.Thread(target=_follow_launcher, name="weft-launcher", daemon=True).start()
    os.environ.clear()
    os.environ.update(environment)
    _launcher = connection
    if folder:
        sys.path.append(folder)
    try:
        outcome = Outcome.of(number, _called, body)
        with contextlib.suppress(ConnectionError):  # nobody is there any more
            _tell(outcome.packed())
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is said; do not disturb the leaving
        init = sys.modules.get("weft.bootstrap.init")
        if init is not None:  # a process of multiprocessing runs no atexit functions
            init.leave()


def _called(body: bytes) -> Any:
    torch.set_num_threads(max(1, int(os.environ["OMP_NUM_THREADS"])))
    target, args = pickle.loads(body)
    return target(*args)


def _follow_launcher() -> None:
    """End this process when its launcher is gone: politely, then not; and what it has started.

    That is the rest of its process group: nobody is left to end it (`Rank.bury`).
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    parent.join()
    if not _has_promised:
        os.killpg(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE)
    os.killpg(os.getpid(), signal.SIGKILL)
