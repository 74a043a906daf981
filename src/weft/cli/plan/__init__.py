"""`weft plan`: what a sparse all-reduce would take on a cluster that need not be here.

The pieces: `sizes` says what so many ranks would bring, `predict` asks the algorithms' costs,
`table` and `plot` show that, and `command` is the command line. Only `command` is imported when
the command line starts.
"""

from .command import plan

__all__ = ["plan"]
