"""The layers as functions: `all_gather(x, ...)` is `AllGather(...)(x)`.

A layer that is called more than once is better made once; these make it anew on every call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .all_gather import AllGather, ReduceScatter
from .all_sum_reduce import AllSumReduce
from .all_to_all import AllToAll
from .broadcast import Broadcast, SumReduce
from .halo import HaloExchange
from .layer import Layer
from .repartition import Repartition
from .scatter import Gather, Scatter
from .zero_volume import zero_volume_corrector

__all__ = [
    "all_gather",
    "all_sum_reduce",
    "all_to_all",
    "broadcast",
    "gather",
    "halo_exchange",
    "reduce_scatter",
    "repartition",
    "scatter",
    "sum_reduce",
    "zero_volume_corrector",
]


def _applied(kind: type[Layer], x: Tensor, args: Any, kwargs: Any) -> Tensor:
    if torch.compiler.is_compiling():
        from .compiled import compiled

        return compiled(_made(kind, *args, **kwargs), x)
    result: Tensor = kind(*args, **kwargs)(x)
    return result


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # torch's has no types
def _made(kind: type[Layer], *args: Any, **kwargs: Any) -> int:
    """The number of a layer that is made while code is compiled, and not again by that code."""
    from .compiled import number

    return number(kind(*args, **kwargs).spec)


def all_gather(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`weft.nn.AllGather` of these arguments, applied to `x`."""
    return _applied(AllGather, x, args, kwargs)


def reduce_scatter(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`weft.nn.ReduceScatter` of these arguments, applied to `x`."""
    return _applied(ReduceScatter, x, args, kwargs)


def all_sum_reduce(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`weft.nn.AllSumReduce` of these arguments, applied to `x`."""
    return _applied(AllSumReduce, x, args, kwargs)


def all_to_all(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`weft.nn.AllToAll` of these arguments, applied to `x`."""
    return _applied(AllToAll, x, args, kwargs)


def broadcast(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`weft.nn.Broadcast` of these arguments, applied to `x`."""
    return _applied(Broadcast, x, args, kwargs)


def sum_reduce(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`weft.nn.SumReduce` of these arguments, applied to `x`."""
    return _applied(SumReduce, x, args, kwargs)


def scatter(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`weft.nn.Scatter` of these arguments, applied to `x`."""
    return _applied(Scatter, x, args, kwargs)


def gather(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`weft.nn.Gather` of these arguments, applied to `x`."""
    return _applied(Gather, x, args, kwargs)


def repartition(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`weft.nn.Repartition` of these arguments, applied to `x`."""
    return _applied(Repartition, x, args, kwargs)


def halo_exchange(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`weft.nn.HaloExchange` of these arguments, applied to `x`."""
    return _applied(HaloExchange, x, args, kwargs)
