"""The arguments of a call, checked on this rank: what is wrong with them is raised."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import kernels
from ..base.arguments import as_integer, printable, shown, wrong_root
from ..base.errors import WeftError, check, meant, summed_up
from ..base.tensors import (
    dtype_in,
    has_elements,
    is_made_of_others,
    is_transformed,
    lacking,
    plain,
    serves,
    shape_in,
    wrong_row_shape,
)
from ..call.fingerprint import UNKNOWN
from ..call.opening import Opening
from ..kernels.ops import ELSEWHERE, HALVES, OPS, Op
from .registry import PLAIN, asked_for
from .rows import Rows

NOTHING = Rows(
    torch.empty(0, dtype=torch.int64, device="cpu"),
    torch.empty(0, dtype=torch.float32, device="cpu"),
)
"""No rows, of no shape in particular; wherever the caller's tensors are made by default."""

WIRE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""What `wire_dtype` may be beside None."""

_MOVE = object()  # the op of a call that moves
NO_CHOICE = object()
"""The algorithm of a call that has no choice of one, whatever the environment says."""
_HIGHEST = 2**63  # what indices of int64 reach
_LONGEST = 160  # bytes that the name of a caller's function may have


@dataclass(slots=True)
class Request:
    """One call's arguments, which are valid.

    Attributes:
        rows: the rows to be reduced or moved.
        distinct: their indices sorted, each once, and where the duplicates are, once found; None of
            rows that only move, and without rows.
        highest: the largest index, once found; -1 without rows.
        moves: the call only moves rows: they are neither sorted nor combined, and of any dtype. A
            rank without rows need not know their dtype and shape.
        op: the reduction, unless the call moves.
        algorithm: a name, or "auto".
        dtype: the dtype in which values are sent.
        rounded: the argument `wire_dtype`.
        fields: the fingerprint: values that must be equal on all ranks.
        restore: converts a result to the form of the rows that were given.
        naming: what errors begin with; of a list it says which table.
        wrong_ends: says what else is wrong with the smallest and the largest index.
    """

    rows: Rows = NOTHING
    distinct: kernels.Distinct | None = None
    highest: int = -1
    moves: bool = False
    op: Op = OPS["sum"]
    algorithm: str = "auto"
    dtype: torch.dtype = NOTHING.values.dtype
    rounded: torch.dtype | None = None
    fields: dict[str, object] = field(default_factory=dict)
    restore: Callable[[Rows], Any] = lambda rows: rows
    naming: str = ""
    wrong_ends: Callable[[int, int], str | None] = lambda low, high: None

    @classmethod
    def of(cls, rows: object, op: object, algorithm: object, wire_dtype: object) -> Request:
        """Check the arguments of a call, and sort the indices unless it moves."""
        return cls.asked(op, algorithm, wire_dtype).given(rows).look()

    @classmethod
    def to_move(cls, rows: object, wire_dtype: object) -> Request:
        """Check the arguments of a call that moves rows unsorted and uncombined, of any dtype."""
        return cls.of(rows, _MOVE, NO_CHOICE, wire_dtype)

    @classmethod
    def asked(cls, op: object, algorithm: object, wire_dtype: Any) -> Request:
        """Check the arguments that do not depend on the rows."""
        request = cls(moves=op is _MOVE)
        if not request.moves:
            request.op = operation(op)
            request.fields["op"] = request.op.name
        if algorithm is not NO_CHOICE:
            request.algorithm = request.fields["algorithm"] = asked_for(algorithm)
        if not request.op.builtin and request.algorithm not in ("auto", PLAIN):
            raise WeftError(
                f"algorithm {request.algorithm} takes no function as op: use auto, or {PLAIN}"
            )
        check(wrong_wire_dtype(wire_dtype))
        request.rounded = wire_dtype
        request.fields["wire_dtype"] = str(wire_dtype)
        return request

    def given(self, rows: object) -> Request:
        """The same call for these rows: check them, all but the values of the indices."""
        given, restore = unwrapped(rows, combined=not self.moves)
        given = readable(given)
        fields = _fields(given) | self.fields
        if isinstance(rows, Tensor):  # else the height is all there is to know
            fields["sparse shape"] = tuple(rows.shape[: rows.sparse_dim()])
        own = given.values.dtype
        if not self.moves and (reason := self.op.refuses(own)):
            raise WeftError(reason)
        check(wrong_wire_dtype(self.rounded, own))
        dtype = travelling(own, self.rounded)
        request = replace(self, rows=given, dtype=dtype, fields=fields, restore=restore)
        request._widen()
        return request

    @property
    def device(self) -> torch.device:
        """Where the rows are."""
        return self.rows.values.device

    def look(self) -> Request:
        """Check indices on the CPU, and sort them unless the call moves.

        Others are for the call's turn, which has the deadline.
        """
        indices = self.rows.indices
        if indices.is_cpu and self.moves:
            self.look_at_ends(Tensor.tolist)
        elif indices.is_cpu and indices.numel():
            self.distinct = kernels.distinct(indices)
            ascending = self.distinct.indices
            self.take_ends(int(ascending[0]), int(ascending[-1]))
        return self

    def look_at_ends(self, read: Callable[[Tensor], list[int]]) -> None:
        """Check the indices without sorting them; `read` has a device's numbers on the host."""
        indices = self.rows.indices
        if indices.numel():
            self.take_ends(*read(torch.stack(indices.aminmax())))

    def of_rows(self, rows: Rows) -> Request:
        """The same call for other, valid rows, whose values have the same dtype."""
        return replace(self, rows=rows, distinct=None, fields=self.fields | _fields(rows))

    def take_root(self, name: str, root: int, given: object, size: int) -> None:
        """Add the root to the fingerprint; it is an error if `given` was no rank (`root_in`)."""
        check(wrong_root(name, root, given, size))
        self.fields[name] = root

    def take_ends(self, low: int, high: int) -> None:
        """Check the smallest and the largest index. Raises WeftError: one is out of bounds."""
        self.highest = high
        if wrong := outside(low, high, self.rows.height) or self.wrong_ends(low, high):
            raise WeftError(f"{self.naming}{wrong}")

    def _widen(self) -> None:
        """Have half precision in float32 from here on, if the caller asks and the op combines it.

        Then a rank's repeats and all partial results are float32, as in any call for float32. The
        result is rounded when it is handed out.
        """
        own = self.rows.values.dtype
        is_exact = self.op.builtin and not self.op.rounds
        if self.rounded is not torch.float32 or own not in HALVES or self.moves or is_exact:
            return
        self.dtype = torch.float32
        self.rows = replace(self.rows, values=self.rows.values.float())
        restore = self.restore
        self.restore = lambda found: restore(replace(found, values=found.values.to(own)))


