"""DistDL's partitions and data movement layers, under their names.

A script that was written for DistDL runs if it imports `weft.compat.distdl` in place of `distdl`:
the modules have the names that they have there. Every name is here, too. Neither MPI nor mpi4py is
needed. The first partition starts weft, which finds the ranks by the launcher's environment
(torchrun, mpirun, srun).

Sources: DistDL's manual, versions 0.5 and 0.6; Hewett and Grady, "A linear algebraic approach to
model parallelism in deep learning" (arXiv 2006.03108); and what DistDL's layers do when they run.
"""

from . import backend as backend
from . import backends as backends
from . import config as config
from . import functional as functional
from . import mixins as mixins
from . import nn as nn
from . import slicing as slicing
from . import tensor_decomposition as tensor_decomposition
from . import utilities as utilities
from .backend import BufferManager as BufferManager
from .backend import ExpandableBuffer as ExpandableBuffer
from .backend import get_device as get_device
from .backend import set_device as set_device
from .communicator import MPI as MPI
from .communicator import PROC_NULL as PROC_NULL
from .communicator import Communicator as Communicator
from .communicator import Group as Group
from .communicator import Request as Request
from .communicator import print_sequential as print_sequential
from .config import get_default_array as get_default_array
from .config import get_default_comm as get_default_comm
from .config import set_backend as set_backend
from .nn import AllGather as AllGather
from .nn import AllSumReduce as AllSumReduce
from .nn import Broadcast as Broadcast
from .nn import DistributedTranspose as DistributedTranspose
from .nn import HaloExchange as HaloExchange
from .nn import Module as Module
from .nn import ReduceScatter as ReduceScatter
from .nn import Repartition as Repartition
from .nn import SumReduce as SumReduce
from .nn.mixins import ConvMixin as ConvMixin
from .nn.mixins import HaloMixin as HaloMixin
from .nn.mixins import InterpolateMixin as InterpolateMixin
from .nn.mixins import PoolingMixin as PoolingMixin
from .partition import MPICartesianPartition as MPICartesianPartition
from .partition import MPIPartition as MPIPartition
from .slicing import assemble_index_filter as assemble_index_filter
from .slicing import assemble_slices as assemble_slices
from .slicing import cartesian_index_c as cartesian_index_c
from .slicing import cartesian_index_f as cartesian_index_f
from .slicing import compute_intersection as compute_intersection
from .slicing import compute_nd_slice_shape as compute_nd_slice_shape
from .slicing import compute_nd_slice_volume as compute_nd_slice_volume
from .slicing import compute_partition_intersection as compute_partition_intersection
from .slicing import compute_start_index as compute_start_index
from .slicing import compute_stop_index as compute_stop_index
from .slicing import compute_subshape as compute_subshape
from .slicing import compute_subshape_along_axis as compute_subshape_along_axis
from .slicing import filtered_range_index as filtered_range_index
from .slicing import get_rearrange_ordering as get_rearrange_ordering
from .slicing import range_index as range_index
from .slicing import worker_layout as worker_layout
from .tensor_comm import assemble_global_tensor_structure as assemble_global_tensor_structure
from .tensor_comm import (
    assemble_global_tensor_structure_along_axis as assemble_global_tensor_structure_along_axis,
)
from .tensor_decomposition import (
    compute_subtensor_intersection_slice as compute_subtensor_intersection_slice,
)
from .tensor_decomposition import (
    compute_subtensor_shapes_balanced as compute_subtensor_shapes_balanced,
)
from .tensor_decomposition import (
    compute_subtensor_shapes_unbalanced as compute_subtensor_shapes_unbalanced,
)
from .tensor_decomposition import compute_subtensor_start_indices as compute_subtensor_start_indices
from .tensor_decomposition import compute_subtensor_stop_indices as compute_subtensor_stop_indices
from .tensors import TensorStructure as TensorStructure
from .tensors import ZeroVolumeCorrectorFunction as ZeroVolumeCorrectorFunction
from .tensors import distdl_padding_to_torch_padding as distdl_padding_to_torch_padding
from .tensors import zero_volume_tensor as zero_volume_tensor
from .utilities.misc import Bunch as Bunch
from .utilities.misc import DummyContext as DummyContext
from .utilities.misc import stream_barrier as stream_barrier
