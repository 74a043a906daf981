"""Sparse all-reduce: one call, many algorithms.

`api` is the call; `registry` the table of algorithms, each one file of `algorithms/`; `choose` is
the rule that takes one, and `explanation` says why. `family/` has its siblings, `tables` takes
lists.
"""

from ..schedules.hosts import Hosts
from . import algorithms, choose
from .api import explain, sparse_all_reduce
from .explanation import Explanation
from .family import sparse_all_gather, sparse_broadcast, sparse_reduce, sparse_reduce_scatter
from .record import Record, last_call
from .registry import ALGORITHMS, EAGER, Algorithm, algorithm, unregister
from .sizes import Sizes
from .traffic import Traffic

__all__ = [
    "ALGORITHMS",
    "EAGER",
    "Algorithm",
    "Explanation",
    "Hosts",
    "Record",
    "Sizes",
    "Traffic",
    "algorithm",
    "algorithms",
    "choose",
    "explain",
    "last_call",
    "sparse_all_gather",
    "sparse_all_reduce",
    "sparse_broadcast",
    "sparse_reduce",
    "sparse_reduce_scatter",
    "unregister",
]
