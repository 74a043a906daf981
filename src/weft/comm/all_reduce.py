"""`all_reduce`: a tensor combined over all ranks, element by element; every rank gets the same.

A small tensor that the wire carries goes along with the opening; then that is the one round there
is. Others are reduced by a schedule (`schedules.dense`). Contributions combine in one order, so
that all ranks get the same bits.

The gradient of a sum is the sum of the gradients, that of an average their average: each rank has
its own loss, and what is differentiated is their sum. The gradient of an extremum goes to the
elements that attain it, in equal shares.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..base.arguments import shown
from ..base.errors import check, entry, meant
from ..base.memory import fresh
from ..base.tensors import has_elements, lacking
from ..call.attempt import preparing
from ..call.mode import PLAIN, Mode
from ..call.opening import Opening
from ..group import default
from ..kernels.ops import ELSEWHERE, OPS
from ..schedules import dense
from ..sparse.request import op_name, travelling, wrong_wire_dtype
from .differentiable import Linear, apply
from .staging import opened_with, unfollowed

_NAME = "all_reduce"
_DIFFERENTIABLE = ("sum", "avg", "min", "max")


@entry
def all_reduce(
    tensor: Tensor, op: Any = "sum", group: object = None, *, wire_dtype: torch.dtype | None = None
) -> Tensor:
    """Combine a tensor over all ranks; every rank gets the same bits. Differentiable.

    Args:
        tensor: of the same shape and dtype on every rank; it is not changed.
        op: "sum", "avg" (divides by the size of the group; floating point and complex), "min",
            "max", "prod", "band", "bor", "bxor", or a `torch.distributed.ReduceOp`.
        group: None (the default group), a Group, a ProcessGroup, or a 1-D DeviceMesh.
        wire_dtype: None, or `torch.bfloat16`, `torch.float16` or `torch.float32`: wider
            floating-point numbers are sent in this dtype. Each rank's tensor is rounded, and so is
            the result, once each, to nearest even; sums are made in float32. Gradients are sent so,
            too. Lossy: docs/wire-dtype.md has the error bound. An error for other tensors.

    Returns:
        A new tensor, on the device of `tensor`. Ranks are added in rank order; of a large tensor,
        where hosts have several ranks and as many each, those of a host first. A process group that
        carries the tensor, such as NCCL's, adds in an order of its own. Half precision is
        added (for "avg" also divided) in float32 and rounded once; integers wrap. If the tensor of
        some rank requires a gradient, the results of all ranks do, and all must run backward. The
        gradient of "sum" is the sum of the gradients of all ranks' results, that of "avg" their
        average; for "min" and "max" the sum is divided equally among the ranks whose element is the
        extremum; the other ops have no gradient.

    Raises:
        WeftError: some rank's arguments are wrong or differ from the others'; the same text on
            every rank, naming the rank. The next call works.
        WireError: a peer or a link failed; names the culprit. The group is lost.

    Example:
        >>> import torch, weft
        >>> from weft.testing import run
        >>> run(3, lambda group: weft.all_reduce(torch.tensor([1.0, group.rank])).tolist())
        [[3.0, 3.0], [3.0, 3.0], [3.0, 3.0]]
    """
    group = default.resolve(group)
    with preparing(group, _NAME):
        name = op_name(op)
        check(_wrong(tensor, name, wire_dtype))
        said = f"{tensor.dtype}" + (f", sent as {wire_dtype}" if wire_dtype else "")
        # all that follows, backward too, is of a tensor of the dtype that travels
        given = tensor.to(travelling(tensor.dtype, wire_dtype))
        reduction = Reduction(group, _NAME, {"dtype": said}, op=str(name))
    return apply(reduction, [given])[0].to(tensor.dtype)


def _wrong(tensor: object, op: object, wire_dtype: object) -> str | None:
    """What is wrong with what a caller passed, or None."""
    if not isinstance(tensor, Tensor) or not has_elements(tensor):
        what = lacking(tensor) if isinstance(tensor, Tensor) else f"a {type(tensor).__name__}"
        return f"tensor is {what}: pass a strided tensor (sparse ones: weft.sparse_all_reduce)"
    error = wrong_op(op, tensor, _DIFFERENTIABLE) or unfollowed("tensor", tensor)
    return error or wrong_wire_dtype(wire_dtype, tensor.dtype)


def wrong_op(op: object, tensor: Tensor, differentiable: Sequence[str]) -> str | None:
    """What is wrong with an op for a tensor, or None; `differentiable` have gradients here."""
    if not isinstance(op, str) or op not in OPS:
        hint = meant(op, OPS, ELSEWHERE)
        return f"op {shown(op)} is unknown{hint}: use one of {', '.join(OPS)} or a torch ReduceOp"
    if op not in differentiable and tensor.requires_grad and torch.is_grad_enabled():
        return f"op {op} has no gradient here, and the tensor requires one: detach() it"
    return dense.refuses(op, tensor.dtype)


@dataclass
class Reduction(Linear):
    """A reduction. A sum or an average is linear, and its own adjoint.

    An extremum is the sum of the elements that attain it, in equal shares: so it is linear, too,
    once it is known where they are.

    Attributes:
        op: its name.
        attains: of an extremum, where this rank's elements are that.
    """

    op: str = "sum"
    attains: Tensor | None = None

    def adjoint(self, name: str) -> Reduction:
        op = self.op if self.attains is None else "sum"
        return Reduction(self.group, name, self.fields, op=op)

    def apply_adjoint(self, gradients: Sequence[Tensor]) -> Sequence[Tensor]:
        totals = super().apply_adjoint(gradients)
        if self.attains is None:
            return totals
        attains = self.attains.to(totals[0].dtype)
        (ranks,) = super().apply_adjoint([attains])
        return [totals[0] * attains / ranks.clamp(min=1)]

    def run(self, tensors: Sequence[Tensor], mode: Mode) -> tuple[list[Tensor], Opening]:
        given = tensors[0]
        with preparing(self.group, self.name):
            total = fresh(tuple(given.shape), given.dtype, given.device).copy_(given)
        opening = self.reduce(total, mode)
        if opening.records and self.op in ("min", "max"):
            self.attains = (given == total) | (given.isnan() & total.isnan())
        return [total], opening

    def reduce(self, tensor: Tensor, mode: Mode = PLAIN) -> Opening:
        """Open the call, and reduce a tensor over all ranks, in place; collective.

        Args:
            tensor: contiguous; of a dtype for which there is the op.
            mode: of the opening, in which the shape of the tensor is compared.
        """
        fields = {"op": self.op, **self.fields, "shape": tuple(tensor.shape)}
        opening, _, goes_along = opened_with(
            self.group, self.name, fields, tensor, tensor.nbytes, mode
        )
        if not goes_along:
            dense.dense_all_reduce(self.group, tensor, self.op).wait()
        elif tensor.nbytes:
            bodies = opening.bodies(tensor.nbytes)
            parts = [torch.frombuffer(each, dtype=tensor.dtype) for each in bodies]
            dense.reduce(parts, self.op, tensor)
        return opening
