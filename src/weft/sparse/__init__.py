"""Sparse all-reduce: one call, many algorithms.

`api` is the call; `registry` the table of algorithms, each one file of this folder; `cost` and
`choice` pick one. Importing an algorithm's file registers it.
"""

from ..wire.hosts import Hosts
from ..wire.link import MERGE, Link
from . import (  # register, in the order they are listed
    dense,
    dense_tail,
    doubling,
    gather,
    hierarchical,
    holders,
    link,
    mask,
    ring,
    split,
)
from .all_gather import sparse_all_gather
from .api import explain, sparse_all_reduce
from .broadcast import sparse_broadcast
from .choice import EAGER, Explanation, predicted
from .cost import Cost, Load
from .record import Record, last_call
from .reduce import sparse_reduce
from .reduce_scatter import sparse_reduce_scatter
from .registry import ALGORITHMS, Algorithm, algorithm

__all__ = [
    "ALGORITHMS",
    "EAGER",
    "MERGE",
    "Algorithm",
    "Cost",
    "Explanation",
    "Hosts",
    "Link",
    "Load",
    "Record",
    "algorithm",
    "dense",
    "dense_tail",
    "doubling",
    "explain",
    "gather",
    "hierarchical",
    "holders",
    "last_call",
    "link",
    "mask",
    "predicted",
    "ring",
    "sparse_all_gather",
    "sparse_all_reduce",
    "sparse_broadcast",
    "sparse_reduce",
    "sparse_reduce_scatter",
    "split",
]
