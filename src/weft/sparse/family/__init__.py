"""The siblings of the sparse all-reduce: reduce-scatter, all-gather, reduce and broadcast."""

from .all_gather import sparse_all_gather
from .broadcast import sparse_broadcast
from .reduce import sparse_reduce
from .reduce_scatter import sparse_reduce_scatter

__all__ = ["sparse_all_gather", "sparse_broadcast", "sparse_reduce", "sparse_reduce_scatter"]
