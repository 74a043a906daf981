"""The layers as functions: `all_gather(x, ...)` is `AllGather(...)(x)`.

A layer that is called more than once is better made once; these make it anew on every call.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .all_gather import AllGather, ReduceScatter
from .all_sum_reduce import AllSumReduce
from .all_to_all import AllToAll
from .broadcast import Broadcast, SumReduce
from .halo import HaloExchange
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


def all_gather(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`weft.nn.AllGather` of these arguments, applied to `x`."""
    result: Tensor = AllGather(*args, **kwargs)(x)
    return result


def reduce_scatter(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`weft.nn.ReduceScatter` of these arguments, applied to `x`."""
    result: Tensor = ReduceScatter(*args, **kwargs)(x)
    return result


def all_sum_reduce(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`weft.nn.AllSumReduce` of these arguments, applied to `x`."""
    result: Tensor = AllSumReduce(*args, **kwargs)(x)
    return result


def all_to_all(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`weft.nn.AllToAll` of these arguments, applied to `x`."""
    result: Tensor = AllToAll(*args, **kwargs)(x)
    return result


def broadcast(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`weft.nn.Broadcast` of these arguments, applied to `x`."""
    result: Tensor = Broadcast(*args, **kwargs)(x)
    return result


def sum_reduce(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`weft.nn.SumReduce` of these arguments, applied to `x`."""
    result: Tensor = SumReduce(*args, **kwargs)(x)
    return result


def scatter(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`weft.nn.Scatter` of these arguments, applied to `x`."""
    result: Tensor = Scatter(*args, **kwargs)(x)
    return result


def gather(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`weft.nn.Gather` of these arguments, applied to `x`."""
    result: Tensor = Gather(*args, **kwargs)(x)
    return result


def repartition(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`weft.nn.Repartition` of these arguments, applied to `x`."""
    result: Tensor = Repartition(*args, **kwargs)(x)
    return result


def halo_exchange(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`weft.nn.HaloExchange` of these arguments, applied to `x`."""
    result: Tensor = HaloExchange(*args, **kwargs)(x)
    return result
