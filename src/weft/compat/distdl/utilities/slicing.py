"""`distdl.utilities.slicing`."""

from ..slicing import assemble_index_filter as assemble_index_filter
from ..slicing import assemble_slices as assemble_slices
from ..slicing import compute_intersection as compute_intersection
from ..slicing import compute_nd_slice_shape as compute_nd_slice_shape
from ..slicing import compute_nd_slice_volume as compute_nd_slice_volume
from ..slicing import compute_partition_intersection as compute_partition_intersection
from ..slicing import compute_start_index as compute_start_index
from ..slicing import compute_stop_index as compute_stop_index
from ..slicing import compute_subshape as compute_subshape
from ..slicing import compute_subshape_along_axis as compute_subshape_along_axis
from ..slicing import filtered_range_index as filtered_range_index
from ..slicing import get_rearrange_ordering as get_rearrange_ordering
from ..slicing import range_index as range_index
from ..slicing import worker_layout as worker_layout
