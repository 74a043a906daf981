"""Sparse all-reduce: one call, many algorithms.

`api` is the call; `algorithms/` has a file for each algorithm; `choose` is the rule that takes one.
`family/` has its siblings, `tables` takes lists.
"""

from ..schedules.hosts import Hosts
from . import algorithms, choose
from .api import explain, sparse_all_reduce
from .explanation import Explanation
from .family import sparse_all_gather, sparse_broadcast, sparse_reduce, sparse_reduce_scatter
from .record import Record, last_call
from .registry import ALGORITHMS, EAGER
from .sizes import Sizes

__all__ = [
    "ALGORITHMS",
    "EAGER",
    "Explanation",
    "Hosts",
    "Record",
    "Sizes",
    "algorithms",
    "choose",
    "explain",
    "last_call",
    "sparse_all_gather",
    "sparse_all_reduce",
    "sparse_broadcast",
    "sparse_reduce",
    "sparse_reduce_scatter",
]
