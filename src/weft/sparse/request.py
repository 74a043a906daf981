"""What the caller asked for, checked on this rank without raising.

A rank that was asked for something wrong must still make its opening statement, or the others
would wait for it. So a check that fails leaves its sentence in `Request.error`, to be stated. The
checks of one argument, which raise, are in `arguments`; here is what they come to for a call.

Training makes the same calls in each step. So what came of the checks of a call that was right is
kept for those of its kind: of one form, of the same dtypes, shapes and arguments, whatever their
rows. That spares looking, and decides nothing: what a rank was asked for travels in every call.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from .. import kernels
from ..errors import WeftError
from ..kernels.ops import OPS, Op
from ..rows import Rows
from . import link, registry
from .arguments import (
    Kind,
    Pair,
    WrongError,
    operation,
    outside,
    paired,
    place,
    readable,
    unwrapped,
    usual,
    wrong_wire_dtype,
)
from .call import Out

__all__ = ["NOTHING", "Request"]

NOTHING = Rows(torch.empty(0, dtype=torch.int64), torch.empty(0))
"""No rows, of no shape in particular."""

_NONE = kernels.Distinct(NOTHING.indices, None, None)
_KNOWN = 256  # kinds of calls whose checks are remembered: training makes the same in each step

_Key = tuple[Kind, str, str, torch.dtype | None, str | None, str | None]
"""And op, algorithm, `wire_dtype`, and what the environment says of the last two."""


@dataclass(slots=True)
class Request:
    """One call's arguments, as far as this rank can make sense of them.

    Attributes:
        rows: what is to be reduced, on the CPU.
        distinct: its indices, sorted, and their duplicates; of a table of a list, that is left to
            `joint`, and so are the checks of indices.
        highest: the largest index, of rows that are not sorted here; -1 if there are none.
        op: the reduction.
        algorithm: a registered name or "auto".
        dtype: that values travel in.
        rounded: the `wire_dtype` that was asked for.
        out: where the result is wanted.
        fields: the fingerprint: what must be equal on all ranks.
        error: what is wrong, or None.
        restore: gives a result the form that the rows were given in.
        kind: of the rows, where nothing but that was looked at to check them.
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
    kind: Kind | None = None
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
        """Check the arguments of a call."""
        request = cls.of_table(rows, op, algorithm, wire_dtype, out, None)
        request.sort()
        return request

    def sort(self) -> None:
        """Find what is distinct among the indices, and check them, if that was not done before."""
        indices = self.rows.indices
        if self.error is None and indices.numel() and not self.distinct.indices.numel():
            with self._stating():
                self.distinct = kernels.distinct(indices)
                found = self.distinct.indices
                self._check_range(int(found[0]), int(found[-1]))

    @classmethod
    def unsorted(cls, rows: object, op: object, algorithm: object, wire_dtype: object) -> Request:
        """Check the arguments of a call that may be served with others: they are sorted together.

        Whoever serves it alone calls `sort`.
        """
        request = cls.of_table(rows, op, algorithm, wire_dtype, None, None)
        if request.error is None:
            with request._stating():
                request._take_ends()
        return request

    @classmethod
    def of_table(
        cls,
        rows: object,
        op: object,
        algorithm: object,
        wire_dtype: object,
        out: object,
        before: Request | None,
    ) -> Request:
        """The same but for the indices; `before` is of the table before it, if it is in a list."""
        plain = usual(rows) if out is None else None
        key = None
        if plain is not None:
            pair, kind = plain
            key = _key(kind, op, algorithm, wire_dtype)
            like = _known.get(key) if key is not None else None
            if like is not None:
                found = like._of(Rows(*pair, None if kind[0] is None else kind[0][0]))
                found.fields = dict(like.fields)  # to which some calls add
                return found
        request = cls()
        with request._stating():
            request._take_rows(rows)
            if before is None or before.error is not None:
                request._take_op(op)
                request._take_algorithm(algorithm)
            else:  # what is the same for all is looked at once
                request.op, request.algorithm = before.op, before.algorithm
                for name in ("op", "algorithm", "WEFT_LINK"):
                    request.fields[name] = before.fields[name]
                request._check_op()
            request._take_wire_dtype(wire_dtype)
            request._take_out(out)
        if key is not None and request.error is None:
            if len(_known) >= _KNOWN:
                _known.clear()
            request.kind = key[0]
            model = _known[key] = request._of(NOTHING)
            model.fields = dict(request.fields)
        return request

    def like(self, given: object) -> Pair | None:
        """Indices and values of rows of just the kind of this request's; None: perhaps not."""
        plain = usual(given) if self.kind is not None else None
        return plain[0] if plain is not None and plain[1] == self.kind else None

    def gives(self, pair: Pair) -> Any:
        """A result, on the CPU, in the form that the rows were given in."""
        return pair if self.restore is paired else self.restore(Rows(*pair, self.rows.height))

    def _of(self, rows: Rows) -> Request:
        """This request for other rows of its kind: their checks would say the same."""
        return Request(
            rows=rows,
            op=self.op,
            algorithm=self.algorithm,
            dtype=self.dtype,
            rounded=self.rounded,
            fields=self.fields,
            restore=self.restore,
            kind=self.kind,
        )

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
        indices, values = self.rows.indices, self.rows.values
        self.fields = {
            "index dtype": str(indices.dtype),
            "value dtype": str(values.dtype),
            "row shape": tuple(values.shape[1:]) if indices.numel() else None,
            "height": "no height" if rows.height is None else rows.height,
        }

    def _take_ends(self) -> None:
        if self.rows.indices.numel():
            low, self.highest = (int(end) for end in self.rows.indices.aminmax())
            self._check_range(low, self.highest)

    def _check_range(self, low: int, high: int) -> None:
        if error := outside(low, high, self.rows.height):
            raise WrongError(error)

    def _take_op(self, op: object) -> None:
        self.op = operation(op)
        self._check_op()
        self.fields["op"] = self.op.name

    def _check_op(self) -> None:
        if reason := self.op.refuses(self.rows.values.dtype):
            raise WrongError(reason)

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


_known: dict[_Key, Request] = {}
"""What came of the checks of calls that were right, without rows."""


def _key(kind: Kind, op: object, algorithm: object, wire_dtype: object) -> _Key | None:
    """What the checks of a call with such rows depend on, if that is all."""
    if not (type(op) is type(algorithm) is str):
        return None
    if wire_dtype is not None and not isinstance(wire_dtype, torch.dtype):
        return None
    said = os.environ.get("WEFT_ALGORITHM"), os.environ.get("WEFT_LINK")
    return (kind, op, algorithm, wire_dtype, *said)
