"""DistDL's partitions and data movement layers, under their names.

A script that was written for DistDL runs by changing its imports: every name is here, whatever
module of DistDL's it was in, and `nn`, `slicing`, `tensor_decomposition`, `mixins` are modules for
scripts that name those. Neither MPI nor mpi4py is needed; weft is started by the first partition,
under whatever launched the processes.

The sources are DistDL's manual, versions 0.5 and 0.6 (Hewett and Grady, "A linear algebraic
approach to model parallelism in deep learning", arXiv:2006.03108), and what its layers were seen to
do.
"""

from . import nn, slicing, tensor_decomposition
from .nn import (
    AllGather,
    AllSumReduce,
    Broadcast,
    DistributedTranspose,
    HaloExchange,
    Module,
    ReduceScatter,
    Repartition,
    SumReduce,
    mixins,
)
from .nn.mixins import ConvMixin, HaloMixin, PoolingMixin
from .partition import (
    MPI,
    PROC_NULL,
    Communicator,
    MPICartesianPartition,
    MPIPartition,
    set_backend,
)
from .slicing import (
    assemble_index_filter,
    assemble_slices,
    cartesian_index_c,
    cartesian_index_f,
    compute_intersection,
    compute_nd_slice_shape,
    compute_nd_slice_volume,
    compute_partition_intersection,
    compute_start_index,
    compute_stop_index,
    compute_subshape,
    compute_subshape_along_axis,
    filtered_range_index,
    range_index,
    worker_layout,
)
from .tensor_decomposition import (
    compute_subtensor_intersection_slice,
    compute_subtensor_shapes_balanced,
    compute_subtensor_shapes_unbalanced,
    compute_subtensor_start_indices,
    compute_subtensor_stop_indices,
)
from .tensors import (
    TensorStructure,
    ZeroVolumeCorrectorFunction,
    distdl_padding_to_torch_padding,
    zero_volume_tensor,
)

__all__ = [
    "MPI",
    "PROC_NULL",
    "AllGather",
    "AllSumReduce",
    "Broadcast",
    "Communicator",
    "ConvMixin",
    "DistributedTranspose",
    "HaloExchange",
    "HaloMixin",
    "MPICartesianPartition",
    "MPIPartition",
    "Module",
    "PoolingMixin",
    "ReduceScatter",
    "Repartition",
    "SumReduce",
    "TensorStructure",
    "ZeroVolumeCorrectorFunction",
    "assemble_index_filter",
    "assemble_slices",
    "cartesian_index_c",
    "cartesian_index_f",
    "compute_intersection",
    "compute_nd_slice_shape",
    "compute_nd_slice_volume",
    "compute_partition_intersection",
    "compute_start_index",
    "compute_stop_index",
    "compute_subshape",
    "compute_subshape_along_axis",
    "compute_subtensor_intersection_slice",
    "compute_subtensor_shapes_balanced",
    "compute_subtensor_shapes_unbalanced",
    "compute_subtensor_start_indices",
    "compute_subtensor_stop_indices",
    "distdl_padding_to_torch_padding",
    "filtered_range_index",
    "mixins",
    "nn",
    "range_index",
    "set_backend",
    "slicing",
    "tensor_decomposition",
    "worker_layout",
    "zero_volume_tensor",
]
