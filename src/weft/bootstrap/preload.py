"""What the server of processes does once for all ranks, as the last that it imports.

Each rank would import the library that machine code is loaded with; and the first full collection
of garbage would look through all that was imported, and so copy it, which processes share as long
as nobody writes to it.
"""

from __future__ import annotations

import contextlib
import gc

with contextlib.suppress(Exception):  # missing or broken: ranks do without it
    import llvmlite.binding  # noqa: F401  # so that it is there in each rank

gc.collect()
gc.freeze()
