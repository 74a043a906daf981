"""Under which addresses rank 0's host is found by the others, before there is a store."""

from __future__ import annotations

import os

import torch.distributed as dist

from ..errors import WeftError
from ..wire.interface import VARIABLES, interfaces, is_loopback, own_address

__all__ = ["first", "reachable"]


def first() -> str:
    """The likeliest of them.

    Raises:
        WeftError: the interface or the address that is named is not there; the others shall hear.
    """
    try:
        return own_address(dist.HashStore())
    except OSError as error:
        raise WeftError(f"rank 0: {error}") from error


def reachable() -> tuple[str, ...]:
    """All of them, the likeliest first: that one alone if an interface was named.

    Raises:
        WeftError: as `first`.
    """
    best = first()
    if is_loopback(best) or any(os.environ.get(name, "").strip() for name in VARIABLES):
        return (best,)
    others = (
        address
        for each in interfaces()
        for address in each.addresses
        # that of a link alone has a scope, which means nothing elsewhere
        if "%" not in address and not is_loopback(address)
    )
    return tuple(dict.fromkeys([best, *others]))
