"""`distdl.backends.common.tensor_decomposition`."""

from ...tensor_decomposition import (
    compute_subtensor_shapes_unbalanced as compute_subtensor_shapes_unbalanced,
)
