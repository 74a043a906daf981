"""The way into autograd: every layer, forward, backward, and backward of that.

A movement is linear, so its derivative is itself and its adjoint is the plan's transpose. Both are
movements again, opened by the same exchange, so all ranks know in every pass what all bring.

If anybody needs a gradient, every rank that takes part gets a result that requires one, so that
backward runs on all of them: a rank whose own tensor needs none hangs its result on an anchor.

torch.compile takes the other door (`compiled`): Dynamo refuses a Function with a jvp of its own,
and a custom operator has none.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .._torch import in_forward_mode, is_wrapped, profiled, without_modes
from ..errors import WeftError
from ..grid import Shape
from ..plan import Plan
from ..wire.base import Wire, as_bytes, plain
from .carry import assembled, execute, has_addition
from .movement import Movement, planned
from .opening import Opening, Statement, opened, payload_of

__all__ = ["Call", "moved"]


def moved(movement: Movement, x: Tensor, nothing: Shape = (0,)) -> Tensor:
    """What a layer gives for a tensor; collective among the ranks that it concerns.

    Args:
        movement: what the layer does.
        x: the tensor.
        nothing: the shape of the result where a rank that takes part has none.

    Raises:
        WeftError: somebody's arguments are wrong, or do not go with the others'; the same text on
            every rank that takes part.
        WireError: a peer or a link failed.
    """
    wire = movement.partitions[0].wire
    ranks = movement.groups.get(wire.rank)
    if ranks is None:
        return _outside(movement, wire, x)
    return _applied(Call(movement, wire, ranks, nothing=nothing), x)


def _outside(movement: Movement, wire: Wire, x: Any) -> Tensor:
    """What an inactive rank gets, who talks to nobody."""
    if not isinstance(x, Tensor) or x.numel():
        raise WeftError(
            f"rank {wire.rank}: {movement.name} does not concern this rank, which must pass a "
            f"tensor without elements, such as weft.nn.zero_volume_tensor(), not {_what(x)}"
        )
    return x.clone()


def _what(x: object) -> str:
    if not isinstance(x, Tensor):
        return f"a {type(x).__name__}"
    return f"one of shape {tuple(x.shape)}"


@dataclass(slots=True, eq=False)
class Call:
    """A movement that is to be carried out, this way or the other.

    It is not frozen, since making it would take a tenth of the time of a small call.

    Attributes:
        movement: what is to be done.
        wire: of the group.
        ranks: who takes part.
        order: which derivative it is; odd ones go the other way.
        stated: the shape to state if it is not that of the tensor: of what the movement brought,
            where it is undone.
        nothing: the shape of the result where a rank has none.
        compiled: whether it is called by compiled code.
        lanes: how many torch.func.vmap are around it.
        plan, opening: what all ranks said, and what follows from it, once they did.
        fault: what is wrong with this rank's argument, if that was found before.
    """

    movement: Movement
    wire: Wire
    ranks: tuple[int, ...]
    order: int = 0
    stated: Shape | None = None
    nothing: Shape = (0,)
    compiled: bool = False
    lanes: int = 0
    plan: Plan | None = None
    opening: Opening | None = None
    fault: str | None = None

    @property
    def name(self) -> str:
        return self.movement.names[self.order % 2]

    def opened(self, x: Any, mode: str = "", needs: bool | None = None) -> Call:
        """Hear what all bring; collective.

        Args:
            x: this rank's tensor.
            mode: what else must be the same on all ranks.
            needs: whether a gradient is asked for, where the tensor cannot tell.
        """
        error = self._error(x)
        fine = isinstance(x, Tensor) and error is None
        records = torch.is_grad_enabled() if needs is None else needs
        statement = Statement(
            (tuple(x.shape) if self.stated is None else self.stated) if fine else (),
            (records and x.requires_grad if needs is None else needs) if fine else False,
            records,
            payload_of(x, self.ranks) if fine else None,
        )
        own = x.dtype if isinstance(x, Tensor) else torch.float32
        opening = self.wire.worker.call(
            self.name,
            lambda: opened(
                self.wire,
                self.movement,
                self.ranks,
                statement,
                call=self._spelled(),
                # compiled code has fixed the dtype of its result already
                dtype=own if fine and (x.numel() or self.compiled) else None,
                own=own,
                error=error,
                mode=f"{mode}{' compiled' * self.compiled}",
            ),
        )
        return self._following(opening)

    def _following(self, opening: Opening) -> Call:
        """What to do, now that all were heard."""
        if self.movement.summing and not self.order and not has_addition(opening.dtype):
            raise WeftError(
                f"{self.name} adds up values, and {opening.dtype} has no addition: pass integers, "
                "floating-point or complex numbers"
            )
        givers = self.movement.givers
        shapes = tuple((rank, opening.said[rank].shape) for rank in self.ranks if rank in givers)
        plan = planned(self.movement, shapes)
        if self.order % 2:
            plan = plan.T
        return replace(self, plan=plan, opening=opening)

    def _spelled(self) -> str:
        """The name of the call, for the other ranks."""
        name = f"{self.name} of order {self.order}" if self.order > 1 else self.name
        return name + " under vmap" * self.lanes

    def _error(self, x: Any) -> str | None:
        """What is wrong with this rank's own argument."""
        if self.fault is not None:
            return self.fault
        if not isinstance(x, Tensor):
            return f"{self.name} takes a tensor, not a {type(x).__name__}"
        if (trouble := _unreadable(x)) is not None:
            return f"{self.name} takes dense tensors, and this one is {trouble}"
        if x.layout != torch.strided or x.is_quantized:
            kind = "quantized" if x.is_quantized else str(x.layout).removeprefix("torch.")
            return (
                f"{self.name} takes dense tensors, and this one is {kind}: use "
                "weft.sparse_all_reduce and its kin for sparse ones, or to_dense()"
            )
        if not self.order and self.wire.rank not in self.movement.givers and x.numel():
            return (
                f"{self.name} takes no tensor from this rank, which passes {_what(x)}: pass one "
                "without elements, such as weft.nn.zero_volume_tensor()"
            )
        return None

    def run(self, x: Tensor) -> Tensor:
        """Carry the plan out; collective."""
        assert self.plan is not None and self.opening is not None
        plan, opening, wire = self.plan, self.opening, self.wire
        local = _typed(x, opening.dtype).cpu().resolve_conj().resolve_neg()
        tensors = opening.tensors(plan.have.shapes)
        with profiled(self.movement.ranges[self.order % 2]):
            if tensors is not None:
                y = assembled(plan, tensors, wire.rank, local)
            else:
                y = wire.worker.call(self.name, lambda: execute(plan, local, wire))
        if wire.rank not in plan.want.shapes:
            y = y.new_empty(self.nothing)
        return y.to(x.device)

    def back(self, shape: Shape) -> Call:
        """The adjoint, for what was applied to a tensor of that shape."""
        order = self.order + 1
        return Call(
            self.movement,
            self.wire,
            self.ranks,
            order,
            shape if order % 2 else None,
            shape,
            self.compiled,
            self.lanes,
            fault=self.fault,
        )

    def again(self) -> Call:
        """The same for another tensor, which is still to be heard of."""
        return replace(self, plan=None, opening=None)

    def batched(self, extent: int) -> Call:
        """The same for tensors with one more dimension at the end."""
        return replace(
            self.again(),
            movement=self.movement.batched(extent),
            stated=None if self.stated is None else (*self.stated, extent),
            nothing=(*self.nothing, extent),
            lanes=self.lanes + 1,
        )


