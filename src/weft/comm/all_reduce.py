"""`all_reduce`: a tensor combined over all ranks, element by element; every rank gets the same.

A small tensor travels in the opening exchange, where statements are direct; then that is the one
round there is. All others are reduced by the wire, in rank order, so that all ranks get the same
bits.

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

from ..agree import is_direct
from ..sparse.request import op_name
from ..wire import default, dense
from ..wire.base import Wire, as_bytes
from .differentiable import applied
from .movement import empty, host, on_host
from .opening import Mode, opened

__all__ = ["all_reduce"]

_EAGER = 8 << 10  # bytes that a rank sends whole to all others in any case


def all_reduce(tensor: Tensor, op: Any = "sum", group: Any = None) -> Tensor:
    """Combine a tensor over all ranks; every rank gets the same bits. Differentiable.

    Args:
        tensor: of the same shape and dtype on every rank; it is not changed.
        op: "sum", "avg" (divides by the size of the group; floating point and complex), "min",
            "max", "prod", "band", "bor", "bxor", or a `torch.distributed.ReduceOp`.
        group: None (the default group), a Wire, a ProcessGroup, or a 1-D DeviceMesh.

    Returns:
        A new tensor, on the device of `tensor`. Ranks are added in rank order; half precision is
        added in float32 and rounded once, and "avg" divides before that sum where it might
        overflow, in half precision; integers wrap. If the tensor of some rank requires a gradient,
        the results of all ranks do, and all must run backward. Gradients: of "sum" and "avg" the
        sum and the average of the gradients of all ranks' results; of "min" and "max" that sum,
        shared equally by the ranks whose element is the extremum; the other ops have none.

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
    wire = default.resolve(group)
    name = op_name(op)
    error = _wrong(tensor, name)
    given = torch.empty(0) if error else tensor
    if name in ("min", "max") and not error and given.is_floating_point():
        return cast(Tensor, _extremum(wire, str(name), given))
    return applied(_Reduction(wire, str(name), "all_reduce", error), [given])[0]


def _wrong(tensor: object, op: object) -> str | None:
    """What is wrong with what a caller passed, or None."""
    if not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
        what = tensor.layout if isinstance(tensor, Tensor) else type(tensor).__name__
        return f"tensor is {what}: pass a strided tensor (sparse ones: weft.sparse_all_reduce)"
    known = [*dense.OPS, "avg"]
    if op not in known:
        return f"op {op!r} is unknown: use one of {', '.join(known)} or a torch ReduceOp"
    numbers = tensor.is_floating_point() or tensor.is_complex()
    if op == "avg" and not numbers:
        return f"op avg is for floating point, the tensor is {tensor.dtype}: sum, then divide"
    if op == "prod" and tensor.requires_grad and torch.is_grad_enabled():
        return "op prod has no gradient here, and the tensor requires one: detach() it"
    return dense.refuses("sum" if op == "avg" else str(op), tensor.dtype)


@dataclass(slots=True)
class _Reduction:
    """A reduction, as a linear collective where it is a sum or an average; then its own adjoint."""

    wire: Wire
    op: str
    name: str
    error: str | None = None
    _number: int = 0

    def adjoint(self) -> _Reduction:
        name = f"all_reduce backward of call {self._number}"
        return _Reduction(self.wire, self.op, name)

    def run(self, tensors: Sequence[Tensor], mode: Mode) -> tuple[list[Tensor], bool]:
        def job() -> tuple[list[Tensor], bool]:
            with record_function("weft::all_reduce"):
                result, recorded = self._run(tensors[0].detach(), mode)
                return [result], recorded

        return self.wire.worker.call(self.name, job)

    def _run(self, tensor: Tensor, mode: Mode) -> tuple[Tensor, bool]:
        wire, mean = self.wire, self.op == "avg"
        op = "sum" if mean else self.op
        fields: dict[str, object] = {"op": self.op}
        if self.error is None:
            fields |= {"dtype": tensor.dtype, "shape": tuple(tensor.shape)}
        result = empty(tuple(tensor.shape), tensor)
        result.copy_(tensor)
        narrow = tensor.dtype in (torch.float16, torch.bfloat16)
        if mean and narrow:
            result.div_(wire.size)
        place = result if on_host(result) else host(result)
        own = as_bytes(place).numpy().data if place.nbytes <= _EAGER else None
        with opened(wire, self.name, fields, self.error, mode=mode, own=own) as said:
            self._number = wire.sequence
            if own is not None and is_direct(wire):
                # copies, since the first of them is overwritten
                parts = [torch.frombuffer(bytearray(b), dtype=place.dtype) for b in said.own if b]
                if parts:
                    dense.reduce(parts, op, place)
        if own is None or not is_direct(wire):
            wire.dense_all_reduce(place, op).wait()
        if place is not result:
            result.copy_(place)
        if mean and not narrow:
            result.div_(wire.size)
        return result, said.records


def _extremum(wire: Wire, op: str, tensor: Tensor) -> Any:
    mode = Mode.of([tensor])
    reduction = _Reduction(wire, op, "all_reduce")
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
        summed = _Reduction(ctx.reduction.wire, "sum", ctx.reduction.adjoint().name)
        attains = (tensor.detach() == result.detach()).to(gradient.dtype)
        total = applied(summed, [gradient])[0]
        ranks = applied(summed, [attains])[0]
        return None, None, None, total * attains / ranks.clamp(min=1)
