"""The address at which this rank's peers reach it.

The interface is named by `WEFT_INTERFACE`, or as gloo's users do by `GLOO_SOCKET_IFNAME` (several:
the first that has an address); an address will do, too. Otherwise it is the one that leads to the
store's host. On that host itself, and without a host to look for, it is what the machine's own
name says, then what leads out of the machine, and the loopback where there is nothing else.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
import sys
from collections.abc import Iterator

import torch.distributed as dist

__all__ = ["own_address"]

_OUT = "192.0.2.1"  # reserved for documentation (RFC 5737): nobody's, so it leads out
_SIOCGIFADDR = 0xC0206921 if sys.platform == "darwin" else 0x8915
_LOOPBACK = "127.0.0.1"


def own_address(store: dist.Store) -> str:
    """The numeric host to listen on, for the ranks that meet at this store.

    Raises:
        OSError: an interface is named, and has no address here.
    """
    for variable in ("WEFT_INTERFACE", "GLOO_SOCKET_IFNAME"):
        if named := os.environ.get(variable):
            return _of_interfaces(variable, named)
    host, port = _server(store)
    if host is not None:
        route = _towards(host, port)
        if route is not None and (not _is_loopback(route) or _means_loopback(host)):
            return route
    return next(filter(_is_here, _of_machine()), _LOOPBACK)


def _server(store: dist.Store) -> tuple[str | None, int]:
    """Host and port of the store's server, if it has one."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return (store.host, store.port) if isinstance(store, dist.TCPStore) else (None, 0)


def _towards(host: str, port: int) -> str | None:
    """This machine's address on the way to a host; nothing is sent."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    except OSError:
        return None
    for family, kind, _, _, name in found:
        try:
            with socket.socket(family, kind) as sock:
                sock.connect(name)
                return str(sock.getsockname()[0])
        except OSError:
            continue  # no route by this family
    return None


def _of_machine() -> Iterator[str]:
    """Addresses by which others may know this machine."""
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        found = []
    yield from (str(name[0]) for *_, name in found)
    out = _towards(_OUT, 9)
    if out is not None:
        yield out


def _is_here(address: str) -> bool:
    """Whether it is an address of this machine, but for the loopback."""
    if _is_loopback(address):
        return False
    try:
        family, kind, *_, name = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as sock:
            sock.bind(name)
    except OSError:
        return False
    return True


def _means_loopback(host: str) -> bool:
    """Whether a host is the loopback by its spelling, on whatever machine."""
    return host.lower() == "localhost" or _is_loopback(host)


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:  # a name
        return False


def _of_interfaces(variable: str, named: str) -> str:
    """The address of the first of some interfaces that has one."""
    for name in named.split(","):
        try:
            ipaddress.ip_address(name.partition("%")[0])
        except ValueError:
            address = _ipv4(name) or _ipv6(name)
            if address is not None:
                return address
        else:
            return name
    have = ", ".join(name for _, name in socket.if_nameindex())
    raise OSError(f"{variable}={named} names no interface with an address: there are {have}")


def _ipv4(interface: str) -> str | None:
    import fcntl  # not on Windows

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            asked = struct.pack("256s", interface.encode()[:15])
            return socket.inet_ntoa(fcntl.ioctl(sock, _SIOCGIFADDR, asked)[20:24])
        except OSError:
            return None


def _ipv6(interface: str) -> str | None:
    try:
        with open("/proc/net/if_inet6", encoding="ascii") as table:
            lines = [line.split() for line in table]
    except OSError:
        return None
    addresses = [
        ipaddress.IPv6Address(bytes.fromhex(line[0])) for line in lines if line[-1] == interface
    ]
    wide = [address for address in addresses if not address.is_link_local]
    if wide:
        return str(wide[0])
    return f"{addresses[0]}%{interface}" if addresses else None
