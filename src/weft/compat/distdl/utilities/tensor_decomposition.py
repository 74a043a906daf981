"""`distdl.utilities.tensor_decomposition`."""

from ..tensor_decomposition import (
    compute_subtensor_intersection_slice as compute_subtensor_intersection_slice,
)
from ..tensor_decomposition import (
    compute_subtensor_shapes_balanced as compute_subtensor_shapes_balanced,
)
from ..tensor_decomposition import (
    compute_subtensor_start_indices as compute_subtensor_start_indices,
)
from ..tensor_decomposition import compute_subtensor_stop_indices as compute_subtensor_stop_indices
