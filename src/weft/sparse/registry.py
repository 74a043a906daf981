"""The algorithms by name: what `algorithm=` may be, and what the rule chooses from.

To add an algorithm, write `algorithms/x.py` with one decorated function, import it in
`algorithms/__init__.py`, describe it in `docs/algorithms.md`, and give the rule a line for it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..base.arguments import shown
from ..base.errors import WeftError, meant
from .rows import Rows

if TYPE_CHECKING:
    from .call import Call
    from .canonical import CanonicalRows

ALONE = "alone"
"""What "runs" where the group is one rank, but for what goes by `plain`."""

EAGER = "eager"
"""What runs where all rows travelled in the opening exchange."""

PLAIN = "plain"
"""What runs by verbs (`plain`): no algorithm of the wire, but one that can be asked for by name."""

Algorithm = Callable[["CanonicalRows", "Call"], Rows]
"""One rank's program: its rows in, the canonical sum out, in memory from `call.result`."""

ALGORITHMS: dict[str, Algorithm] = {}
"""All algorithms, by name."""


def algorithm(function: Algorithm) -> Algorithm:
    """Enter the decorated function among the algorithms, under its own name."""
    ALGORITHMS[function.__name__] = function
    return function


def asked_for(name: object) -> str:
    """The name of an algorithm, or "auto", that a call's argument means; in place of "auto" what
    the environment's WEFT_ALGORITHM says.

    Raises:
        WeftError: no algorithm has that name; the text lists what there is.
    """
    said = os.environ.get("WEFT_ALGORITHM") if name == "auto" else None
    chosen = str(said or name)
    names = [*ALGORITHMS, PLAIN]
    if chosen != "auto" and chosen not in names:
        where = f"WEFT_ALGORITHM={said}: " if said else ""
        hint = meant(chosen, ["auto", *names])
        known = ", ".join(sorted(names))
        raise WeftError(
            f"{where}algorithm {shown(chosen)} is unknown{hint}: use auto or one of {known}"
        )
    return chosen
