"""Ranks as processes that may die, on any wire: what `check_wire` runs its clauses on.

Each run starts new processes (`bootstrap.local`), since a clause may kill them. A rank makes its
wire as in a group, and what it exchanges meanwhile goes through the process that started the ranks.
That process sees who dies and who raises, asks those that hang where they are, and leaves nothing
behind.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import platform
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from ..base.errors import WeftError, WireError
from ..base.memory import Pool
from ..base.pace import patient
from ..bootstrap.local import Rank, end, folder_of, pump, receive, send
from ..bootstrap.outcome import Outcome, place, results
from ..rendezvous import places as rendezvous
from ..wire.interface import Wire
from ..wire.start import Start
from .clauses import stated
from .held import Held
from .pace import ANSWER, START
from .wires import Factory

_AFTERMATH = 10.0  # seconds that the other ranks have to end, once one has failed
_LEAVING = 5.0  # seconds in which a process ends, once its program has a result

_HERE = b""  # what a rank says first
_WHERE = None  # the question to a rank that hangs; anything else is of an exchange


def ranks_as_processes(
    factory: Factory, *, limit: float = 60.0, apart: bool = False
) -> ProcessRanks:
    """Make a `Run` whose ranks are processes, new ones for each run.

    Args:
        factory: makes a rank's wire, a function at the top of a module.
        limit: seconds that a run may take, on an idle machine; up to four times as many on a busy
            one. Then it fails, and the error says where the ranks were.
        apart: tell each rank that it has a machine of its own (`Start.host`), for wires that do
            otherwise within one.

    ```python
    check_wire(ranks_as_processes(make))
    ```
    """
    return ProcessRanks(factory, limit, apart)


class ProcessRanks:
    """Runs a body on ranks that are processes; see `weft.testing.check_wire`."""

    are_processes = True
    compares = True

    def __init__(self, factory: Factory, limit: float, apart: bool) -> None:
        self._apart = apart
        self._factory = factory
        self._limit = limit

    def __call__(
        self,
        size: int,
        body: Callable[[Wire], Any],
        dies: Collection[int] = (),
        is_compared: bool = False,
    ) -> list[Any]:
        """Run `body(wire)` on each of `size` new processes; the results in rank order.

        Args:
            size: the number of ranks.
            body: the program of each, a function at the top of a module; it may be partial. Its
                result is pickled.
            dies: ranks whose processes may end without a result, which is None then.
            is_compared: it is an error if a process holds more descriptors or threads, once its
                wire is closed, than before that was made.

        Raises:
            RankFailure: a process died, or ranks hang; the text says where they were.
            WeftError: the wire could not be made; or other processes cannot load the body.
            BaseException: what a rank raised, with a note that says which.
        """
        program = self._program(size, body, is_compared)
        store, port = rendezvous.host(rendezvous.LOOPBACK)
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        trial = _Trial(dies)
        try:
            for number in range(size):
                packed = pickle.dumps((_run, (number, port, *program)))
                trial.ranks.append(Rank.start(number, environment, "", packed))
            trial.wait_for_starts()
            trial.wait(patient(self._limit))
            trial.ask_where()
            trial.wait_for_ends()
        finally:
            end(trial.ranks, [(signal.SIGKILL, 10.0)])
            del store  # the ranks are gone, nobody asks it any more
        return results(trial.outcomes(), "processes")

    def _program(
        self, size: int, body: Callable[[Wire], Any], is_compared: bool
    ) -> tuple[Any, ...]:
        """What every rank is to run, in a form that its process can load."""
        functions = [_innermost(self._factory), _innermost(body)]
        folders = [folder_of(each.__module__) for each in functions]
        try:
            packed = pickle.dumps((self._factory, body))
        except Exception as error:
            raise WeftError(
                "other processes cannot load the factory of a wire, or the program of a rank: "
                f"{error}; make them functions at the top of a module"
            ) from error
        return size, self._limit, self._apart, is_compared, folders, packed


def _innermost(function: Any) -> Any:
    """The function itself, of one whose first arguments are given already."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


