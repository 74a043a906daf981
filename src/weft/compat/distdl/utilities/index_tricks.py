"""`distdl.utilities.index_tricks`."""

from ..slicing import cartesian_index_c as cartesian_index_c
from ..slicing import cartesian_index_f as cartesian_index_f
