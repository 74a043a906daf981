"""DistDL's data movement layers, by the layers of `weft.nn`.

Each is a torch.nn.Module that takes this worker's tensor, or one without elements where it has no
part, and returns new memory. Gradients, shapes and errors are those of `weft.nn`.
"""

from torch.nn import Module  # DistDL's own sets things up before a call, which is not needed here

from . import mixins
from .halo import HaloExchange
from .layers import AllGather, AllSumReduce, Broadcast, ReduceScatter, Repartition, SumReduce

DistributedTranspose = Repartition
"""The older name."""

__all__ = [
    "AllGather",
    "AllSumReduce",
    "Broadcast",
    "DistributedTranspose",
    "HaloExchange",
    "Module",
    "ReduceScatter",
    "Repartition",
    "SumReduce",
    "mixins",
]
