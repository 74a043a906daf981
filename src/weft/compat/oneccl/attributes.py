"""Collective call attributes: the fields that the first two generations share, and their effect.

Source: "Collective Call Attributes" in oneCCL's specification, and the comments in its headers.
Where the C interface has a pointer for a buffer that a callback returns, the function here returns
the buffer.
"""

from __future__ import annotations

import enum
import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft import WeftError

from ..arguments import integer
from .buffers import seen

MODES = ("regular", "disable", "keep_precision")
_LONGEST = 128  # bytes of a match_id: it travels with every call
_log = logging.getLogger("weft")


class Status(enum.IntEnum):
    """What a callback returns: oneCCL's codes. A callback that returns None succeeded, too.

    Example:
        >>> Status(2)
        <Status.invalid_arguments: 2>
    """

    success = 0
    out_of_resource = 1
    invalid_arguments = 2
    unimplemented = 3
    runtime_error = 4
    blocked_due_to_resize = 5


@dataclass(frozen=True, slots=True)
class FnContext:
    """What a callback is told about its call.

    Attributes:
        match_id: that of the attributes.
        offset: bytes from the start of the operation's values to the buffer; always 0, because weft
            passes all values at once.
    """

    match_id: str = ""
    offset: int = 0


@dataclass(slots=True, kw_only=True)
class Attributes:
    """Settings of a call. All of them are optional, and each may be set after they were made.

    A call checks them, and keeps those that it found: a change after the call does not affect it.

    Buffers in callbacks are 1-D tensors, counts are numbers of elements, dtypes are torch's.
    `out_count` is a tensor of one integer. It holds `in_count`, which the function must leave there
    (in C the function writes it).

    Attributes:
        prologue_fn: `(in_buf, in_count, in_dtype, context) -> out_buf`. It is called with the
            values that this rank passed. weft reduces what it returns: a tensor of as many values,
            of any dtype that weft reduces. If that is another dtype, `epilogue_fn` must be set. It
            cannot be used with values of uint64.
        epilogue_fn: `(in_buf, in_count, in_dtype, out_buf, out_count, out_dtype, context) ->
            status`. It is called with the reduced values, and fills `out_buf` with the values that
            the caller gets.
        reduction_fn: `(in_buf, in_count, inout_buf, out_count, dtype, context) -> status`. It is
            the reduction "custom": it combines `inout_buf`, which has the lower rank's values, with
            `in_buf`, and leaves the result in `inout_buf`. It must be associative.
        priority: has no effect, as under oneCCL's default CCL_PRIORITY=none: the calls of a group
            run in the order in which they were made. A call logs a value other than 0, once.
        synchronous: whether the call waits until it is done.
        to_cache: has no effect: weft caches no schedules.
        match_id: the name of this operation, at most 128 bytes in UTF-8. It must be the same on
            every rank. If ranks are in calls of different names, every rank raises an error; weft
            does not reorder calls by their names.

    Example:
        >>> attributes = Attributes(synchronous=True)
        >>> attributes.match_id = "embedding"
        >>> attributes.context
        FnContext(match_id='embedding', offset=0)
    """

    prologue_fn: Callable[..., Any] | None = None
    epilogue_fn: Callable[..., Any] | None = None
    reduction_fn: Callable[..., Any] | None = None
    priority: int = 0
    synchronous: bool = False
    to_cache: bool = False
    match_id: str = ""

    @property
    def context(self) -> FnContext:
        """What callbacks get as `context`."""
        return FnContext(self.match_id)

    def check(self) -> None:
        """Check the fields.

        Raises:
            WeftError: `match_id` is no str or too long, or a function cannot be called.
        """
        if not isinstance(self.match_id, str) or len(self.match_id.encode()) > _LONGEST:
            raise WeftError(
                f"match_id is {self.match_id!r:.40}: pass a str of at most {_LONGEST} bytes"
            )
        names = "prologue_fn", "epilogue_fn", "reduction_fn"
        check_functions({name: getattr(self, name) for name in names})
        if self.priority:
            _log_priority(self.priority)

    def op(self, reduction: Any) -> Any:
        """The `op=` of weft's call for a reduction.

        Raises:
            WeftError: it is "custom", and `reduction_fn` is None.
        """
        if not (isinstance(reduction, str) and reduction == "custom"):
            return reduction
        if self.reduction_fn is None:
            raise WeftError("the reduction is custom, and there is no function: pass the function")
        return _out_of_place(self.reduction_fn, self.context)

    def before(self, values: Tensor) -> Tensor:
        """The values that are reduced, given the caller's: what `prologue_fn` returns.

        Raises:
            WeftError: it returned no tensor of as many values, or one of a dtype that needs an
                `epilogue_fn`.
        """
        if self.prologue_fn is None:
            return values
        count = values.numel()
        out = self.prologue_fn(values, count, values.dtype, self.context)
        if not isinstance(out, Tensor) or out.numel() != count:
            what = f"{out.numel()} values" if isinstance(out, Tensor) else type(out).__name__
            raise WeftError(f"prologue_fn returned {what}, not a tensor of {count} values")
        if out.dtype != values.dtype and self.epilogue_fn is None:
            raise WeftError(
                f"prologue_fn made {out.dtype} of {values.dtype}: pass an epilogue_fn that makes "
                "the result of it"
            )
        return seen(out, count, out.dtype, "prologue_fn's out_buf")

    def after(self, result: Tensor, dtype: torch.dtype) -> Tensor:
        """The values that the caller gets, given the reduced ones: what `epilogue_fn` fills.

        Raises:
            WeftError: it did not succeed, or made another number of values.
        """
        if self.epilogue_fn is None:
            return result
        count = result.numel()
        out = torch.empty_like(result, dtype=dtype)
        written = torch.tensor([count], device="cpu")
        status = self.epilogue_fn(result, count, result.dtype, out, written, dtype, self.context)
        _check_made(status, written, count, "epilogue_fn")
        return out


