"""What the caller asked for, checked on this rank without raising.

A rank that was asked for something wrong must still make its opening statement, or the others
would wait for it. So a check that fails leaves its sentence in `Request.error`, to be stated. The
checks of one argument, which raise, are in `arguments`; here is what they come to for a call.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from .. import kernels
from ..errors import WeftError
from ..kernels.ops import OPS, Op
from ..rows import Rows
from . import link, registry
from .arguments import (
    WrongError,
    operation,
    outside,
    place,
    readable,
    unwrapped,
    wrong_wire_dtype,
)
from .call import Out

NOTHING = Rows(torch.empty(0, dtype=torch.int64), torch.empty(0))
"""No rows, of no shape in particular."""

_NONE = kernels.Distinct(NOTHING.indices, None, None)


@dataclass(slots=True)
class Request:
    """One call's arguments, as far as this rank can make sense of them.

    Attributes:
        rows: what is to be reduced, on the CPU.
        distinct: its indices, sorted, and their duplicates.
        highest: the largest index, once looked for; -1 if there are none.
        op: the reduction.
        algorithm: a registered name or "auto".
        dtype: that values travel in.
        rounded: the `wire_dtype` that was asked for.
        out: where the result is wanted.
        fields: the fingerprint: what must be equal on all ranks.
        error: what is wrong, or None.
        restore: gives a result the form that the rows were given in.
        agreed: the fields as all ranks agreed on them, once a call was opened for this request.
    """

    rows: Rows = NOTHING
    distinct: kernels.Distinct = _NONE
    highest: int = -1
    op: Op = OPS["sum"]
    algorithm: str = "auto"
    dtype: torch.dtype = NOTHING.values.dtype
    rounded: torch.dtype | None = None
    out: Out = None
    fields: dict[str, object] = field(default_factory=dict)
    error: str | None = None
    restore: Callable[[Rows], Any] = lambda rows: rows
    agreed: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        rows: object,
        op: object,
        algorithm: object,
        wire_dtype: object,
        out: object,
    ) -> Request:
        """Check the arguments of a call, and sort the indices."""
        request = cls.unsorted(rows, op, algorithm, wire_dtype, out)
        request.sort()
        return request

    @classmethod
    def unsorted(
        cls, rows: object, op: object, algorithm: object, wire_dtype: object, out: object
    ) -> Request:
        """Check the arguments of a call, all but the indices."""
        request = cls()
        with request._stating():
            request._take_rows(rows)
            request._take_op(op)
            request._take_algorithm(algorithm)
            request._take_wire_dtype(wire_dtype)
            request._take_out(out)
        return request

    def sort(self) -> None:
        """Find what is distinct among the indices, and check them, if that was not done before."""
        indices = self.rows.indices
        if self.error is None and indices.numel() and not self.distinct.indices.numel():
            with self._stating():
                self.distinct = kernels.distinct(indices)
                found = self.distinct.indices
                self.highest = int(found[-1])
                self._check_range(int(found[0]), self.highest)

    def look(self) -> None:
        """Find the largest index, and check them all, without sorting them."""
        if self.error is None:
            with self._stating():
                self._take_ends()

    def of_rows(self, rows: Rows) -> Request:
        """The same call for other rows, of the same dtype of values, which are right."""
        request = replace(self, rows=rows, distinct=_NONE, out=None)
        request.fields = self.fields | _fields(rows)
        request.sort()
        return request

    @classmethod
    def to_move(cls, rows: object, out: object, wire_dtype: object) -> Request:
        """Check the arguments of a call that moves rows as they are: unsorted, of any dtype."""
        request = cls()
        with request._stating():
            request._take_rows(rows)
            request._take_ends()
            request._take_algorithm("auto")
            request._take_wire_dtype(wire_dtype)
            request._take_out(out)
        return request

    @contextmanager
    def _stating(self) -> Iterator[None]:
        """State what is found to be wrong within, instead of raising it."""
        try:
            yield
        except Exception as error:  # raised here it would leave the others waiting
            ours = isinstance(error, WrongError | WeftError)
            self.error = str(error) if ours else f"{type(error).__name__}: {error}"
            self.dtype = self.rows.values.dtype

    @property
    def wide(self) -> torch.dtype | None:
        """The dtype of the values, where they travel in another; else None."""
        own = self.rows.values.dtype
        return None if self.dtype == own else own

    @property
    def capacity(self) -> int | None:
        """Rows that the caller's buffers hold, None where that is no limit."""
        return None if self.out is None or callable(self.out) else self.out[0].numel()

    @property
    def fallible(self) -> bool:
        """Whether a function of the caller's takes part."""
        return callable(self.out) or not self.op.builtin

    def travelling(self, own: torch.dtype) -> torch.dtype:
        """The dtype in which values of this one travel."""
        # what is as narrow already would be rounded for nothing
        if self.rounded is None or own.itemsize <= self.rounded.itemsize:
            return own
        return self.rounded

    def take_out(self, out: object) -> None:
        """Check `out`, for a request that was made without."""
        with self._stating():
            self._take_out(out)

    def _take_rows(self, given: object) -> None:
        rows, self.restore = unwrapped(given)
        self.rows = readable(rows)
        self.fields = _fields(self.rows)

    def _take_ends(self) -> None:
        if self.rows.indices.numel():
            low, self.highest = (int(end) for end in self.rows.indices.aminmax())
            self._check_range(low, self.highest)

    def _check_range(self, low: int, high: int) -> None:
        if error := outside(low, high, self.rows.height):
            raise WrongError(error)

    def _take_op(self, op: object) -> None:
        self.op = operation(op)
        if reason := self.op.refuses(self.rows.values.dtype):
            raise WrongError(reason)
        self.fields["op"] = self.op.name

    def _take_algorithm(self, name: object) -> None:
        chosen = os.environ.get("WEFT_ALGORITHM", "auto") if name == "auto" else name
        if chosen != "auto":
            registry.find(str(chosen))
        self.algorithm = self.fields["algorithm"] = str(chosen)
        said = os.environ.get("WEFT_LINK")
        if said is not None:
            link.parse(said)  # raises here rather than when the link is needed
        self.fields["WEFT_LINK"] = "nothing" if said is None else said

    def _take_wire_dtype(self, dtype: object) -> None:
        own = self.rows.values.dtype
        if dtype is None:
            self.dtype, self.fields["wire dtype"] = own, "no wire_dtype"
            return
        if error := wrong_wire_dtype(dtype):
            raise WrongError(error)
        assert isinstance(dtype, torch.dtype)
        if not own.is_floating_point:
            raise WrongError(
                f"wire_dtype is {dtype}, which is for floating point, and the values are {own}: "
                "leave it None"
            )
        self.rounded, self.fields["wire dtype"] = dtype, str(dtype)
        self.dtype = self.travelling(own)

    def _take_out(self, out: object) -> None:
        self.out = place(out, self.rows)
        if isinstance(self.out, tuple) and not len(self.rows):
            # then the row shape is the others' to say, and must be this
            self.fields["row shape"] = tuple(self.out[1].shape[1:])


def _fields(rows: Rows) -> dict[str, object]:
    """What must be equal on all ranks, of rows."""
    return {
        "index dtype": str(rows.indices.dtype),
        "value dtype": str(rows.values.dtype),
        "row shape": tuple(rows.values.shape[1:]) if len(rows) else None,
        "height": "no height" if rows.height is None else rows.height,
    }


def root_in(given: Any, size: int) -> int:
    """The root's number, as the caller gave it; -1 where that is no rank of so many."""
    try:
        root = operator.index(given)
    except Exception:  # an object of the caller's may raise anything
        return -1
    return root if 0 <= root < size else -1


def take_root(request: Request, name: str, root: int, given: object, size: int) -> None:
    """Have all ranks compare the root, `root_in` of what was given; state what is wrong."""
    request.fields[name] = root
    if root < 0:
        try:
            said = repr(given)
        except Exception:  # raised here it would leave the others waiting
            said = f"a {type(given).__name__}"
        request.error = request.error or (
            f"{name} is {said}: pass a rank of the group, 0 to {size - 1}"
        )