def _unreadable(x: Tensor) -> str | None:
    """What a tensor is whose values cannot be read here, and what to do; None: they can."""
    if x.is_nested:
        return "nested: pass its parts, or to_padded_tensor()"
    if x.is_meta:
        return "on the meta device, where there are no values: materialize it first"
    if x.layout != torch.strided or type(x) in _PLAIN:
        return None  # other layouts are told of by themselves
    kind = type(x).__name__
    if kind == "DTensor":
        return "a DTensor: pass the shard that weft.nn.from_dtensor(x, partition) gives"
    try:
        as_bytes(plain(x.detach().cpu()))[:1].numpy()
    except Exception as error:  # whatever the subclass has to say
        reason = f"{error}".partition("\n")[0].rstrip(".")
        return f"a {kind}, which cannot be read ({reason}): pass a plain tensor"
    return None


_PLAIN = (Tensor, torch.nn.Parameter)


def _typed(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor without its history, of the dtype that was agreed on."""
    # if that is another, the tensor has no volume, so that its own said nothing
    return x.detach() if x.dtype == dtype else x.new_empty(x.shape, dtype=dtype)


@without_modes
def _applied(call: Call, x: Any, *, tangents: bool = True) -> Tensor:
    """The result of a call, recorded for autograd; collective.

    Args:
        call: not opened yet.
        x: this rank's tensor.
        tangents: whether to move the tangent of forward-mode differentiation, too.
    """
    function: Any = _Transformed  # torch's functions have no types
    if isinstance(x, Tensor) and is_wrapped(x):
        # torch.func looks behind the tensor first, and the ranks hear of each other there
        return cast(Tensor, function.apply(x, None, call))
    forward_mode = tangents and in_forward_mode()
    call = call.opened(x, "forward-mode" * forward_mode)
    assert call.opening is not None
    if forward_mode:
        x = _dual(x) if x.is_floating_point() else x
    elif not call.opening.needs:
        return call.run(x)
    else:
        function = _Move
    needs_anchor = call.opening.needs and not x.requires_grad
    anchor = torch.zeros((), requires_grad=True) if needs_anchor else None
    return cast(Tensor, function.apply(x, anchor, call))


def _dual(x: Tensor) -> Tensor:
    """A tensor with a tangent, since other ranks may have one: its own, or zero."""
    ad: Any = forward_ad  # whose functions have no types
    has = ad.unpack_dual(x).tangent is not None
    dual: Tensor = x if has else ad.make_dual(x, torch.zeros_like(x))
    return dual


class _Move(torch.autograd.Function):
    """Carries out a call that is opened. Its derivative is a call again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor | None, call: Call) -> Tensor:
        ctx.call, ctx.shape, ctx.dtype = call, tuple(x.shape), x.dtype
        return call.run(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        back = _applied(ctx.call.back(ctx.shape), grad)
        return back if back.dtype == ctx.dtype else back.to(ctx.dtype), None, None


class _Transformed(torch.autograd.Function):
    """The same for torch.func and forward mode, which ask for more and cost more."""

    @staticmethod
    def forward(x: Tensor, anchor: Tensor | None, call: Call) -> Tensor:
        return (call.opened(x, "torch.func") if call.opening is None else call).run(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, _, ctx.call = inputs
        ctx.shape, ctx.dtype = tuple(x.shape), x.dtype

    backward = _Move.backward

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: object) -> Tensor:
        return _applied(ctx.call.again(), tangent, tangents=False)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], x: Tensor, *rest: Any) -> Any:
        call: Call = rest[-1]
        assert in_dims[0] is not None
        y = _applied(call.batched(info.batch_size), x.movedim(in_dims[0], -1))
        return y, y.dim() - 1
