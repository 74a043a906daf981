"""`weft plan`: what a sparse all-reduce would take on a cluster that need not be here.

`predict` says what so many ranks would bring and asks the algorithms' costs, `table` and `plot`
show that, and `command` is the command line.
"""

from .command import plan

__all__ = ["plan"]
