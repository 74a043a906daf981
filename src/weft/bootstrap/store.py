"""Stores that ranks meet at, hosted by this process or by another.

For whoever brings ranks together without a launcher's environment.
"""

from __future__ import annotations

import os
import socket
import threading
from datetime import timedelta

import torch.distributed as dist

from ..errors import WeftError, WireError

__all__ = ["LOOPBACK", "connect", "host", "join", "listener", "outward"]

LOOPBACK = "127.0.0.1"
_LATE = 0.5  # seconds after the timeout in which torch itself may report it


def host(address: str, *, everywhere: bool = False) -> tuple[dist.TCPStore, int]:
    """A store that listens on one address of this machine, or on all, and its port.

    It ends when nobody holds it any more.
    """
    with listener("" if everywhere else address, 0) as sock:
        port = sock.getsockname()[1]
        store = dist.TCPStore(
            address,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=os.dup(sock.fileno()),  # the store closes its copy
        )
    return store, port


def listener(address: str, port: int) -> socket.socket:
    """A socket that listens on an address, or on every one of IPv4 and IPv6 if that is empty.

    Raises:
        OSError: the address is not this machine's, or the port is taken.
    """
    if not address and socket.has_dualstack_ipv6():
        return socket.create_server(
            ("", port), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True, reuse_port=False
        )
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=1024)


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
        return connect(name.strip("[]"), int(port), timeout)
    except RuntimeError as error:  # torch's store errors are
        raise WireError(
            f"no store answers at {address} within {timeout:g} s: is the process that made it "
            f"alive, and that address reachable? ({str(error).splitlines()[0]})"
        ) from error


def connect(name: str, port: int, timeout: float) -> dist.TCPStore:
    """The store at a host and a port.

    Raises:
        RuntimeError: from the store, or there is a listener that is no store.
    """
    made: list[dist.TCPStore] = []
    failed: list[RuntimeError] = []

    def make() -> None:
        try:
            made.append(
                dist.TCPStore(name, port, is_master=False, timeout=timedelta(seconds=timeout))
            )
        except RuntimeError as error:
            failed.append(error)

    # a thread, since torch waits for the first answer without any timeout
    thread = threading.Thread(target=make, name="weft-store", daemon=True)
    thread.start()
    thread.join(timeout + _LATE)
    if failed:
        raise failed[0]
    if not made:
        raise RuntimeError(f"what listens at {name} port {port} does not answer: it is no store")
    return made[0]


def outward() -> str:
    """The address under which other machines are likely to find this one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing: it only looks up the route
        except OSError:
            return LOOPBACK
        return str(probe.getsockname()[0])
