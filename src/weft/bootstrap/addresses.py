"""Under which addresses rank 0's host is found by the others, before there is a store.

An interface that is named and not there keeps nobody from meeting: the roll call tells all of it.
"""

from __future__ import annotations

import logging
import os
import socket
import time

import torch.distributed as dist

from ..errors import WireError
from ..wire.interface import (
    VARIABLES,
    free_address,
    interfaces,
    is_loopback,
    is_own,
    own_address,
)
from .store import listener, pauses

__all__ = ["first", "is_here", "led_here", "reachable"]

_log = logging.getLogger("weft")
_CALL = 3.0  # seconds in which a host that leads here answers, and after which the person is told


def first() -> str:
    """The likeliest of them."""
    try:
        return own_address(dist.HashStore())
    except OSError:
        return free_address()


def reachable() -> tuple[str, ...]:
    """All of them, the likeliest first: that one alone if an interface was named."""
    try:
        best = own_address(dist.HashStore())
    except OSError:
        best = free_address()
    else:
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


def is_here(host: str) -> bool:
    """Whether a host's name or number is this machine's."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:  # nobody knows it
        return False
    return any(is_own(str(name[0])) for *_, name in found)


def led_here(host: str, port: int, timeout: float) -> int | None:
    """A listener behind a host's name or number that is not this machine's, once that leads here.

    A service's does, as Kubernetes has them, or one that a router translates. One that was written
    wrongly does not, and torch itself would print stack traces all the while.

    Returns:
        Its file descriptor, which is the caller's; None if the port is taken.

    Raises:
        WireError: it did not lead to anybody in time.
    """
    try:
        sock = listener("", port)
    except OSError:
        return None
    began = time.monotonic()
    refusal, told = "", False
    with sock:
        for _ in pauses(began + timeout):
            try:
                with socket.create_connection((host, port), min(timeout, _CALL)):
                    return os.dup(sock.fileno())
            except OSError as error:
                refusal = error.strerror or str(error)
            if not told and time.monotonic() - began >= min(timeout, _CALL):
                told = True
                _log.warning("rank 0 %s: waiting for that to lead here", _elsewhere(host))
    raise WireError(
        f"rank 0 {_elsewhere(host)}, and port {port} there did not lead here within {timeout:.0f} "
        f"s ({refusal}): start rank 0 on that host, or have the ranks meet at this one",
        rank=0,
    )


def _elsewhere(host: str) -> str:
    there = ", ".join(f"{each.name} {each.addresses[0]}" for each in interfaces())
    return f"is on {socket.gethostname()}, which is not {host} (it has {there})"
