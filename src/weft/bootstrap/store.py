"""Stores that ranks meet at, hosted by this process or by another.

For whoever brings ranks together without a launcher's environment.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import torch.distributed as dist

from ..errors import WeftError, WireError

__all__ = ["LOOPBACK", "host", "join", "outward"]

LOOPBACK = "127.0.0.1"


def host(address: str) -> tuple[dist.TCPStore, int]:
    """A store that listens on one address of this machine, and its port.

    It ends when nobody holds it any more.
    """
    with socket.socket() as listener:
        listener.bind((address, 0))
        listener.listen(1024)
        port = listener.getsockname()[1]
        store = dist.TCPStore(
            address,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=os.dup(listener.fileno()),  # the store closes its copy
        )
    return store, port


def join(address: str, timeout: float) -> dist.TCPStore:
    """The store at `host:port`.

    Raises:
        WeftError: that is no such address.
        WireError: nobody answers there within `timeout` seconds.
    """
    name, _, port = address.rpartition(":")
    if not name or not port.isdecimal() or int(port) > 65535:
        raise WeftError(f"{address!r} is no address of a store: pass host:port")
    try:
        return dist.TCPStore(name, int(port), is_master=False, timeout=timedelta(seconds=timeout))
    except RuntimeError as error:  # torch's store errors are
        raise WireError(
            f"no store answers at {address} within {timeout:g} s: is the process that made it "
            f"alive, and that address reachable? ({str(error).splitlines()[0]})"
        ) from error


def outward() -> str:
    """The address under which other machines are likely to find this one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing: it only looks up the route
        except OSError:
            return LOOPBACK
        return str(probe.getsockname()[0])
