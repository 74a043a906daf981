"""Sparse all-reduce: one call, many algorithms.

`api` is the call; `registry` the table of algorithms, each one file of this folder; `cost` and
`choice` pick one. Importing an algorithm's file registers it.
"""

from . import dense, doubling, gather, holders, split  # register, in the order they are listed
from .api import Record, explain, last_call, sparse_all_reduce
from .choice import Explanation
from .cost import Cost, Load
from .registry import ALGORITHMS, Algorithm, algorithm

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "Cost",
    "Explanation",
    "Load",
    "Record",
    "algorithm",
    "dense",
    "doubling",
    "explain",
    "gather",
    "holders",
    "last_call",
    "sparse_all_reduce",
    "split",
]
