"""The layers under torch.compile: each is one custom operator.

The compiler must know the shape of an output without communication. For ReduceScatter,
AllSumReduce and HaloExchange it follows from that of this rank's own tensor. Other layers need
`shape=`. Every call checks that the output has the shape that the compiler was told. All else is as
in eager code: the same handshake, and the same plan.

The operators are marked as having side effects: if one rank's compiler removed a collective, the
others would hang. They have no second derivative, and raise an error that says so.

Code that is being compiled, or traced, imports this file, and no other does: with it comes torch's
compiler, which takes seconds to import.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx.node import has_side_effect

from ..base._torch import without_modes
from ..base.errors import WeftError
from ..base.tensors import Shape, in_format_of
from .autograd import Call
from .spec import Spec, planned

_lock = threading.Lock()
# compiled code knows specs by number; it must not keep a group alive
_known: list[tuple[Spec, weakref.ref[Any] | None]] = []
_used: weakref.WeakValueDictionary[int, Spec] = weakref.WeakValueDictionary()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # torch's has no types
def number(spec: Spec) -> int:
    """The number by which compiled code in this process knows a spec."""
    group = spec.partitions[0].group_handle
    known = spec.integers, None if group is None else weakref.ref(group)
    with _lock:
        if known not in _known:
            _known.append(known)
        found = _known.index(known)
        _used.setdefault(found, spec)
    return found


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # torch's has no types
def made(kind: Callable[..., Any], *args: Any, **kwargs: Any) -> int:
    """The number of the spec of a layer that is made once, while code is compiled."""
    found: int = number(kind(*args, **kwargs).spec)
    return found


def spec_of(key: int) -> Spec:
    """The spec of a number. It is made again if its layer is gone, as it may be in backward.

    Raises:
        WeftError: its group is gone, too.
    """
    found = _used.get(key)
    if found is None:
        integers, known = _known[key]
        group = None if known is None else known()
        if known is not None and group is None:
            raise WeftError(
                f"compiled code calls {integers.name} in a group that is gone: compile it again "
                "with a layer of a group that there is"
            )
        found = _used[key] = integers.within(group)
    return found


def compiled(key: int, x: Tensor) -> Tensor:
    """The output of the layer with this number, in code that is being compiled."""
    result: Tensor = _move(x, key, torch.is_grad_enabled() and x.requires_grad)
    return result


@torch.library.custom_op("weft::move", mutates_args=())
def _move(x: Tensor, key: int, needs: bool) -> Tensor:
    return _run(x, key, needs, None)


@torch.library.custom_op("weft::move_back", mutates_args=())
def _move_back(grad: Tensor, key: int, shape: Sequence[int]) -> Tensor:
    return _run(grad, key, False, tuple(shape))


@without_modes
def _run(x: Tensor, key: int, needs: bool, undone: Shape | None) -> Tensor:
    """Forward; or backward, if `undone` is the shape of the tensor that was passed to forward."""
    spec = spec_of(key)
    group = spec.partitions[0].group
    ranks = spec.groups.get(group.rank)
    if ranks is None:
        return x.clone()
    call = Call(spec, group, ranks, compiled=True)
    y = (call if undone is None else call.back(undone)).run(x, needs=needs).output
    foreseen = tuple(y.shape) if undone is not None else _foreseen(spec, tuple(x.shape))
    if tuple(y.shape) != foreseen:
        raise WeftError(
            f"rank {group.rank}: {spec.name} was compiled for a result of {foreseen} and gave "
            f"{tuple(y.shape)}: pass the shape= that is"
        )
    return y


def _foreseen(spec: Spec, shape: Shape) -> Shape:
    """The shape of this rank's output, from what this rank alone knows.

    Raises:
        WeftError: it does not follow without `shape=`.
    """
    rank = spec.partitions[0].rank
    ranks = spec.groups.get(rank)
    if ranks is None:
        return shape
    told = spec.expected(rank)
    if told is not None:
        known = tuple((each, tuple(told[each])) for each in ranks if each in spec.sources)
        return dict(planned(spec, known).want.shapes).get(rank, (0,))
    found = spec.output(rank, shape) if rank in spec.sources else None
    if found is None:
        raise WeftError(
            f"rank {rank}: {spec.name} under torch.compile needs shape=, since this rank's "
            "tensor alone does not tell what comes"
        )
    return found


@_move.register_fake
def _(x: Tensor, key: int, needs: bool) -> Tensor:
    return in_format_of(x, x.new_empty(_foreseen(spec_of(key), tuple(x.shape))))


@_move_back.register_fake
def _(grad: Tensor, key: int, shape: Sequence[int]) -> Tensor:
    return in_format_of(grad, grad.new_empty(tuple(shape)))


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
