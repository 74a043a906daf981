"""The one default group: what a call without `group=` uses.

It is context-local, so that ranks that are threads of one process have one each. What the main
thread sets also serves every context that set none of its own: a program with one rank may call
weft from any of its threads.
"""

from __future__ import annotations

import threading
from contextvars import ContextVar

from ..base.arguments import is_a
from ..base.errors import WeftError
from ..failure import last_error
from . import process_group
from .group import Group

_local: ContextVar[Group | None] = ContextVar("weft_group", default=None)
_process: Group | None = None
_why_none = "call weft.init() first"


def set(group: Group) -> None:
    """Make `group` the default of this context and, from the main thread, of the process."""
    global _process
    _local.set(group)
    if threading.current_thread() is threading.main_thread():
        _process = group


def clear(reason: str) -> None:
    """Forget the default group; `reason` completes the error that later calls raise."""
    global _process, _why_none
    if _process is _local.get() or _local.get() is None:
        _process = None
        _why_none = reason
    _local.set(None)


def current() -> Group:
    """The default group of this context.

    Raises:
        WeftError: there is none, here and now; nothing was sent.
    """
    group = _local.get() or _process
    if group is None:
        raise WeftError(f"there is no group of ranks to talk to: {_why_none}")
    return group


def resolve(group: object) -> Group:
    """What `group=` stands for: None (the default), a Group, a ProcessGroup or a 1-D DeviceMesh.

    The ranks of a process group are joined by the first call for it (`process_group.of_group`).

    Raises:
        WeftError: it is none of these, or this rank is not in it. It is raised on this rank alone,
            since nobody knows which ranks are meant. A rank that waits for this one learns of the
            error when this rank leaves, or at the deadline (`failure.last_error`).
    """
    if is_a(group, Group):
        return group
    try:
        if group is None:
            return current()
        return process_group.of(group)
    except WeftError as error:
        last_error.note(error)
        raise