class _Trial:
    """The ranks of a run, as the process sees them that started them.

    Attributes:
        ranks: in order.
    """

    def __init__(self, dies: Collection[int]) -> None:
        """
        Args:
            dies: ranks whose end without a result is no failure.
        """
        self.ranks: list[Rank] = []
        self._dies = dies
        self._started: set[int] = set()
        self._messages: dict[int, bytes] = {}  # by rank, of the exchange that is under way

    def wait_for_starts(self) -> None:
        """Wait until all ranks have said that they are there, or one never will."""

        def have_started() -> bool:
            return len(self._started) == len(self.ranks) or self._has_failure()

        pump(self.ranks, self._hear, time.monotonic() + patient(START), have_started)

    def wait(self, seconds: float) -> None:
        """Wait until all ranks have ended their programs, or for a while after one has failed."""
        deadline = time.monotonic() + seconds
        pump(self.ranks, self._hear, deadline, self._is_decided)
        if self._has_failure():
            late = min(deadline, time.monotonic() + patient(_AFTERMATH))
            pump(self.ranks, self._hear, late, self._have_all_ended)

    def ask_where(self) -> None:
        """Ask the ranks that hang where they are."""
        hanging = [rank for rank in self.ranks if rank.outcome is None]
        for rank in hanging:
            rank.tell(_WHERE)
        pump(hanging, self._hear, time.monotonic() + patient(ANSWER), self._have_all_ended)
        for rank in hanging:
            if rank.outcome is None:
                rank.outcome = Outcome(rank.number, hangs="gave no answer, not even where it is")

    def wait_for_ends(self) -> None:
        """Wait until the processes are gone whose programs have ended."""
        leaving = [rank for rank in self.ranks if rank.outcome and not rank.outcome.hangs]
        pump(leaving, self._hear, time.monotonic() + patient(_LEAVING))
        for rank in leaving:
            if rank.alive:
                why = "has ended its program, but its process goes on: is a thread left?"
                rank.outcome = Outcome(rank.number, hangs=why)

    def outcomes(self) -> list[Outcome]:
        """How each rank ended; one that was to die has no result."""
        outcomes = []
        for rank in self.ranks:
            assert rank.outcome is not None  # `ask_where` has seen to that
            has_died = rank.outcome.died and rank.number in self._dies
            outcomes.append(Outcome(rank.number) if has_died else rank.outcome)
        return outcomes

    def _is_decided(self) -> bool:
        self._answer()
        return self._has_failure() or self._have_all_ended()

    def _have_all_ended(self) -> bool:
        self._answer()
        return all(rank.outcome is not None for rank in self.ranks)

    def _has_failure(self) -> bool:
        return any(outcome.error or outcome.died or outcome.hangs for outcome in self._known())

    def _known(self) -> list[Outcome]:
        """How those ranks ended that have, but for those that were to die."""
        known = [rank.outcome for rank in self.ranks if rank.outcome is not None]
        return [each for each in known if not (each.died and each.rank in self._dies)]

    def _hear(self, rank: int, message: bytes) -> None:
        """A rank says that it is there, and after that calls `exchange`."""
        if rank not in self._started:
            self._started.add(rank)
        else:
            self._messages[rank] = message

    def _answer(self) -> None:
        """Answer those that exchange, once all do or one never will."""
        gone = [rank.number for rank in self.ranks if not rank.alive]
        if len(self._messages) == len(self.ranks):
            answer: object = [self._messages[rank.number] for rank in self.ranks]
        elif gone:
            answer = f"rank {gone[0]} has ended, and the others exchange messages"
        else:
            return
        for number in self._messages:
            self.ranks[number].tell(answer)
        self._messages.clear()


# A rank ------------------------------------------------------------------------------------------


def _run(
    number: int,
    port: int,
    size: int,
    timeout: float,
    apart: bool,
    is_compared: bool,
    folders: Sequence[str],
    packed: bytes,
) -> Any:
    """The program of a rank's process: make the wire, run the body, close the wire."""
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(number, answers), daemon=True).start()
    # before the limit of a run begins: torch asks a name server on the way
    store = rendezvous.connect(rendezvous.LOOPBACK, port, patient(START))
    send(_HERE)
    sys.path += [folder for folder in folders if folder]
    factory, body = pickle.loads(packed)

    def exchange(data: bytes) -> list[bytes]:
        send(data)
        answer = answers.get()  # it ends with the process that started this one, at the latest
        if isinstance(answer, str):
            raise WireError(f"rank {number}: {answer}", rank=number)
        everyones: list[bytes] = answer
        return everyones

    host = platform.node()
    if apart:
        host += f" {number}"
    start = Start(number, size, timeout, host, exchange, Pool(), store=store)
    before = Held.now()
    wire = factory(start)
    exchange(b"made")  # as in a group: all have theirs
    result = stated(wire, body)
    if is_compared:
        before.is_all_soon()
    return result


def _listen(number: int, answers: queue.SimpleQueue[Any]) -> None:
    """Hear what the process says that started this one, in a thread: this one may hang."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            message = receive()
            if message is _WHERE:
                send(Outcome(number, hangs=place(threading.main_thread())))
            else:
                answers.put(message)