def _fields(rows: Rows) -> dict[str, object]:
    """The fields of the fingerprint that describe rows."""
    return {
        "index dtype": str(rows.indices.dtype),
        "value dtype": str(rows.values.dtype),
        "row shape": tuple(rows.values.shape[1:]) if len(rows) else None,
        "height": "no height" if rows.height is None else rows.height,
    }


def unwrapped(given: object, *, combined: bool) -> tuple[Rows, Callable[[Rows], Any]]:
    """The rows in an argument, and the function that converts a result to the same form.

    Args:
        given: the argument.
        combined: whether the rows of results are sorted and unique.

    Raises:
        WeftError: the argument has none of the accepted forms.
    """
    form: Callable[[Rows], Any]
    if isinstance(given, Tensor):
        stands = is_made_of_others(given) or is_transformed(given)
        if stands or given.layout != torch.sparse_coo:
            what = lacking(given) if stands else f"a tensor of layout {given.layout}"
            raise WeftError(
                f"rows is {what}: pass a sparse COO tensor (x.to_sparse(1) makes one), "
                "(indices, values) or weft.Rows"
            )
        heights = given.shape[: given.sparse_dim()]
        _check_elements("indices", given._indices())  # which are read here
        rows = Rows.from_coo(given.detach())

        def form(rows: Rows) -> Tensor:
            # Duplicates must not be marked as coalesced, not even for a moment: while another
            # thread passes `check_invariants=True`, torch checks the tensors of all threads.
            return rows.to_coo(heights + rows.row_shape, canonical=combined)

    elif isinstance(given, Rows):
        rows, form = given, lambda result: Rows(result.indices, result.values, given.height)
    elif isinstance(given, tuple | list) and len(given) == 2:
        rows, form = Rows(*given), lambda result: (result.indices, result.values)
    else:
        raise WeftError(
            f"rows is a {type(given).__name__}: pass a sparse COO tensor, (indices, values) or "
            "weft.Rows"
        )
    if not (isinstance(rows.indices, Tensor) and isinstance(rows.values, Tensor)):
        what = f"{type(rows.indices).__name__} and {type(rows.values).__name__}"
        raise WeftError(f"rows are a {type(given).__name__} of {what}: pass tensors")
    return rows, form


