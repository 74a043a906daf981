"""The algorithms of the sparse all-reduce, one file each; importing a file registers it.

`registry` says what adding one takes.
"""

from . import doubling, gather, holders, split

__all__ = ["doubling", "gather", "holders", "split"]
