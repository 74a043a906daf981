"""The algorithms of the sparse all-reduce, one file each; importing a file registers it.

To add one, write `x.py` here, import it below, and describe it in `docs/algorithms.md`.
"""

from . import doubling, gather, holders, split

__all__ = ["doubling", "gather", "holders", "split"]
