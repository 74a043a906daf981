"""What the caller asked for, checked on this rank without raising.

A rank that was asked for something wrong must still make its opening statement, or the others
would wait for it. So a check that fails leaves its sentence in `Request.error`, to be stated.

Training makes the same calls in each step. So what came of the checks of a call that was right is
kept for those of its kind: of one form, of the same dtypes, shapes and arguments, whatever their
rows. That spares looking, and decides nothing: what a rank was asked for travels in every call.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import kernels
from ..errors import WeftError
from ..kernels.ops import OPS, Op
from ..rows import Rows
from ..wire import link
from ..wire.base import is_plain
from . import registry
from .call import Out, overlapping, unwritable

__all__ = ["NOTHING", "Pair", "Request", "RowsLike", "op_name", "outside", "wrong_wire_dtype"]

Pair = tuple[Tensor, Tensor]
"""Indices and values of some rows."""

RowsLike = Tensor | Pair | Rows
"""A sparse COO tensor, (indices, values), or Rows."""

NOTHING = Rows(torch.empty(0, dtype=torch.int64), torch.empty(0))
"""No rows, of no shape in particular."""

_NONE = kernels.Distinct(NOTHING.indices, None, None)
_KNOWN = 256  # kinds of calls whose checks are remembered: training makes the same in each step

_Kind = tuple[torch.Size | None, torch.dtype, torch.dtype, torch.Size]
"""Shape of a COO tensor, None of a pair; dtypes of indices and values; row shape."""

_Key = tuple[_Kind, str, str, torch.dtype | None, str | None, str | None]
"""And op, algorithm, `wire_dtype`, and what the environment says of the last two."""

_LONGEST = 160  # bytes of the name of a caller's function

WIRE_DTYPES = (torch.bfloat16, torch.float16)
"""What `wire_dtype` may be beside None."""


class _WrongError(Exception):
    """Carries the sentence of a failed check."""


@dataclass(slots=True)
class Request:
    """One call's arguments, as far as this rank can make sense of them.

    Attributes:
        rows: what is to be reduced, on the CPU.
        distinct: its indices, sorted, and their duplicates; of a table of a list, that is left to
            `joint`, and so are the checks of indices.
        highest: the largest index, of a call that is `unsorted` and has rows; else -1.
        op: the reduction.
        algorithm: a registered name or "auto".
        dtype: that values travel in.
        rounded: the `wire_dtype` that was asked for.
        out: where the result is wanted.
        fields: the fingerprint: what must be equal on all ranks.
        error: what is wrong, or None.
        restore: gives a result the form that the rows were given in.
        kind: of the rows, where nothing but that was looked at to check them.
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
    kind: _Kind | None = None

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
                self._check_range(self.distinct.indices)

    @classmethod
    def unsorted(cls, rows: object, op: object, algorithm: object, wire_dtype: object) -> Request:
        """Check the arguments of a call that may be served with others: they are sorted together.

        Whoever serves it alone calls `sort`.
        """
        request = cls.of_table(rows, op, algorithm, wire_dtype, None, None)
        if request.error is None and request.rows.indices.numel():
            with request._stating():
                low, high = (int(end) for end in request.rows.indices.aminmax())
                request.highest = high
                if error := outside(low, high, request.rows.height):
                    raise _WrongError(error)
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
        plain = _plain(rows) if out is None else None
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
        plain = _plain(given) if self.kind is not None else None
        return plain[0] if plain is not None and plain[1] == self.kind else None

    def gives(self, pair: Pair) -> Any:
        """A result, on the CPU, in the form that the rows were given in."""
        return pair if self.restore is _pair else self.restore(Rows(*pair, self.rows.height))

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
            if request.rows.indices.numel():
                request._check_range(torch.stack(request.rows.indices.aminmax()))
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
            ours = isinstance(error, _WrongError | WeftError)
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
        rows, self.restore = _unwrapped(given)
        indices, values = rows.indices, rows.values
        if rows.height is not None and not isinstance(rows.height, int):
            raise _WrongError(f"height is {rows.height!r}: pass the number of rows, or None")
        if indices.is_nested or values.is_nested:  # the older kind has no shape
            raise _WrongError("indices or values are nested: they must be strided")
        if indices.dim() != 1:
            raise _WrongError(f"indices have shape {tuple(indices.shape)}: they must be 1-D")
        if indices.dtype not in (torch.int32, torch.int64):
            raise _WrongError(f"indices are {indices.dtype}: they must be int32 or int64")
        if values.dim() == 0 or values.shape[0] != indices.numel():
            raise _WrongError(
                f"{indices.numel()} indices come with values of shape {tuple(values.shape)}: "
                "the first dimension must be the number of indices"
            )
        if values.layout != torch.strided:
            raise _WrongError(f"values have layout {values.layout}: they must be strided")
        if indices.is_quantized or values.is_quantized:  # their scale is not in their memory
            raise _WrongError("indices or values are quantized: pass them dequantized")
        if indices.device != values.device:
            raise _WrongError(f"indices are on {indices.device}, values on {values.device}")
        if values.is_meta:
            raise _WrongError("rows are on meta, where nothing is held: pass tensors with data")
        plain = values
        if values.requires_grad or values.device.type != "cpu" or not is_plain(values):
            plain = values.detach().cpu().resolve_conj().resolve_neg()  # what kernels can read
        if indices.device.type != "cpu":
            indices = indices.cpu()
        self.rows = Rows(indices, plain, rows.height)
        self.fields = {
            "index dtype": str(indices.dtype),
            "value dtype": str(values.dtype),
            "row shape": tuple(values.shape[1:]) if indices.numel() else None,
            "height": "no height" if rows.height is None else rows.height,
        }

    def _check_range(self, sorted_: Tensor) -> None:
        if len(sorted_):
            ends = int(sorted_[0]), int(sorted_[-1])
            if error := outside(*ends, self.rows.height):
                raise _WrongError(error)

    def _take_op(self, op: object) -> None:
        self.op = _op(op)
        self._check_op()
        self.fields["op"] = self.op.name

    def _check_op(self) -> None:
        if reason := self.op.refuses(self.rows.values.dtype):
            raise _WrongError(reason)

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
            raise _WrongError(error)
        assert isinstance(dtype, torch.dtype)
        if not own.is_floating_point:
            raise _WrongError(
                f"wire_dtype is {dtype}, which is for floating point, and the values are {own}: "
                "leave it None"
            )
        self.rounded, self.fields["wire dtype"] = dtype, str(dtype)
        self.dtype = self.travelling(own)

    def _take_out(self, out: object) -> None:
        if out is None or callable(out):
            self.out = out
            return
        if not (isinstance(out, tuple | list) and len(out) == 2):
            raise _WrongError(
                f"out is a {type(out).__name__}: pass (indices, values) or a function that "
                "allocates them"
            )
        values = self.rows.values
        wanted = (("indices", self.rows.indices.dtype), ("values", values.dtype))
        for tensor, (name, dtype) in zip(out, wanted, strict=True):
            if not isinstance(tensor, Tensor) or tensor.dtype != dtype:
                what = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
                raise _WrongError(f"out's {name} are {what}: they must be {dtype}")
            if reason := unwritable(tensor):
                raise _WrongError(f"out's {name} are {reason}")
        indices, space = out
        if indices.dim() != 1 or space.dim() == 0 or space.shape[0] != indices.numel():
            raise _WrongError(
                f"out has indices of shape {tuple(indices.shape)} and values of shape "
                f"{tuple(space.shape)}: both must hold the same number of rows"
            )
        if not len(self.rows):  # then the row shape is the others' to say, and must be this
            self.fields["row shape"] = tuple(space.shape[1:])
        elif space.shape[1:] != values.shape[1:]:
            raise _WrongError(
                f"out's values have row shape {tuple(space.shape[1:])}, the rows have "
                f"{tuple(values.shape[1:])}"
            )
        if overlapping(indices, space):
            raise _WrongError("out's indices and values are in the same memory: pass two buffers")
        self.out = (indices, space.detach())


