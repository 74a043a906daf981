"""`weft bench`: sparse all-reduce beside what PyTorch does today, and beside the bound.

The pieces: `cases` draws the data, `oracle` knows the right answer, `contenders` are those that are
measured, `measure` is one rank's program, `results` what it found, `table` shows that, and
`command` is the command line. Of these only `command` is imported when the command line starts.
"""

from .command import bench

__all__ = ["bench"]
