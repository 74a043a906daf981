"""All wires of a session at one rank: what a verdict aborts, and what they say of failures.

A wire says what it saw, and a session needs a verdict. The failure detector knows no wire: it is
given two functions of `Wires`.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import signal
from collections.abc import Callable, Iterable
from types import CodeType
from typing import Any, NamedTuple

from ..base.arguments import in_words
from ..base.errors import in_short
from ..failure.verdict import HOW_TO_TRY, Verdict
from ..wire.interface import Droppable, Failure, Wire

_ALIKE = (
    "(all ranks must run the same program and version, and post the same lengths to each other)"
)

_log = logging.getLogger("weft")


class _Entry(NamedTuple):
    """A wire of the session; see `Wires.add`."""

    wire: Wire
    name: str
    of_device: bool


class Wires:
    """The wires of a session at one rank, with their names for texts."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._entries: list[_Entry] = []

    def add(self, wire: Wire, name: str, *, of_device: bool = False) -> None:
        """Add a wire.

        Args:
            wire: of the session.
            name: by which a program or a package registered it; "": it is one of weft's own.
            of_device: whether it carries tensors of a device, perhaps over a wire of the CPU.
        """
        self._entries.append(_Entry(wire, name, of_device))

    def all(self) -> list[Wire]:
        """Those that there are now; another thread may add that of a device meanwhile."""
        return [each.wire for each in self._entries]

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

    def close_those_of_hosts(self) -> None:
        """Close those of the CPU."""
        _call_all(each.wire.close for each in self._entries if not each.of_device)

    def close_those_of_devices(self) -> None:
        """Close those of devices, which waits for what these still do."""
        _call_all(each.wire.close for each in self._entries if each.of_device)

    def drop_those_of_devices(self) -> None:
        """Close those of devices, and wait for none: for a collection of garbage, or at exit."""
        _call_all(_drop_of(each.wire) for each in self._entries if each.of_device)

    def find_fault(self) -> Verdict | None:
        """What a wire is sure of, which it may have seen while nobody used it; any thread."""
        for each in list(self._entries):
            try:
                failure = each.wire.failure()
            except Exception as error:
                return verdict_on_exception(error, self._rank, each.name)
            if failure is not None and failure.kind in ("garbled", "broken"):
                return verdict_on(failure, self._rank, each.name)
        return None


def _call_all(ends: Iterable[Callable[[], None]]) -> None:
    """Call what ends wires, that of the last wire first: it may be over another one."""
    with contextlib.ExitStack() as stack:  # also where one raises, or a handler of a signal
        for end in ends:
            stack.callback(end)


def _drop_of(wire: Wire) -> Callable[[], None]:
    """What closes a wire of a device, and waits for nothing."""
    return wire.drop if isinstance(wire, Droppable) else wire.close


def verdict_on(failure: Failure, rank: int, name: str) -> Verdict:
    """The verdict on what a wire is sure of: any failure but "lost", which others may explain.

    Args:
        failure: what it says.
        rank: whose wire it is.
        name: of the wire; "": it is one of weft's own.

    Example:
        >>> verdict_on(Failure("broken", None, "no memory left"), 1, "").text
        'rank 1: no memory left'
        >>> verdict_on(Failure("stuck", None, "all ranks wait"), 1, "").text
        'all ranks wait'
    """
    if failure.kind == "garbled":
        return Verdict(failure.peer, f"{failure.text} {_ALIKE}")
    if failure.kind != "broken":
        return Verdict(failure.peer, failure.text)
    if name:
        text = f"rank {rank}: wire {name!r} failed: {failure.text} {HOW_TO_TRY}"
        return Verdict(rank, text)
    return Verdict(rank, f"rank {rank}: {failure.text}")


def verdict_on_exception(error: Exception, rank: int, name: str) -> Verdict:
    """The verdict on a wire that raised what none may raise; `rank` and `name` as above."""
    what = in_short(in_words(error))
    if name:
        return Verdict(rank, f"rank {rank}: wire {name!r} raised {what} {HOW_TO_TRY}")
    return Verdict(rank, f"rank {rank}: its wire raised {what}")


def is_of_a_signal(error: BaseException) -> bool:
    """Whether the handler of a signal raised this in the middle of whatever else ran.

    What is no Exception, such as KeyboardInterrupt, counts as that. For others the traceback shows
    it: the code of a handler that is installed is in it.
    """
    if not isinstance(error, Exception):
        return True
    handlers = _codes_of_handlers()
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code in handlers:
            return True
        trace = trace.tb_next
    return False


def _codes_of_handlers() -> set[CodeType]:
    """The code of all handlers of signals that are written in Python."""
    codes = set()
    for number in signal.valid_signals():
        handler = signal.getsignal(number)
        code = _code_of(handler) if callable(handler) else None
        if code is not None:
            codes.add(code)
    return codes


def _code_of(handler: Callable[..., Any]) -> CodeType | None:
    """The code of a function, of a method, or of an object that can be called."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    call = handler if hasattr(handler, "__code__") else type(handler).__call__
    code: CodeType | None = getattr(call, "__code__", None)
    return code
