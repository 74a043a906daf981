"""The contract of a wire: does it do what `weft.wire.interface` says?

The clauses are in `wire_clauses`. How ranks are started is an argument, since only who brings a
wire knows how its ranks meet. Ranks as threads are quick, and easy to debug; ranks as processes
(`wire_processes`) can be killed, so only there are all clauses tried.
"""

from __future__ import annotations

import functools
import platform
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import psutil

from ..base.memory import Pool
from ..base.pace import patient
from ..bootstrap.outcome import Outcome as Rank
from ..bootstrap.outcome import results
from ..wire.interface import Features, Wire
from ..wire.start import Start
from .clauses import Outcome, asked_for, raise_if_broken, stated, title_of, tried
from .held import Held
from .threads import on_threads
from .wire_clauses import CLAUSES, Clause

Factory = Callable[[Start], Wire]
"""Makes this rank's end of a wire. Every rank runs it at the same time."""


class Run(Protocol):
    """Starts ranks: `run(size, body)` runs `body(wire)` on each of `size` new ranks.

    It may have an attribute `are_processes`, true where the ranks are processes of their own, which
    some clauses need. Only then is `dies` given. Where it is not true, some clauses are tried with
    more numbers of ranks. It may have an attribute `compares`, and only where that is true is
    `is_compared` given.
    """

    def __call__(
        self,
        size: int,
        body: Callable[[Wire], Any],
        dies: Collection[int] = (),
        is_compared: bool = False,
    ) -> list[Any]:
        """The results, in rank order; raises what a rank raised.

        A rank that raises aborts its wire, and one that has not ended after a while is an error:
        whatever hangs is broken.

        Args:
            size: the number of ranks.
            body: the program of each.
            dies: ranks that end their processes, which is no error then.
            is_compared: it is an error if processes hold more descriptors or threads, once their
                wires are closed, than before these were made.
        """


def check_wire(
    run: Run,
    features: Features | None = None,
    *,
    clauses: Iterable[int] = (),
    soon: float = 5.0,
    thorough: bool = False,
    report: Callable[[Outcome], object] | None = None,
) -> list[Outcome]:
    """Try whether a wire keeps the contract of `weft.wire.interface.Wire`.

    The clauses are listed in the manual, "To write a wire".

    Args:
        run: starts ranks with a wire each; `ranks_as_processes` and `ranks_as_threads` make one.
        features: of the wire; None: those that it says it has. Some clauses are not for all.
        clauses: the numbers of those to try; none: all.
        soon: seconds in which what must come soon comes, on an idle machine; on a busy one up to
            four times as many.
        thorough: try those clauses, too, that take gigabytes of memory.
        report: called with what each clause found, as soon as it has.

    Returns:
        What each clause found; none is broken.

    Raises:
        AssertionError: some clauses are broken; the text lists each with what is wrong.
        WeftError: no clause has one of these numbers; or the wire cannot be made.

    Example:
        >>> from weft.wire.in_process.threads import thread_wires
        >>> for outcome in check_wire(ranks_as_threads(thread_wires), clauses=[2, 4]):
        ...     print(outcome)
         2  tensors of every dtype and shape arrive as they were sent, from each to each  ok
         4  a channel waits for no other, whatever lies there  ok
    """
    asked = asked_for(clauses, len(CLAUSES))
    kept = _features(run) if features is None else features
    outcomes = []
    for number, clause in enumerate(CLAUSES, 1):
        if number not in asked:
            continue
        outcome = _outcome(number, clause, run, kept, patient(soon), thorough)
        if report is not None:
            report(outcome)
        outcomes.append(outcome)
    raise_if_broken("the wire", outcomes)
    return outcomes


def _features(run: Run) -> Features:
    """Those of the wire; none if it has none, which a clause tells of."""
    found, _ = run(2, features_of)  # of two ranks: a wire that cannot be made is told of once
    return found if isinstance(found, Features) else Features()


def features_of(wire: Wire) -> Features:
    """What a wire says of itself; a function that a process can load."""
    return wire.features


