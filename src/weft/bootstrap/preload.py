"""The last import of the server that ranks are forked from (`local`): work done once for all ranks.

It imports the wires, and loads the machine code of the kernels, which else each rank would do. And
it freezes the garbage collector: a full collection in a rank would write to all imported objects,
and so copy pages that processes share.
"""

from __future__ import annotations

import contextlib
import encodings.idna  # noqa: F401  # of the names of hosts
import gc

with contextlib.suppress(Exception):  # missing or broken: each rank finds out, and does without it
    from ..kernels import jit
    from ..wire.tcp import wire  # noqa: F401

    jit.load_what_is_kept()

gc.collect()
gc.freeze()
