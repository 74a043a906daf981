"""What one rank may fail at, and all have to know of: in a user's function, and before a call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Self, TypeVar, cast

import torch

from ..base._torch import is_traced
from ..base.arguments import in_words, printable, shown
from ..base.devices import IN_A_GRAPH, Aside, Streams, is_capturing
from ..base.errors import WeftError, WireError, entry
from ..group import default
from ..group.group import Group
from .opening import opened

T = TypeVar("T")

_STREAMS = "streams"  # of a group's state: those of its asynchronous calls
_LONGEST = 700  # bytes of a name: it travels in the fingerprint


@entry
def attempt(function: Callable[[], T], group: object = None, *, name: str = "attempt") -> T:
    """Call a function on every rank; if it raises on one of them, every rank raises.

    Use it for local work between two calls, such as reading a file: if only one rank raised there,
    the others would wait for it in their next call. If the others are already in a sparse call, or
    in `all_to_all`, `exchange` or `all_reduce`, a rank that cannot join them may attempt a function
    that raises the reason: then all of them raise it.

    Args:
        function: of no arguments; it must not call weft on the same group, and end within the
            group's timeout.
        group: None (the default group), a Group, a ProcessGroup, or a 1-D DeviceMesh.
        name: what errors call the attempt; the same on every rank, at most 700 bytes.

    Returns:
        What the function returned on this rank.

    Raises:
        WeftError: the function raised on some rank; the same text on every rank, naming the rank.
            On that rank the exception is its `__cause__`, but SystemExit and KeyboardInterrupt are
            raised themselves. The next call works.
        WireError: a peer or a link failed; names the culprit. The group is lost.

    Example:
        >>> import weft
        >>> from weft.testing import run
        >>> def program(group):
        ...     try:
        ...         weft.attempt(lambda: 1 // group.rank)
        ...     except weft.WeftError as error:
        ...         return str(error)
        >>> run(2, program)[1]
        'rank 0: ZeroDivisionError: integer division or modulo by zero'
    """
    group = default.resolve(group)
    with preparing(group, "attempt"):
        if not isinstance(name, str):
            raise WeftError(f"name is {shown(name)}: pass a text")
        call = printable(str.__str__(name)).encode()[:_LONGEST].decode(errors="ignore")

    def job() -> T:
        made, trouble = None, None
        try:
            made = function()
        except BaseException as error:
            trouble = error
        try:
            confess(group, call, trouble)
        finally:
            del trouble  # whose traceback has this frame, and would keep it and the group alive
        return cast(T, made)

    return group.worker.call(call, job)


def confess(group: Group, call: str, trouble: BaseException | None) -> None:
    """Tell each other what went wrong on this rank, if anything did; collective.

    Args:
        group: the ranks that take part.
        call: name of the call.
        trouble: what was raised here.

    Raises:
        WeftError: something went wrong on some rank; the same text on every rank.
    """
    text = None
    if isinstance(trouble, WeftError):
        number = group.rank_in_errors(group.rank)
        text = str(trouble).removeprefix(f"rank {number}: ")  # which is said for all
    elif trouble is not None:
        text = in_words(trouble)
    try:
        opened(group, call, {}, error=text)
    except WeftError as error:
        raise error from trouble


class preparing:  # as it reads: with preparing(group, name) as call
    """A block that makes a call of a caller's arguments; what is raised in it all ranks raise.

    Arguments may raise any Exception wherever they are looked at. If this rank alone raised it, the
    others would wait for it in the call. An interrupt goes on, and a WireError, of which all know.
    A call that is traced is such an error (`refuse_tracing`).

    In a call's turn it is a block that an opening follows, in which the others are told: also
    between two openings of one call.

    An asynchronous call does not wait for the others here: its `Work` raises what this block did.
    Such a block sets `is_async`, then `job`, and the call is started behind it.

    Attributes:
        is_async: whether the call is asynchronous; set before the other arguments are looked at.
        job: what the call does in its turn.
        device: of the tensors; an asynchronous call on one works in a stream of weft's.
        finish: what makes the caller's result of the job's, for who asks for it, once; or None.

    Raises:
        WeftError: as `confess`.
    """

    is_async = False
    job: Callable[[], Any]
    device = torch.device("cpu")
    finish: Callable[[Any], Any] | None = None

    def __init__(self, group: Group, call: str) -> None:
        self._group = group
        self._name = call

    def __enter__(self) -> Self:
        try:
            refuse_tracing(self._name)
        except WeftError as error:
            self._tell(error)
        self._group.worker.prepares = self._name  # for who asks meanwhile where this rank is
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        self._group.worker.prepares = ""
        if error is None and self.is_async and is_capturing(self.device):
            error = WeftError(IN_A_GRAPH)
        if not isinstance(error, Exception) or isinstance(error, WireError):
            return False
        if self.is_async:  # then the call is to tell it
            self.job = self._confession(error)
        else:
            self._tell(error)
        return True

    def _confession(self, error: Exception) -> Callable[[], None]:
        return functools.partial(confess, self._group, self._name, error)

    def _tell(self, error: Exception) -> None:
        """Tell all ranks, and raise what all raise."""
        self._group.worker.run(self._name, self._confession(error))

    def start(self) -> Any:
        """Make the call; its result or, of an asynchronous one, its `Work`."""
        worker = self._group.worker
        job = self.job
        finish = self.finish
        del self.job  # the traceback of an error in it leads to the frame that has this: a cycle
        if not self.is_async:
            result = worker.call(self._name, job)
            return result if finish is None else finish(result)
        if self.device.type == "cpu" and finish is None:
            return worker.submit(self._name, job)
        return worker.submit(self._name, in_own_stream(self._group, self.device, job, finish))


def in_own_stream(
    group: Group,
    device: torch.device,
    job: Callable[[], T],
    finish: Callable[[T], Any] | None = None,
) -> Aside[T]:
    """A job for `submit` that works in the group's own stream of a device: see `Aside`."""
    return Aside(group.state.setdefault(_STREAMS, Streams()), device, job, finish)


def refuse_tracing(call: str) -> None:
    """Raise WeftError if a call is traced, for what other ranks send would be a constant there."""
    if is_traced():
        raise WeftError(
            f"{call} is traced by torch.jit.trace, make_fx or torch.func.linearize, to which what "
            "comes from other ranks is a constant: call it outside of what they trace"
        )
