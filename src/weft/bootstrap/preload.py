"""What the server of processes does once for all ranks, as the last that it imports.

Each rank would spend half a second on the first machine code that it loads, since numba imports its
own parts only then; and the first full collection of garbage would look through all that was
imported, and so copy it, which processes share as long as nobody writes to it.
"""

from __future__ import annotations

import contextlib
import gc

with contextlib.suppress(Exception):  # missing, broken or another release: ranks do without it
    from numba.core.registry import cpu_target

    cpu_target.target_context.refresh()

gc.collect()
gc.freeze()