def _outcome(
    number: int, clause: Clause, run: Run, features: Features, soon: float, thorough: bool
) -> Outcome:
    title = title_of(clause.body)
    skipped = _why_not(clause, run, features, thorough)
    if skipped:
        return Outcome(number, title, skipped=skipped)

    def check() -> str | None:
        body = functools.partial(clause.body, soon=soon)
        options: dict[str, Any] = {}
        if clause.dies:
            options["dies"] = clause.dies
        if clause.is_compared:
            options["is_compared"] = True
        sizes = clause.sizes
        if not getattr(run, "are_processes", False):
            sizes += clause.threads
        reasons: list[str | None] = []
        for size in sizes:
            reasons += run(size, body, **options)
        return reasons[0] if all(reasons) else None

    return tried(number, title, check)


def _why_not(clause: Clause, run: Run, features: Features, thorough: bool) -> str:
    """Why a clause is not tried; empty: it is."""
    for name in clause.unless:
        if getattr(features, name):
            return f"the wire is {name}" if name != "streams" else "the wire has streams"
    if clause.needs and not getattr(features, clause.needs):
        return f"its features have no {clause.needs}"
    if clause.processes and not getattr(run, "are_processes", False):
        return "it needs ranks that are processes"
    if clause.is_compared and not getattr(run, "compares", False):
        return "it needs ranks that are compared before and after"
    memory = clause.memory()
    if memory and not thorough:
        return f"it takes {memory / 2**30:.0f} GiB of memory, and is tried if asked for"
    if memory > psutil.virtual_memory().available:
        return f"it takes {memory / 2**30:.0f} GiB of memory, which are not free here"
    return ""


# Ranks that are threads -------------------------------------------------------------------------


def ranks_as_threads(make: Callable[[int], Sequence[Wire]], *, limit: float = 60.0) -> ThreadRanks:
    """Make a `Run` whose ranks are threads of this process.

    Args:
        make: makes the wires of a new group of so many ranks, such as
            `functools.partial(make_wires, "my wire")`.
        limit: seconds that the ranks may take together, on an idle machine.
    """
    return ThreadRanks(make, limit)


class ThreadRanks:
    """Runs a body on ranks that are threads of this process; a `Run`."""

    compares = True

    def __init__(self, make: Callable[[int], Sequence[Wire]], limit: float) -> None:
        self._make = make
        self._limit = limit

    def __call__(
        self,
        size: int,
        body: Callable[[Wire], Any],
        dies: Collection[int] = (),
        is_compared: bool = False,
    ) -> list[Any]:
        before = Held.now()
        wires = self._make(size)

        def program(wire: Wire) -> Rank:
            return Rank.of(wire.rank, stated, wire, body)

        found = results(on_threads(wires, program, patient(self._limit)), "threads")
        if is_compared:
            before.is_all_soon()
        return found


def make_wires(factory: Factory, size: int, *, timeout: float = 60.0) -> list[Wire]:
    """All the wires of a new group, in this process: to try a wire by hand, or under a debugger.

    Args:
        factory: makes a rank's wire.
        size: the number of ranks.
        timeout: seconds that the factories may take.

    Raises:
        WeftError: a factory raised, or made no wire of the group.

    Example:
        >>> from weft.wire.in_process.threads import thread_wires
        >>> import torch
        >>> both = thread_wires(2)
        >>> first, second = make_wires(lambda start: both[start.rank], 2)
        >>> sent = first.post([(1, torch.tensor([1.0, 2.0]))])
        >>> second.post((), [(0, torch.empty(2))]).wait()
        [tensor([1., 2.])]
    """
    meeting = threading.Barrier(size, timeout=timeout)
    messages = [b""] * size

    def made(rank: int) -> Wire:
        def exchange(data: bytes) -> list[bytes]:
            messages[rank] = data
            meeting.wait()  # until all have written
            everyones = [*messages]
            meeting.wait()  # until all have read
            return everyones

        wire = factory(Start(rank, size, timeout, platform.node(), exchange, Pool()))
        exchange(b"made")  # as in a group: all have theirs
        return wire

    with ThreadPoolExecutor(size) as ranks:
        return list(ranks.map(made, range(size)))


NUMBERS = {clause.body.__name__: number for number, clause in enumerate(CLAUSES, 1)}
"""The numbers of the clauses, by the names of their functions."""
