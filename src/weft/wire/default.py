"""The one default wire: what a call without `group=` uses.

It is context-local, so that ranks that are threads of one process have one each. What the main
thread sets also serves every context that set none of its own: a program with one rank may call
weft from any of its threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextvars import ContextVar, copy_context
from typing import TypeVar

from ..errors import WeftError
from .base import Wire
from .failure import last_error

W = TypeVar("W", bound=Wire)

_local: ContextVar[Wire | None] = ContextVar("weft_wire", default=None)
_process: Wire | None = None
_why_none = "call weft.init() first"


def set(wire: Wire) -> None:
    """Make `wire` the default of this context and, from the main thread, of the process."""
    global _process
    _local.set(wire)
    if threading.current_thread() is threading.main_thread():
        _process = wire


def clear(reason: str) -> None:
    """Forget the default wire; `reason` completes the error that later calls raise."""
    global _process, _why_none
    if _process is _local.get() or _local.get() is None:
        _process, _why_none = None, reason
    _local.set(None)


def current() -> Wire:
    """The default wire of this context.

    Raises:
        WeftError: there is none, here and now; nothing was sent.
    """
    wire = _local.get() or _process
    if wire is None:
        raise WeftError(f"there is no group of ranks to talk to: {_why_none}")
    return wire


def resolve(group: object) -> Wire:
    """The wire of `group=`: None (the default), a Wire, a ProcessGroup or a 1-D DeviceMesh.

    Raises:
        WeftError: it is none of these, or this rank is not in it. It is raised on this rank alone,
            since nobody knows which ranks are meant. A rank that waits for this one learns of the
            error when this rank leaves, or at the deadline (`failure.last_error`).
    """
    if isinstance(group, Wire):
        return group
    try:
        if group is None:
            return current()
        from . import process_group  # here: most calls never need it

        return process_group.of(group)
    except WeftError as error:
        last_error.note(error)
        raise


def begun(program: Callable[[W], None], wires: Sequence[W]) -> list[threading.Thread]:
    """Start a program with each wire, in a thread with a context (and default wire) of its own."""
    threads = [
        threading.Thread(
            target=copy_context().run,
            args=(program, wire),
            name=f"rank {wire.rank}",
            daemon=True,
        )
        for wire in wires
    ]
    for thread in threads:
        thread.start()
    return threads