def readable(given: Rows) -> Rows:
    """The given rows in memory that kernels can read, in tensors that nobody else has.

    Raises:
        WeftError: the rows are invalid.
    """
    indices = given.indices
    values = given.values
    height = None if given.height is None else as_integer(given.height)
    if height is not None and not 0 <= height <= _HIGHEST:
        raise WeftError(f"height is {shown(given.height)}: pass the number of rows, or None")
    for name, tensor in (("indices", indices), ("values", values)):
        _check_elements(name, tensor)
    swapped = ""
    if values.dim() == 1 and values.dtype in (torch.int32, torch.int64):
        swapped = ", and the values look like indices: pass (indices, values), in this order"
    if indices.dim() != 1:
        raise WeftError(f"indices have shape {tuple(indices.shape)}: they must be 1-D{swapped}")
    if indices.dtype not in (torch.int32, torch.int64):
        raise WeftError(f"indices are {indices.dtype}: they must be int32 or int64{swapped}")
    if values.dim() == 0 or values.shape[0] != indices.numel():
        raise WeftError(
            f"{indices.numel()} indices come with values of shape {tuple(values.shape)}: "
            "the first dimension must be the number of indices"
        )
    if wrong := wrong_row_shape(values.shape[1:]):
        raise WeftError(f"the values {wrong}")
    if not serves(torch.clone, values.dtype):
        raise WeftError(f"values are {values.dtype}, which torch does not copy: view another dtype")
    if indices.device != values.device:
        raise WeftError(f"indices are on {indices.device}, values on {values.device}")
    # the caller may give its tensors other memory while an asynchronous call is under way
    return Rows(plain(indices.detach()), plain(values.detach()), height)


def _check_elements(name: str, tensor: Tensor) -> None:
    if not has_elements(tensor):
        raise WeftError(f"the tensor of {name} is {lacking(tensor)}: pass one with data")


def wrong_wire_dtype(dtype: object, own: torch.dtype | None = None) -> str | None:
    """What is wrong with a `wire_dtype`, for values of dtype `own` if that is known; or None."""
    if dtype is None:
        return None
    if not isinstance(dtype, torch.dtype) or dtype not in WIRE_DTYPES:
        return f"wire_dtype is {shown(dtype)}: pass {', '.join(map(str, WIRE_DTYPES))} or None"
    if own is None or own.is_floating_point:
        return None
    said = f"wire_dtype is {dtype}, which is for floating point, and the values are {own}"
    return f"{said}: leave it None"


def travelling(own: torch.dtype, wire_dtype: torch.dtype | None) -> torch.dtype:
    """The dtype in which values of dtype `own` are sent: `wire_dtype`, if it has fewer bits.

    Values that are not floating point are sent as they are.
    """
    if wire_dtype is None or not own.is_floating_point or own.itemsize <= wire_dtype.itemsize:
        return own
    return wire_dtype


def outside(low: int, high: int, height: int | None) -> str | None:
    """What is wrong with indices from `low` to `high`."""
    if low < 0:
        return f"index {low} is negative: indices count from 0"
    if height is not None and high >= height:
        return f"index {high} is outside a height of {height}: indices must be below it"
    return None


def op_name(op: object) -> object:
    """The name of a `torch.distributed.ReduceOp`, or a plain text; anything else as it is."""
    if isinstance(op, str):
        return str.__str__(op)  # as a key finds it: one of a subclass, such as an enum's, may not
    if not isinstance(op, dist.ReduceOp | dist.ReduceOp.RedOpType):
        return op
    members = dist.ReduceOp.RedOpType.__members__
    name = next((name for name in members if op == getattr(dist.ReduceOp, name)), "?")
    return "prod" if name == "PRODUCT" else name.lower()


def operation(op: object) -> Op:
    """The reduction that an argument means.

    Raises:
        WeftError: it means none.
    """
    op = op_name(op)
    if isinstance(op, str):
        if op not in OPS:
            hint = meant(op, OPS, ELSEWHERE)
            raise WeftError(
                f"op {shown(op)} is unknown{hint}: use one of {', '.join(OPS)}, a torch ReduceOp, "
                "or a function of two tensors"
            )
        return OPS[op]
    if not callable(op):
        raise WeftError(f"op is a {type(op).__name__}: pass a name, a ReduceOp or a function")
    name = getattr(op, "__qualname__", None) or type(op).__qualname__
    name = printable(f"{type(op).__name__} {getattr(op, '__module__', '?')}.{name}")
    name = summed_up(name, _LONGEST, f"{name[: _LONGEST // 4]}...")  # it travels with every call
    return Op(name, op, builtin=False)


def informed(request: Request, opening: Opening, device: torch.device) -> Request:
    """The request of a rank without rows: of the others' kind, as far as it is known.

    Args:
        request: as this rank has it.
        opening: of the call.
        device: where the others' rows are.

    Raises:
        WireError: a field of the opening cannot be read.
        WeftError: some rank has no device of the kind that rows are on; on every rank.
    """
    rows = request.rows
    row_shape: Sequence[int] = rows.row_shape
    if opening.fields["row shape"] != UNKNOWN:
        row_shape = opening.field("row shape", shape_in)
    index = rows.indices.dtype
    dtype = rows.values.dtype
    height = rows.height
    if request.moves:
        index = opening.field("index dtype", dtype_in)
        dtype = opening.field("value dtype", dtype_in)
        said = opening.fields["height"]
        height = opening.field("height", int) if said.isdigit() else None
    indices = torch.empty(0, dtype=index, device=device)
    values = torch.empty((0, *row_shape), dtype=dtype, device=device)
    sent_as = travelling(dtype, request.rounded)
    return replace(request, rows=Rows(indices, values, height), dtype=sent_as)
