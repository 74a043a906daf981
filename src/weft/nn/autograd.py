"""The layers in autograd: forward, backward, and derivatives of any order.

A layer is a linear map, and its adjoint, the transpose of the plan, is its derivative. Each is a
call again, with an opening, so in every pass all ranks know what all ranks pass. The name of a
derivative says which call it is of: ranks whose graphs run in different orders raise an error, and
do not mix up gradients of the same size.

If the tensor of one rank requires a gradient, the outputs of all ranks that take part do, so that
backward runs on all of them. On a rank whose own input requires none, the output depends on a
scalar that does (the anchor).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..base._torch import waited
from ..base.arguments import is_a
from ..base.errors import WeftError, check, conclusion, entry
from ..base.tensors import Shape, dtype_in, in_format_of, serves, unreadable, wrong_dims
from ..call.attempt import preparing
from ..call.fingerprint import UNKNOWN
from ..call.mode import Mode
from ..call.opening import Opening, opened
from ..call.statement import room
from ..comm.differentiable import Linear, make
from ..comm.staging import packed, unfollowed, unpacked
from ..group.group import Group
from ..verbs.carrier import carried_by, verbs_of
from .executor import among, assemble, execute, has_addition
from .plan import Plan
from .spec import Spec, planned

EAGER = 4 << 10
"""Bytes of a tensor that may go along with the opening, at most; of more than 16 ranks fewer. If
all tensors are so small, nothing more is sent."""


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
    taking_part = among(group, ranks)
    with preparing(taking_part, spec.name) as call:
        check(_wrong(spec, group.rank, x))
        make(call, Moving(taking_part, spec.name, spec=spec, whole=group, ranks=ranks), [x])
    y: Tensor = call.start()[0]
    return y


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


_Operand = tuple[Shape, Tensor | None]
"""What a rank passes: the shape of its tensor, and the tensor, if it came with the opening."""


@dataclass
class Moving(Linear):
    """A layer, or its adjoint, as a collective of the ranks that take part.

    Attributes:
        spec: of the layer.
        whole: the group in which the spec and its plans count ranks.
        ranks: of it, those that take part.
        plan: in backward, the transpose of forward's; None: the one for the shapes that all pass.
        nothing: the shape of the output on a rank that gets nothing.
        shape: of this rank's tensor; known once it has run.
    """

    spec: Spec = field(kw_only=True)
    whole: Group = field(kw_only=True)
    ranks: tuple[int, ...] = ()
    plan: Plan | None = None
    nothing: Shape = (0,)
    shape: Shape = ()

    def adjoint(self, name: str) -> Moving:
        assert self.plan is not None  # it has run
        return replace(self, name=name, plan=self.plan.T, nothing=self.shape)

    def run(self, tensors: Sequence[Tensor], mode: Mode) -> tuple[list[Tensor], Opening]:
        x = waited(tensors[0])
        self.shape = tuple(x.shape)
        with preparing(self.group, self.name):
            verbs = verbs_of(self.group, x.device)
            operand = packed(x, min(EAGER, room(self.group.size)) if verbs is None else -1)
            fields: dict[str, object] = {
                "partition": self.spec.grids,
                "arguments": self.spec.arguments,
                "dtype": x.dtype if x.numel() else None,
                "device": carried_by(verbs),
            }
        opening = opened(self.group, self.name, fields, operand, mode=mode)
        dtype = x.dtype  # where nobody's tensor says anything
        if opening.fields["dtype"] != UNKNOWN:
            dtype = opening.field("dtype", dtype_in)
        operands = dict(zip(self.ranks, opening.read(unpacked, dtype), strict=True))
        plan = self.plan = self.plan or self._plan_for(operands, dtype)
        small = {rank: operands[rank][1] for rank in plan.have.shapes}
        came = {rank: tensor for rank, tensor in small.items() if tensor is not None}
        rank = self.whole.rank
        if len(came) == len(small):
            y = assemble(plan, came, rank, dtype, x.device)
        else:
            # if its own is another, the tensor has no volume, so that its own said nothing
            local = x if x.dtype == dtype else torch.empty_like(x, dtype=dtype)
            y = execute(plan, local.resolve_conj().resolve_neg(), self.whole, self.ranks, verbs)
        if rank not in plan.want.shapes:
            y = y.new_zeros(self.nothing)  # in backward: of a tensor that the plan does not read
        return [in_format_of(x, y)], opening

    def _plan_for(self, operands: Mapping[int, _Operand], dtype: torch.dtype) -> Plan:
        """The plan of forward, from what all ranks said.

        Raises:
            WeftError: it cannot be made or carried out; the same text on every rank.
        """
        if self.spec.summing and not has_addition(dtype):
            raise conclusion(
                f"{self.name} adds up values, and {dtype} has no addition in torch: pass another "
                "dtype (the signed integers of unsigned ones, by x.view, have the same sums)"
            )
        sources = [rank for rank in self.ranks if rank in self.spec.sources]
        return planned(self.spec, tuple((rank, operands[rank][0]) for rank in sources))


def _wrong(spec: Spec, rank: int, x: Any) -> str | None:
    """What is wrong with this rank's own tensor, or None."""
    name = spec.name
    if not is_a(x, Tensor):
        return f"{name} takes a tensor, not a {type(x).__name__}"
    if (trouble := _untakable(x)) is not None:
        return f"{name} takes dense tensors, and this one is {trouble}"
    if (trouble := wrong_dims(x)) is not None:
        return f"{name}: the tensor {trouble}"
    if (trouble := unfollowed("the tensor", x)) is not None:
        return f"{name}: {trouble}"
    if rank not in spec.sources and x.numel():
        return (
            f"{name} takes no tensor from this rank, which passes {_what(x)}: pass one "
            "without elements, such as weft.nn.zero_volume_tensor()"
        )
    return None


def _untakable(x: Tensor) -> str | None:
    """Why a layer cannot take a tensor, and the remedy; None if it can."""
    if not (x.is_quantized or serves(torch.clone, x.dtype)):
        return f"of {x.dtype}, which torch does not copy: pass x.view(torch.uint8)"
    if type(x).__name__ == "DTensor":
        return "a DTensor: pass the shard that weft.nn.from_dtensor(x, partition) gives"
    return unreadable(x)