@functools.cache
def _log_priority(priority: int) -> None:
    """Log that a priority has no effect, once for each: a program passes it with every call."""
    _log.warning(
        "priority=%s has no effect: the calls of a group run in the order they were made", priority
    )


def check_functions(given: Mapping[str, object]) -> None:
    """Raise WeftError if one of these, given by name, is neither None nor callable."""
    for name, function in given.items():
        if function is not None and not callable(function):
            raise WeftError(f"{name} is a {type(function).__name__}: pass a function, or None")


def check_results(name: str, mode: object, callbacks: Mapping[str, object]) -> None:
    """Raise WeftError unless the attributes `name` have one callback, and a mode that exists."""
    if mode not in MODES:
        raise WeftError(f"coalesce_mode is {mode!r}: use one of {', '.join(MODES)}")
    there = {each: function for each, function in callbacks.items() if function is not None}
    if len(there) != 1:
        how, last = "both {} and" if there else "neither {} nor", list(callbacks)
        raise WeftError(
            f"{name} has {how.format(last[0])} {last[1]}: results go to one of them, so set one"
        )
    check_functions(there)


def check_status(status: object, name: str) -> None:
    """Check what a callback returned.

    Raises:
        WeftError: it is a status other than success, or no status.
    """
    code = Status.success if status is None else integer(status)
    if code is None:  # such as the tensor that a lambda returns without meaning to
        raise WeftError(f"{name} returned status {status!r:.60}: return a Status, or nothing")
    if code != Status.success:
        raise WeftError(f"{name} returned status {next((s for s in Status if s == code), code)!r}")


def _check_made(status: object, written: Tensor, count: int, name: str) -> None:
    """Raise WeftError if a callback failed, or made another number of values than it was given."""
    check_status(status, name)
    if int(written) != count:
        raise WeftError(f"{name} made {int(written)} values of {count}: make as many")


def _out_of_place(function: Callable[..., Any], context: FnContext) -> Callable[..., Tensor]:
    """A reduction that works in place, as weft's `op=`, which returns a new tensor."""

    def combine(left: Tensor, right: Tensor) -> Tensor:
        inout = left.clone(memory_format=torch.contiguous_format)
        count = right.numel()
        written = torch.tensor([count], device="cpu")
        status = function(
            right.contiguous().view(-1), count, inout.view(-1), written, right.dtype, context
        )
        _check_made(status, written, count, "reduction_fn")
        return inout

    # ranks compare their reductions by these names
    combine.__module__ = getattr(function, "__module__", None) or "?"
    combine.__qualname__ = getattr(function, "__qualname__", type(function).__qualname__)
    return combine
