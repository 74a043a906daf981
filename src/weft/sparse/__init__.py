"""Sparse all-reduce: one call, many algorithms.

`api` is the call; `registry` the table of algorithms, each one file of `algorithms/`; `cost` and
`choice` pick one, and `explanation` says why. `family/` has its siblings, `tables` takes lists.
"""

from ..schedules.hosts import Hosts
from ..wire.link import MERGE, WITHIN, Link
from . import algorithms, link
from .api import explain, sparse_all_reduce
from .cost import Cost, Load
from .explanation import Explanation, predicted
from .family import sparse_all_gather, sparse_broadcast, sparse_reduce, sparse_reduce_scatter
from .record import Record, last_call
from .registry import ALGORITHMS, EAGER, Algorithm, algorithm, unregister

__all__ = [
    "ALGORITHMS",
    "EAGER",
    "MERGE",
    "WITHIN",
    "Algorithm",
    "Cost",
    "Explanation",
    "Hosts",
    "Link",
    "Load",
    "Record",
    "algorithm",
    "algorithms",
    "explain",
    "last_call",
    "link",
    "predicted",
    "sparse_all_gather",
    "sparse_all_reduce",
    "sparse_broadcast",
    "sparse_reduce",
    "sparse_reduce_scatter",
    "unregister",
]
