"""`distdl.backends.common`."""

from ...backend import CartesianPartition as CartesianPartition
from ...backend import Partition as Partition
from . import partition as partition
from . import tensor_comm as tensor_comm
from . import tensor_decomposition as tensor_decomposition
from .tensor_comm import assemble_global_tensor_structure as assemble_global_tensor_structure
from .tensor_comm import (
    assemble_global_tensor_structure_along_axis as assemble_global_tensor_structure_along_axis,
)
