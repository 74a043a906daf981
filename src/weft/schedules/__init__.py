"""Schedules: who sends which bytes to whom, in which order, over a group; they know no rows.

An algorithm is written with these and with `weft.kernels`.
"""

from .chain import Chain
from .dense import dense_all_reduce
from .hosts import Hosts, hosts_of

__all__ = ["Chain", "Hosts", "dense_all_reduce", "hosts_of"]
