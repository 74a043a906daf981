"""All wires of a session at one rank: what a verdict aborts, and what they say of failures.

A wire says what it saw, and a session needs a verdict. The failure detector knows no wire: it is
given two functions of `Wires`.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import signal
import weakref
from collections.abc import Callable
from types import CodeType
from typing import Any, Protocol

from ..base.arguments import in_words
from ..base.errors import in_short
from ..failure.verdict import Verdict
from ..wire.interface import Failure, Wire

_ALIKE = (
    "(all ranks must run the same program and version, and post the same lengths to each other)"
)

_log = logging.getLogger("weft")


class Carrier(Protocol):
    """What a verdict aborts and a session closes: a wire, or verbs; see `Wire`."""

    def abort(self, failure: Failure) -> None: ...

    def failure(self) -> Failure | None: ...

    def close(self) -> None: ...


class Wires:
    """What carries tensors of a session at one rank: the wire of the CPU, and verbs."""

    def __init__(self, rank: int, wire: Wire) -> None:
        self._rank = rank
        self._wire = wire
        # weakly: a session that was dropped ends though these have it (`group.state` keeps them)
        self._verbs: weakref.WeakSet[Carrier] = weakref.WeakSet()

    def add(self, verbs: Carrier) -> None:
        """Add verbs."""
        self._verbs.add(verbs)

    def all(self) -> list[Carrier]:
        """Those that there are now; another thread may add some meanwhile."""
        return [self._wire, *self._verbs]

    def abort(self, verdict: Verdict) -> None:
        """End all waits of this rank; any thread."""
        errors = []
        for wire in self.all():
            try:
                wire.abort(Failure("aborted", verdict.culprit, verdict.text))
            except Exception as error:  # the waits of the others end all the same
                errors.append(error)
        for each in errors:  # only now: a handler of the log may block, or raise
            _log.error("rank %d: a wire cannot be aborted: %r", self._rank, each)

    def close_verbs(self) -> None:
        """Let go of the process groups that verbs have made, each also where another raises."""
        with contextlib.ExitStack() as stack:
            for each in list(self._verbs):
                stack.callback(each.close)

    def find_fault(self) -> Verdict | None:
        """What a wire is sure of, which it may have seen while nobody used it; any thread."""
        for wire in self.all():
            try:
                failure = wire.failure()
            except Exception as error:
                return verdict_on_exception(error, self._rank)
            if failure is not None and failure.kind in ("garbled", "broken"):
                return verdict_on(failure, self._rank)
        return None


def verdict_on(failure: Failure, rank: int) -> Verdict:
    """The verdict on what a wire is sure of: any failure but "lost", which others may explain.

    Args:
        failure: what it says.
        rank: whose wire it is.

    Example:
        >>> verdict_on(Failure("broken", None, "no memory left"), 1).text
        'rank 1: no memory left'
        >>> verdict_on(Failure("stuck", None, "all ranks wait"), 1).text
        'all ranks wait'
    """
    if failure.kind == "garbled":
        return Verdict(failure.peer, f"{failure.text} {_ALIKE}")
    if failure.kind == "broken":
        return Verdict(rank, f"rank {rank}: {failure.text}")
    return Verdict(failure.peer, failure.text)


def verdict_on_exception(error: BaseException, rank: int) -> Verdict:
    """The verdict on the wire of a rank that raised what none may raise."""
    return Verdict(rank, f"rank {rank}: its wire raised {in_short(in_words(error))}")


def is_of_a_signal(error: BaseException) -> bool:
    """Whether the handler of a signal raised this in the middle of whatever else ran.

    What is no Exception, such as KeyboardInterrupt, counts as that. For others the traceback shows
    it: the code of a handler that is installed is in it.
    """
    if not isinstance(error, Exception):
        return True
    handlers = map(signal.getsignal, signal.valid_signals())
    codes = {_code_of(handler) for handler in handlers if callable(handler)}
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code in codes:
            return True
        trace = trace.tb_next
    return False


def _code_of(handler: Callable[..., Any]) -> CodeType | None:
    """The code of a function, of a method, or of an object that can be called; None: it has none
    that is written in Python."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    call = handler if hasattr(handler, "__code__") else type(handler).__call__
    code: CodeType | None = getattr(call, "__code__", None)
    return code
