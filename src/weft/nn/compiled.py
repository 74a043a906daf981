"""The door for torch.compile: each layer is one custom operator.

The compiler must know the shape of a result without asking any rank: from this rank's own tensor
where that tells it (ReduceScatter, AllSumReduce, HaloExchange), else from `shape=`, which is then
needed. What the compiler was told is checked on every call. Everything else is as in eager code:
the same exchange opens each call, and the same plan is carried out.

The operators are marked as having side effects, since a collective that one rank optimises away
hangs the others. They have no derivative of higher order, and say so.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx.node import has_side_effect

from .._torch import without_modes
from ..errors import WeftError
from ..grid import Shape
from .door import Call
from .movement import Movement, planned

__all__ = ["compiled", "number"]


@dataclass(frozen=True, slots=True)
class _Known:
    """What is kept of a movement: a group, and its wire, must be able to go."""

    integers: Movement
    group: weakref.ref[Any] | None


_lock = threading.Lock()
_known: list[_Known] = []  # compiled code knows them by number
_numbers: weakref.WeakKeyDictionary[Movement, int] = weakref.WeakKeyDictionary()
_used: weakref.WeakValueDictionary[int, Movement] = weakref.WeakValueDictionary()


def number(movement: Movement) -> int:
    """The number that compiled code of this process knows a movement by."""
    group = movement.partitions[0].group
    with _lock:
        found = _numbers.get(movement)
        if found is None:
            found = _numbers[movement] = len(_known)
            known = _Known(movement.integers, None if group is None else weakref.ref(group))
            _known.append(known)
            _used[found] = movement
        return found


def _movement(key: int) -> Movement:
    """The movement of that number, made again if its layer is gone, as before a late backward."""
    found = _used.get(key)
    if found is None:
        known = _known[key]
        if known.group is None:
            return known.integers
        group = known.group()
        if group is None:
            raise WeftError(
                f"compiled code calls {known.integers.name} in a group that is gone: compile it "
                "again with a layer of a group that there is"
            )
        found = _used[key] = known.integers.within(group)
    return found


def compiled(key: int, x: Tensor) -> Tensor:
    """What the layer of that number gives for a tensor, in code that is being compiled."""
    result: Tensor = _move(x, key, torch.is_grad_enabled() and x.requires_grad)
    return result


@torch.library.custom_op("weft::move", mutates_args=())
def _move(x: Tensor, key: int, needs: bool) -> Tensor:
    return _there(x, key, needs)


@without_modes
def _there(x: Tensor, key: int, needs: bool) -> Tensor:
    movement = _movement(key)
    wire = movement.partitions[0].wire
    ranks = movement.groups.get(wire.rank)
    if ranks is None:
        return x.clone()
    call = Call(movement, wire, ranks, compiled=True).opened(x, needs=needs)
    assert call.opening is not None
    if call.opening.needs != needs:
        raise AssertionError("an opening where only some ranks need a gradient must not succeed")
    y = call.run(x)
    _check(movement, wire.rank, tuple(x.shape), y)
    return y


@torch.library.custom_op("weft::move_back", mutates_args=())
def _move_back(grad: Tensor, key: int, shape: Sequence[int]) -> Tensor:
    return _back(grad, key, shape)


@without_modes
def _back(grad: Tensor, key: int, shape: Sequence[int]) -> Tensor:
    movement = _movement(key)
    wire = movement.partitions[0].wire
    ranks = movement.groups.get(wire.rank)
    if ranks is None:
        return grad.clone()
    call = Call(movement, wire, ranks, compiled=True).back(tuple(shape))
    return call.opened(grad, needs=False).run(grad)


def _foreseen(movement: Movement, shape: Shape) -> Shape:
    """The shape of this rank's result, from what this rank knows alone."""
    rank = movement.partitions[0].rank
    ranks = movement.groups.get(rank)
    if ranks is None:
        return shape
    told = movement.expected(rank)
    if told is not None:
        givers = movement.givers
        known = tuple((each, tuple(told[each])) for each in ranks if each in givers)
        return dict(planned(movement, known).want.shapes).get(rank, (0,))
    found = movement.alone(rank, shape) if rank in movement.givers else None
    if found is None:
        raise WeftError(
            f"rank {rank}: {movement.name} under torch.compile needs shape=, since this rank's "
            "tensor alone does not tell what comes"
        )
    return found


def _check(movement: Movement, rank: int, shape: Shape, y: Tensor) -> None:
    foreseen = _foreseen(movement, shape)
    if tuple(y.shape) != foreseen:
        raise WeftError(
            f"rank {rank}: {movement.name} was compiled for a result of {foreseen} and gave "
            f"{tuple(y.shape)}: pass the shape= that is"
        )


@_move.register_fake
def _(x: Tensor, key: int, needs: bool) -> Tensor:
    return x.new_empty(_foreseen(_movement(key), tuple(x.shape)))


@_move_back.register_fake
def _(grad: Tensor, key: int, shape: Sequence[int]) -> Tensor:
    return grad.new_empty(tuple(shape))


def _setup(ctx: Any, inputs: tuple[Tensor, int, bool], output: Tensor) -> None:
    x, ctx.key, _ = inputs
    ctx.shape = tuple(x.shape)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    back = torch.ops.weft.move_back(grad, ctx.key, ctx.shape)
    return back, None, None


def _no_more(ctx: Any, grad: Tensor) -> None:
    raise WeftError(
        "a compiled layer has no second derivative: run the part of the model that needs it "
        "without torch.compile"
    )


_move.register_autograd(_backward, setup_context=_setup)
_move_back.register_autograd(_no_more)

for _each in (torch.ops.weft.move.default, torch.ops.weft.move_back.default):
    has_side_effect(_each)
