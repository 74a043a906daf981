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

_DIGEST = 16  # bytes of such a name


@functools.cache
def machine_and_network() -> tuple[str, int]:
    """The name of this machine, and the number of its network namespace; 0: unknown."""
    try:
        name = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return name, Path("/proc/self/ns/net").stat().st_ino
    except OSError:  # /proc is hidden, or this is no Linux
        return socket.gethostname(), 0


def own_host() -> str:
    """The name of this process's host (WEFT_HOST, or machine and network), of which ranks share
    memory; a digest."""
    machine, network = machine_and_network()
    name = os.environ.get("WEFT_HOST") or f"{machine} {network}"
    return hashlib.blake2b(os.fsencode(name), digest_size=_DIGEST).hexdigest()