_known: dict[_Key, Request] = {}
"""What came of the checks of calls that were right, without rows."""


def _plain(given: object) -> tuple[Pair, _Kind] | None:
    """Rows that may be taken as they are, if there are any, and their kind; None: look closer."""
    form = None
    pair: Pair
    if type(given) is tuple and len(given) == 2:
        pair = given
        indices, values = pair
        if not type(indices) is type(values) is Tensor:
            return None
    elif type(given) is Tensor and given.layout is torch.sparse_coo and given.is_cpu:
        if given.sparse_dim() != 1 or given.requires_grad:
            return None
        pair = indices, values = given._indices()[0], given._values()
        form = given.shape
    else:
        return None
    shape, rows = values.shape, indices.shape
    plain = (
        len(rows) == 1
        and len(shape) > 0
        and shape[0] == rows[0] > 0
        and values.layout is torch.strided
        and indices.is_cpu
        and values.is_cpu
        and not values.requires_grad
        and is_plain(values)
    )
    if not plain:
        return None
    return pair, (form, indices.dtype, values.dtype, shape[1:])


def wrong_wire_dtype(dtype: object) -> str | None:
    """What is wrong with a `wire_dtype`, in a sentence, or None."""
    if dtype is None or (isinstance(dtype, torch.dtype) and dtype in WIRE_DTYPES):
        return None
    return f"wire_dtype is {dtype}: pass {' or '.join(map(str, WIRE_DTYPES))}, or None"


