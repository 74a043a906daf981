"""Stores that ranks meet at, hosted by this process or by another.

For whoever brings ranks together without a launcher's environment.
"""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import torch.distributed as dist

from ..errors import WeftError, WireError

__all__ = ["LOOPBACK", "connect", "has", "host", "join", "listener", "outward", "pauses"]

LOOPBACK = "127.0.0.1"
_LATE = 0.5  # seconds after the timeout in which torch itself may report it
_LOOK = 0.2  # seconds between two looks while torch connects
_ANSWER = 1.0  # seconds that a connected store has at least to answer
_FIRST, _LAST, _GROWTH = 0.01, 1.0, 1.5  # seconds between two looks, and how they grow
_QUICK, _EACH = 0.001, 0.0005  # the same at a store: the first, and the last for each rank


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


def connect(
    name: str, port: int, timeout: float, *, look: Callable[[], None] = lambda: None
) -> dist.TCPStore:
    """The store at a host and a port, once somebody listens there.

    torch itself prints stack traces until somebody does, so it is only called then.

    Args:
        name: of the host, or its number in IPv4 or IPv6.
        port: of the store.
        timeout: seconds to wait for it.
        look: called before each attempt; what it raises ends the waiting.

    Raises:
        RuntimeError: from the store; or nobody listens there, or one that is no store.
    """
    deadline = time.monotonic() + timeout
    refusal = ""
    for _ in pauses(deadline):
        look()
        try:
            left = max(deadline - time.monotonic(), _FIRST)
            with socket.create_connection((name, port), left):
                break
        except OSError as error:  # refused, unreachable, or a name that nobody knows yet
            refusal = error.strerror or str(error)
    else:
        raise RuntimeError(f"{name} port {port}: {refusal}")
    return _attached(name, port, max(deadline - time.monotonic(), _ANSWER), look)


def has(store: dist.Store, key: str, deadline: float, ranks: int) -> bool:
    """Wait for a key, and say whether it is there in time.

    Without `store.wait`, which has torch print warnings when the time is over. Of many ranks each
    looks less often.

    Args:
        store: that has it, or will.
        key: its name.
        deadline: as `time.monotonic` tells it.
        ranks: how many may be waiting.

    Raises:
        RuntimeError: from the store.
    """
    return any(store.check([key]) for _ in pauses(deadline, _QUICK, max(0.02, _EACH * ranks)))


def pauses(deadline: float, first: float = _FIRST, last: float = _LAST) -> Iterator[None]:
    """Once, and again after longer and longer pauses, until the deadline; then a last time.

    No two processes pause alike, so that a thousand of them do not storm a server.
    """
    while True:
        yield
        left = deadline - time.monotonic()
        if left <= 0:
            return
        time.sleep(min(left, first * random.uniform(0.5, 1.0)))
        first = min(last, first * _GROWTH)


def _attached(name: str, port: int, timeout: float, look: Callable[[], None]) -> dist.TCPStore:
    """The store of a listener, if it is one."""
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
    deadline = time.monotonic() + timeout + _LATE
    while thread.is_alive() and (left := deadline - time.monotonic()) > 0:
        thread.join(min(left, _LOOK))
        if thread.is_alive():
            look()
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
