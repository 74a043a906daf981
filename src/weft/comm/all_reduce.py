"""`all_reduce`: a tensor combined over all ranks, element by element; every rank gets the same.

A small tensor travels in the opening exchange, where statements are direct; then that is the one
round there is. A larger one is reduced by the wire. Contributions combine in rank order, so that
all ranks get the same bits.

The gradient of a sum is the sum of the gradients, that of an average their average: each rank has
its own loss, and what is differentiated is their sum. The gradient of an extremum goes to the
elements that attain it, in equal shares.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.profiler import record_function

from .._torch import uncompiled
from ..agree import is_direct
from ..sparse.arguments import op_name, wrong_wire_dtype
from ..tensors import has_elements, lacking
from ..wire import default, dense
from ..wire.base import Wire, as_bytes, fresh, hosts_of
from .differentiable import applied, movable
from .opening import Mode, opened
from .rounding import narrowed, travelling
from .staging import host, on_host

_NAME = "all_reduce"
_EAGER = 8 << 10  # bytes that a rank sends whole to all others in any case
_FAR = 1 << 20  # bytes for which it is worth a round, once, to know who is on which host (`dense`)


@uncompiled
def all_reduce(
    tensor: Tensor,
    op: Any = "sum",
    group: Any = None,
    *,
    wire_dtype: torch.dtype | None = None,
) -> Tensor:
    """Combine a tensor over all ranks; every rank gets the same bits. Differentiable.

    Args:
        tensor: of the same shape and dtype on every rank; it is not changed.
        op: "sum", "avg" (divides by the size of the group; floating point and complex), "min",
            "max", "prod", "band", "bor", "bxor", or a `torch.distributed.ReduceOp`.
        group: None (the default group), a Wire, a ProcessGroup, or a 1-D DeviceMesh.
        wire_dtype: None, or `torch.bfloat16` or `torch.float16`, in which wider floating-point
            numbers are then sent: each rank's tensor is rounded to it, and so is the result, once
            each, to nearest even; sums are kept in float32. So do gradients travel. Lossy:
            docs/wire-dtype.md has the bound.

    Returns:
        A new tensor, on the device of `tensor`. Ranks are added in rank order; half precision is
        added in float32, for "avg" divided there, and rounded once; integers wrap. If the tensor of
        some rank requires a gradient, the results of all ranks do, and all must run backward.
        Gradients: of "sum" and "avg" the sum and the average of the gradients of all ranks'
        results; of "min" and "max" that sum, shared equally by the ranks whose element is the
        extremum; the other ops have none.

    Raises:
        WeftError: some rank's arguments are wrong or differ from the others'; the same text on
            every rank, naming the rank. The next call works.
        WireError: a peer or a link failed; names the culprit. The group is lost.

    Example:
        >>> import torch, weft
        >>> from weft.testing import run
        >>> run(3, lambda wire: weft.all_reduce(torch.tensor([1.0, wire.rank])).tolist())
        [[3.0, 3.0], [3.0, 3.0], [3.0, 3.0]]
    """
    return combined(default.resolve(group), tensor, op, None, wire_dtype)


def combined(
    wire: Wire, tensor: Tensor, op: Any, error: str | None, wire_dtype: torch.dtype | None = None
) -> Tensor:
    """`all_reduce`, for a caller that knows of something else that is wrong, or None."""
    name = op_name(op)
    error = _wrong(tensor, name, wire_dtype) or error
    given = torch.empty(0) if error else tensor
    dtype, said = given.dtype, "" if wire_dtype is None else f"{given.dtype}, sent as {wire_dtype}"
    travels = dtype if error else travelling(dtype, wire_dtype)
    if travels != dtype:  # all that follows, backward too, is of a tensor of that dtype
        given = narrowed(given, travels)
    if not error and name in ("min", "max") and given.is_floating_point():
        result = cast(Tensor, _extremum(wire, str(name), said, given))
    else:
        result = applied(_Reduction(wire, str(name), _NAME, error, said), [given])[0]
    return result if travels == dtype else result.to(dtype)


def _wrong(tensor: object, op: object, wire_dtype: object) -> str | None:
    """What is wrong with what a caller passed, or None."""
    if not isinstance(tensor, Tensor) or not has_elements(tensor):
        what = lacking(tensor) if isinstance(tensor, Tensor) else f"a {type(tensor).__name__}"
        return f"tensor is {what}: pass a strided tensor (sparse ones: weft.sparse_all_reduce)"
    if not isinstance(op, str) or op not in dense.OPS:
        return f"op {op!r} is unknown: use one of {', '.join(dense.OPS)} or a torch ReduceOp"
    if op == "prod" and tensor.requires_grad and torch.is_grad_enabled():
        return "op prod has no gradient here, and the tensor requires one: detach() it"
    if error := wrong_wire_dtype(wire_dtype):
        return error
    if wire_dtype is not None and not tensor.is_floating_point():
        return (
            f"wire_dtype is {wire_dtype}, which is for floating point, and the tensor is "
            f"{tensor.dtype}: leave it None"
        )
    return dense.refuses(str(op), tensor.dtype)


@dataclass(slots=True)
class _Reduction:
    """A reduction, as a linear collective where it is a sum or an average; then its own adjoint."""

    wire: Wire
    op: str
    name: str
    error: str | None = None
    said: str = ""  # of the dtype, where that is not all there is to say
    _number: int = 0

    def adjoint(self) -> _Reduction:
        name = f"all_reduce backward of call {self._number}"
        return _Reduction(self.wire, self.op, name, None, self.said)

    def run(self, tensors: Sequence[Tensor], mode: Mode) -> tuple[list[Tensor], bool]:
        def job() -> tuple[list[Tensor], bool]:
            with record_function("weft::all_reduce"):
                result, recorded = self._run(tensors[0].detach(), mode)
                return [result], recorded

        return self.wire.worker.call(self.name, job)

    def _run(self, tensor: Tensor, mode: Mode) -> tuple[Tensor, bool]:
        wire, given = self.wire, host(tensor)
        eager = is_direct(wire) and self.error is None and given.nbytes <= _EAGER
        fields: dict[str, object] = {"op": self.op}
        if self.error is None:
            fields |= {"dtype": self.said or given.dtype, "shape": tuple(given.shape)}
        own = as_bytes(given).numpy().data if eager else b""
        place = fresh(tuple(given.shape), given.dtype)
        with opened(wire, self.name, fields, self.error, mode=mode, own=own) as said:
            self._number, records = said.number, said.records
            if eager:
                heard = [torch.frombuffer(each, dtype=torch.uint8) for each in said.own if each]
                dense.reduce([each.view(given.dtype) for each in heard], self.op, place)
        if not eager:
            place.copy_(given)
            if place.nbytes >= _FAR:
                hosts_of(wire)
            wire.dense_all_reduce(place, self.op).wait()
        return place if on_host(tensor) else place.to(tensor.device), records


def _extremum(wire: Wire, op: str, said: str, tensor: Tensor) -> Any:
    mode = Mode.of([tensor])
    reduction = _Reduction(wire, op, _NAME, None, said)
    if not mode.enabled:
        return reduction.run([tensor], mode)[0][0]
    anchor = torch.empty(0, requires_grad=True)
    return _Extremum.apply(reduction, mode, anchor, tensor)  # type: ignore[no-untyped-call]  # torch's


class _Extremum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, reduction: _Reduction, mode: Mode, anchor: Tensor, tensor: Tensor
    ) -> Tensor:
        (result,), recorded = reduction.run([tensor], mode)
        ctx.reduction = reduction
        ctx.save_for_backward(tensor, result)
        if not recorded:
            ctx.mark_non_differentiable(result)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        tensor, result = ctx.saved_tensors
        adjoint = ctx.reduction.adjoint()
        summed = _Reduction(adjoint.wire, "sum", adjoint.name, None, adjoint.said)
        (gradient,) = movable([gradient], summed)
        attains = (tensor.detach() == result.detach()).to(gradient.dtype)
        total = applied(summed, [gradient])[0]
        ranks = applied(summed, [attains])[0]
        return None, None, None, total * attains / ranks.clamp(min=1)
