"""Layers that move tensors along a grid of ranks, each with its exact adjoint; sharded tables.

A tensor is cut along a `weft.Partition`. Each layer is one linear map, a plan of integers; its
transpose is the backward pass. The embedding tables whose rows are cut over the ranks
(`ShardedEmbedding` and its siblings) use no partition.
"""

from .all_gather import AllGather, ReduceScatter
from .all_sum_reduce import AllSumReduce
from .all_to_all import AllToAll
from .broadcast import Broadcast, SumReduce
from .dtensor import from_dtensor, to_dtensor
from .halo import HaloExchange
from .layer import Layer
from .partition import Partition
from .repartition import Repartition
from .scatter import Gather, Scatter
from .sharded import (
    ShardedEmbedding,
    ShardedEmbeddingBag,
    load_sharded_state,
    shard_embeddings,
    sharded_lookup,
    sharded_state,
)
from .spec import Spec
from .zero_volume import ZeroVolumeCorrector, zero_volume_tensor

__all__ = [
    "AllGather",
    "AllSumReduce",
    "AllToAll",
    "Broadcast",
    "Gather",
    "HaloExchange",
    "Layer",
    "Partition",
    "ReduceScatter",
    "Repartition",
    "Scatter",
    "ShardedEmbedding",
    "ShardedEmbeddingBag",
    "Spec",
    "SumReduce",
    "ZeroVolumeCorrector",
    "from_dtensor",
    "load_sharded_state",
    "shard_embeddings",
    "sharded_lookup",
    "sharded_state",
    "to_dtensor",
    "zero_volume_tensor",
]
