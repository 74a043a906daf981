"""Which wire carries a group's bytes: the program's choice, the environment's, or weft's own."""

from __future__ import annotations

import os

from ..base.errors import WeftError
from ..rendezvous.world import own_rank
from ..wire.factory import Factory
from ..wire.registry import wire_named

_of_program: str | None = None  # what `weft.init(wire=)` said; None: nothing


def choose(wire: str | None) -> None:
    """Set the wire of groups that are made from now on. None: the environment's."""
    global _of_program
    _of_program = wire


def chosen() -> str:
    """The name of the wire that `choose` set, else WEFT_WIRE's, else WEFT_SAFE's.

    Raises:
        WeftError: there is no such wire.
    """
    name = wire_name()
    try:
        factory_of(name)
    except WeftError as error:
        raise WeftError(f"{own_rank()}{error}") from error
    return name


def wire_name() -> str:
    """`chosen`, which need not be there."""
    safe = "torch" if os.environ.get("WEFT_SAFE") == "1" else "tcp"
    return _of_program or os.environ.get("WEFT_WIRE") or safe


def factory_of(name: str) -> Factory:
    """What makes the wire of this name; or WeftError says why this rank cannot have it."""
    try:
        return wire_named(name)
    except WeftError as error:
        if _of_program or name != os.environ.get("WEFT_WIRE"):
            raise
        raise WeftError(f"WEFT_WIRE: {error}") from error


def chosen_by() -> str:
    """Where `chosen` is from: an argument, a variable, or "default"."""
    if _of_program:
        return "weft.init(wire=)"
    if os.environ.get("WEFT_WIRE"):
        return "WEFT_WIRE"
    return "WEFT_SAFE" if os.environ.get("WEFT_SAFE") == "1" else "default"
