"""weft: sparse and partitioned collectives for PyTorch.

Importing weft starts nothing: no thread, no socket, no compiler.
"""

from . import ddp, sparse
from .bootstrap.init import init, shutdown
from .errors import Error, StillRunning, WeftError, WireError
from .rows import Rows
from .sparse import algorithm, explain, sparse_all_reduce
from .wire.base import Wire

__version__ = "0.1.0"

__all__ = [
    "Error",
    "Rows",
    "StillRunning",
    "WeftError",
    "Wire",
    "WireError",
    "algorithm",
    "ddp",
    "explain",
    "init",
    "shutdown",
    "sparse",
    "sparse_all_reduce",
]
