"""The layers in autograd: forward, backward, and derivatives of any order.

A layer is a linear map, and its adjoint, the transpose of the plan, is its derivative. Each is a
call again, with a handshake, so in every pass all ranks know what all ranks pass. The name of a
derivative says which call it is of: ranks whose graphs run in different orders raise an error, and
do not mix up gradients of the same size.

If the tensor of one rank requires a gradient, the outputs of all ranks that take part do, so that
backward runs on all of them. On a rank whose own input requires none, the output depends on a
scalar that does (the anchor).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..base.arguments import is_a
from ..base.errors import WeftError, check, conclusion, entry
from ..base.tensors import Shape, in_format_of, serves, unreadable, wrong_dims
from ..call.attempt import preparing
from ..call.handshake import Heard, Operand, among, handshake, payload_of
from ..call.mode import Mode
from ..comm.staging import unfollowed
from ..group.group import Group
from ..verbs.carrier import carried_by, verbs_of
from ..verbs.interface import Verbs
from .executor import assemble, execute, has_addition
from .spec import Spec, planned


@entry
def applied(spec: Spec, x: Tensor) -> Tensor:
    """The output of a layer for a tensor. Collective among the ranks that take part.

    Args:
        spec: of the layer.
        x: the tensor.

    Raises:
        WeftError: some rank's arguments are wrong, or do not fit the others'; the same text on
            every rank that takes part. Other ranks raise for themselves (`outside`).
        WireError: a peer or a link failed; names the culprit. The group is lost.
    """
    group = spec.partitions[0].group
    ranks = spec.groups.get(group.rank)
    if ranks is None:
        return outside(spec.name, group, x)
    return _recorded(Call(spec, group, ranks), x)


def outside(name: str, group: Group, x: Any) -> Tensor:
    """The output on a rank that takes no part: a copy of its input. Nothing is sent.

    Raises:
        WeftError: its input has elements, or is no tensor; raised on this rank alone.
    """
    if not is_a(x, Tensor) or x.numel():
        raise WeftError(
            f"rank {group.rank}: {name} does not concern this rank, which must pass a "
            f"tensor without elements, such as weft.nn.zero_volume_tensor(), not {_what(x)}"
        )
    return x.clone()


def _what(x: object) -> str:
    if not is_a(x, Tensor):
        return f"a {type(x).__name__}"
    return f"one of shape {tuple(x.shape)}"


@dataclass(frozen=True, eq=False)
class Call:
    """A call of a layer, forward or backward.

    Attributes:
        spec: of the layer.
        group: of the group.
        ranks: the ranks that take part.
        order: the order of the derivative: 0 is forward; odd ones use the transpose of the plan.
        of: the number of the call whose derivative it is; 0: of none.
        stated: in backward, the shape that this rank passed to forward, which it states again;
            None: that of the tensor.
        nothing: the shape of the output on a rank that gets nothing.
    """

    spec: Spec
    group: Group
    ranks: tuple[int, ...]
    order: int = 0
    of: int = 0
    stated: Shape | None = None
    nothing: Shape = (0,)

    @property
    def name(self) -> str:
        return f"{self.spec.name} backward" if self.order % 2 else self.spec.name

    def run(self, x: Any) -> Moved:
        """Learn what all ranks pass, make the plan, and carry it out. Collective.

        Args:
            x: this rank's tensor.

        Raises:
            WeftError, WireError: as `applied`.
        """
        name = self.name
        if self.order > 1:
            name += f" of order {self.order}"
        if self.of:
            name += f" of call {self.of}"

        def job() -> Moved:
            group = among(self.group, self.ranks)
            with preparing(group, self.name):
                check(self._wrong(x))
                verbs = verbs_of(group, x.device)
                shape = tuple(x.shape) if self.stated is None else self.stated
                operand = Operand(shape, payload_of(x, self.ranks) if verbs is None else None)
                fields: dict[str, object] = {
                    "partition": self.spec.grids,
                    "arguments": self.spec.arguments,
                    "dtype": x.dtype if x.numel() else None,
                    "device": carried_by(verbs),
                }
            heard = handshake(self.group, self.ranks, name, fields, operand, Mode.of([x]))
            return self._moved(x, heard, verbs)

        return self.group.worker.call(name, job)

    def _moved(self, x: Tensor, heard: Heard, verbs: Verbs | None) -> Moved:
        """Carry out the plan that follows from what all ranks said; collective.

        Args:
            x: this rank's tensor.
            heard: what all ranks said.
            verbs: of the ranks that take part, by which tensors go; None: by posts on the wire.

        Raises:
            WeftError: the plan cannot be made or carried out; the same text on every rank.
            WireError: as `applied`.
        """
        said = heard.operands
        dtype = heard.dtype or x.dtype  # its own where nobody's tensor says anything
        if self.spec.summing and not self.order and not has_addition(dtype):
            raise conclusion(
                f"{self.name} adds up values, and {dtype} has no addition in torch: pass another "
                "dtype (the signed integers of unsigned ones, by x.view, have the same sums)"
            )
        group = self.group
        sources = [rank for rank in self.ranks if rank in self.spec.sources]
        shapes = tuple((rank, said[rank].shape) for rank in sources)
        plan = planned(self.spec, shapes)
        if self.order % 2:
            plan = plan.T
        if all(said[rank].payload is not None for rank in plan.have.shapes):
            came = {
                rank: group.decode(rank, "a tensor", said[rank].tensor, shape, dtype)
                for rank, shape in plan.have.shapes.items()
            }
            y = assemble(plan, came, group.rank, dtype, x.device)
        else:
            # if its own is another, the tensor has no volume, so that its own said nothing
            local = x.detach() if x.dtype == dtype else torch.empty_like(x, dtype=dtype)
            local = local.resolve_conj().resolve_neg()
            y = execute(plan, local, group, self.ranks, verbs)
        if group.rank not in plan.want.shapes:
            y = y.new_zeros(self.nothing)  # in backward: of a tensor that the plan does not read
        y = in_format_of(x, y)
        return Moved(self, heard.number, heard.records, y)

    def _wrong(self, x: Any) -> str | None:
        """What is wrong with this rank's own tensor, or None."""
        if not is_a(x, Tensor):
            return f"{self.name} takes a tensor, not a {type(x).__name__}"
        if (trouble := _untakable(x)) is not None:
            return f"{self.name} takes dense tensors, and this one is {trouble}"
        if (trouble := wrong_dims(x)) is not None:
            return f"{self.name}: the tensor {trouble}"
        if (trouble := unfollowed("the tensor", x)) is not None:
            return f"{self.name}: {trouble}"
        if not self.order and self.group.rank not in self.spec.sources and x.numel():
            return (
                f"{self.name} takes no tensor from this rank, which passes {_what(x)}: pass one "
                "without elements, such as weft.nn.zero_volume_tensor()"
            )
        return None

    def back(self, shape: Shape, number: int) -> Call:
        """The call of the adjoint, after the call of this number with a tensor of this shape."""
        order = self.order + 1
        stated = shape if order % 2 else None
        return replace(self, order=order, of=number, stated=stated, nothing=shape)


