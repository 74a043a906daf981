"""The name of this machine, and of what its processes call their host.

A host is a machine and the network that its processes see: what connects containers of one machine
may well be a network. `WEFT_HOST` in a rank's environment names its host instead.
"""

from __future__ import annotations

import functools
import hashlib
import os
import socket
from pathlib import Path

_DIGEST = 16  # bytes in which a name travels


@functools.cache
def machine_and_network() -> tuple[str, int]:
    """The name of this machine, and the number of its network namespace; 0: unknown."""
    try:
        name = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return name, Path("/proc/self/ns/net").stat().st_ino
    except OSError:  # /proc is hidden, or this is no Linux
        return socket.gethostname(), 0


def host_name() -> str:
    """The name of this machine, the same in all its containers and network namespaces."""
    return machine_and_network()[0]


def digest_of(machine: str) -> bytes:
    """16 bytes that name this process's host (WEFT_HOST, or machine and network)."""
    name = os.environ.get("WEFT_HOST") or f"{machine} {machine_and_network()[1]}"
    return hashlib.blake2b(os.fsencode(name), digest_size=_DIGEST).digest()


def own_host() -> str:
    """The name of this process's host, of which ranks share memory."""
    return digest_of(host_name()).hex()
