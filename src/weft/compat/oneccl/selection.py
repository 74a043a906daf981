"""Selection: the environment's CCL_SPARSE_ALLREDUCE, in terms of weft's algorithms.

oneCCL's names are those of its selectors: ring, mask and allgatherv, before them basic, size and
allgather. A name of weft's own is taken too. Unset, weft's "auto" chooses.
"""

from __future__ import annotations

import os

from ...sparse.registry import ALGORITHMS
from .dtypes import Wrong

__all__ = ["ONECCL", "selected"]

ONECCL = {
    "ring": "ring",
    "mask": "mask",
    "allgatherv": "gather",
    "allgather": "gather",
    "basic": "ring",
    "size": "ring",
}
"""weft's algorithm for each of oneCCL's."""

_VARIABLE = "CCL_SPARSE_ALLREDUCE"


def selected() -> str:
    """What `algorithm=` of weft's call the environment asks for."""
    said = os.environ.get(_VARIABLE, "").strip()
    if not said:
        return "auto"
    name = said if said in ALGORITHMS else ONECCL.get(said, said)
    if name not in ("auto", *ALGORITHMS):
        known = sorted({"auto", *ALGORITHMS, *(a for a, b in ONECCL.items() if b in ALGORITHMS)})
        raise Wrong(f"{_VARIABLE}={said!r} is unknown: use one of {', '.join(known)}")
    return name
