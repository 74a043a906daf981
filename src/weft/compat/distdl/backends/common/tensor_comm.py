"""`distdl.backends.common.tensor_comm`."""

from ...tensor_comm import assemble_global_tensor_structure as assemble_global_tensor_structure
from ...tensor_comm import (
    assemble_global_tensor_structure_along_axis as assemble_global_tensor_structure_along_axis,
)
