"""The layers as functions: `all_gather(x, ...)` is `AllGather(...)(x)`.

Each call makes the layer again (under torch.compile, once). If you call a layer often, make the
module once instead. Arguments, results and errors are those of the layer.

Example:
    >>> import torch, weft
    >>> from weft.testing import run
    >>> def program(group):
    ...     x = torch.tensor([group.rank])
    ...     return weft.nn.functional.all_gather(x, weft.Partition(2), 0).tolist()
    >>> run(2, program)
    [[0, 1], [0, 1]]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Concatenate, ParamSpec

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

P = ParamSpec("P")


def _function(kind: Callable[P, Layer]) -> Callable[Concatenate[Tensor, P], Tensor]:
    """A layer as a function: of the tensor, then of the layer's arguments."""

    def applied(x: Tensor, *args: P.args, **kwargs: P.kwargs) -> Tensor:
        if torch.compiler.is_compiling():
            from .compiled import compiled, made

            return compiled(made(kind, *args, **kwargs), x)
        result: Tensor = kind(*args, **kwargs)(x)
        return result

    applied.__doc__ = f"`weft.nn.{kind.__name__}` of these arguments, applied to `x`."
    return applied  # type: ignore[return-value]  # whose tensor may be named, too


all_gather = _function(AllGather)
"""`weft.nn.AllGather` of these arguments, applied to `x`."""

reduce_scatter = _function(ReduceScatter)
"""`weft.nn.ReduceScatter` of these arguments, applied to `x`."""

all_sum_reduce = _function(AllSumReduce)
"""`weft.nn.AllSumReduce` of these arguments, applied to `x`."""

all_to_all = _function(AllToAll)
"""`weft.nn.AllToAll` of these arguments, applied to `x`."""

broadcast = _function(Broadcast)
"""`weft.nn.Broadcast` of these arguments, applied to `x`."""

sum_reduce = _function(SumReduce)
"""`weft.nn.SumReduce` of these arguments, applied to `x`."""

scatter = _function(Scatter)
"""`weft.nn.Scatter` of these arguments, applied to `x`."""

gather = _function(Gather)
"""`weft.nn.Gather` of these arguments, applied to `x`."""

repartition = _function(Repartition)
"""`weft.nn.Repartition` of these arguments, applied to `x`."""

halo_exchange = _function(HaloExchange)
"""`weft.nn.HaloExchange` of these arguments, applied to `x`."""