@dataclass(frozen=True, eq=False, slots=True)
class Moved:
    """A call that was carried out, before autograd records it.

    Attributes:
        call: the call.
        number: of the call, the same on all ranks that take part.
        records: whether some rank records gradients; then all take part in backward.
        output: this rank's, without a gradient.
    """

    call: Call
    number: int
    records: bool
    output: Tensor


def _untakable(x: Tensor) -> str | None:
    """Why a layer cannot take a tensor, and the remedy; None if it can."""
    if not (x.is_quantized or serves(torch.clone, x.dtype)):
        return f"of {x.dtype}, which torch does not copy: pass x.view(torch.uint8)"
    if type(x).__name__ == "DTensor":
        return "a DTensor: pass the shard that weft.nn.from_dtensor(x, partition) gives"
    return unreadable(x)


def _recorded(call: Call, x: Any) -> Tensor:
    """Make a call; autograd records it. Collective."""
    moved = call.run(x)
    if not moved.records:
        return moved.output
    anchor = None if x.requires_grad else torch.zeros((), device="cpu", requires_grad=True)
    y: Tensor = _Move.apply(x, anchor, moved)  # type: ignore[no-untyped-call]  # torch's
    return y


class _Move(torch.autograd.Function):
    """Records a call that was carried out. Its derivative is a call again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor | None, moved: Moved) -> Tensor:
        ctx.call = moved.call
        ctx.number = moved.number
        ctx.shape = tuple(x.shape)
        ctx.dtype = x.dtype
        return moved.output

    @staticmethod
    @entry
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        back = _recorded(ctx.call.back(ctx.shape, ctx.number), grad)
        return back.to(ctx.dtype), None, None