def _key(kind: _Kind, op: object, algorithm: object, wire_dtype: object) -> _Key | None:
    """What the checks of a call with such rows depend on, if that is all."""
    if not (type(op) is type(algorithm) is str):
        return None
    if wire_dtype is not None and not isinstance(wire_dtype, torch.dtype):
        return None
    said = os.environ.get("WEFT_ALGORITHM"), os.environ.get("WEFT_LINK")
    return (kind, op, algorithm, wire_dtype, *said)


def _unwrapped(given: object) -> tuple[Rows, Callable[[Rows], Any]]:
    """The rows that were given, and what gives a result the same form, on the same device."""
    if isinstance(given, Rows):
        if not (isinstance(given.indices, Tensor) and isinstance(given.values, Tensor)):
            what = f"{type(given.indices).__name__} and {type(given.values).__name__}"
            raise _WrongError(f"rows are weft.Rows of {what}: pass tensors")
        device = given.values.device
        return given, lambda rows: Rows(
            rows.indices.to(device), rows.values.to(device), given.height
        )
    if isinstance(given, Tensor):
        if given.layout != torch.sparse_coo:
            raise _WrongError(
                f"rows is a tensor of layout {given.layout}: pass a sparse COO tensor "
                "(x.to_sparse(1) makes one), (indices, values) or weft.Rows"
            )
        shape, sparse = given.shape, given.sparse_dim()
        device = given.device

        def restore(rows: Rows) -> Tensor:
            if device.type != "cpu":
                rows = Rows(rows.indices.to(device), rows.values.to(device), rows.height)
            return rows.to_coo(shape[:sparse] + rows.row_shape, canonical=True)

        return Rows.from_coo(given.detach()), restore
    if isinstance(given, tuple | list) and len(given) == 2:
        indices, values = given
        if isinstance(indices, Tensor) and isinstance(values, Tensor):
            device = values.device
            if device.type == "cpu":
                return Rows(indices, values), _pair
            return Rows(indices, values), lambda rows: (
                rows.indices.to(device),
                rows.values.to(device),
            )
    raise _WrongError(
        f"rows is a {type(given).__name__}: pass a sparse COO tensor, (indices, values) or "
        "weft.Rows"
    )


def _pair(rows: Rows) -> Pair:
    return rows.indices, rows.values


def outside(low: int, high: int, height: int | None) -> str | None:
    """What is wrong with indices from `low` to `high`."""
    if low < 0:
        return f"index {low} is negative: indices count from 0"
    if height is not None and high >= height:
        return f"index {high} is outside of a height of {height}"
    return None


def op_name(op: object) -> object:
    """The name of a `torch.distributed.ReduceOp`; anything else as it is."""
    if not isinstance(op, dist.ReduceOp | dist.ReduceOp.RedOpType):
        return op
    names = {"PRODUCT": "prod"}
    name = next(
        (n for n in dist.ReduceOp.RedOpType.__members__ if op == getattr(dist.ReduceOp, n)), "?"
    )
    return names.get(name, name.lower())


def _op(op: object) -> Op:
    op = op_name(op)
    if isinstance(op, str):
        if op not in OPS:
            raise _WrongError(
                f"op {op!r} is unknown: use one of {', '.join(OPS)}, a torch ReduceOp, or a "
                "function of two tensors"
            )
        return OPS[op]
    if callable(op):
        name = getattr(op, "__qualname__", None) or type(op).__qualname__
        name = f"{type(op).__name__} {getattr(op, '__module__', '?')}.{name}"
        if len(name.encode()) > _LONGEST:  # it travels with every call
            digest = hashlib.sha256(name.encode()).hexdigest()[:12]
            name = f"{name[: _LONGEST // 4]}... (digest {digest})"
        return Op(name, op, builtin=False)
    raise _WrongError(f"op is a {type(op).__name__}: pass a name, a ReduceOp or a function")
