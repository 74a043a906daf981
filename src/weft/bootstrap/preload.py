"""The last import of the server that ranks are forked from (`local`): work done once for all ranks.

It imports the library that loads machine code, which else each rank would import. And it freezes
the garbage collector: a full collection in a rank would write to all imported objects, and so copy
pages that processes share.
"""

from __future__ import annotations

import contextlib
import gc

with contextlib.suppress(Exception):  # missing or broken: ranks do without it
    import llvmlite.binding  # noqa: F401  # so that it is there in each rank

gc.collect()
gc.freeze()
