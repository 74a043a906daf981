"""The address at which this rank's peers reach it.

It is the address of the route to the store's host, unless `WEFT_INTERFACE`, `SAR_SOCKET_NAME` or,
as for gloo, `GLOO_SOCKET_IFNAME` names an interface. The variable is a comma list: interface names,
beginnings of names (`eth` means eth0), or addresses; the first that has an address here is used. A
list that begins with `^` excludes interfaces (`^docker,veth`). The loopback is used only if the
store's host is named as the loopback, or if the machine has no other address.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any

import psutil
import torch.distributed as dist

GLOO = "GLOO_SOCKET_IFNAME"
VARIABLES = ("WEFT_INTERFACE", "SAR_SOCKET_NAME", GLOO)

_OUT = "192.0.2.1"  # reserved for documentation (RFC 5737): nobody's, so it leads out
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Interface:
    """A network interface of this machine: its name and its numeric addresses, IPv4 first."""

    name: str
    addresses: tuple[str, ...]


def interfaces() -> tuple[Interface, ...]:
    """Those that have an address, in the system's order.

    Example:
        >>> any("127.0.0.1" in interface.addresses for interface in interfaces())
        True
    """
    found = psutil.net_if_addrs()  # which knows no order
    named = [name for _, name in socket.if_nameindex() if name in found]
    return tuple(Interface(name, each) for name in named if (each := _addresses(found[name])))


def interface_of(address: str) -> str | None:
    """The name of the interface that has an address, or None."""
    return next((each.name for each in interfaces() if address in each.addresses), None)


def named_for_gloo() -> tuple[str, ...]:
    """The interfaces that GLOO_SOCKET_IFNAME lists, if gloo would understand the list; else none.

    weft reads more than names of interfaces in that variable: see `own_address`.
    """
    there = {name for _, name in socket.if_nameindex()}
    named = os.environ.get(GLOO, "").split(",")
    return tuple(named) if there.issuperset(named) else ()


def gloo_interfaces(store: dist.Store) -> tuple[str, ...]:
    """The interfaces at which gloo should listen; none where they are not known.

    By itself gloo takes the address that the host's name means. On many hosts that is 127.0.1.1,
    which no other host reaches.

    Raises:
        OSError: as `own_address`.
    """
    if named := named_for_gloo():
        return named
    interface = interface_of(own_address(store))
    return () if interface is None else (interface,)


def own_address(store: dist.Store | None = None) -> str:
    """The numeric host to listen on, for the ranks that meet at this store, or at none yet.

    Raises:
        OSError: an interface is named, and has no address here; or an address, of another machine.
    """
    host, port = _server(store)
    route = None if host is None else _towards(host, port)
    for variable in VARIABLES:
        named = os.environ.get(variable, "").strip()
        if named.startswith("^"):
            return _beside(variable, named, host, route)
        if named:
            return _of_interfaces(variable, named, route)
    return free_address(host, route)


def free_address(
    host: str | None = None, route: str | None = None, never: Set[str] = frozenset()
) -> str:
    """The address of the route to the store's host, else another one; none of those in `never`."""
    meant = host is not None and (host.lower() == "localhost" or is_loopback(host))
    if route is not None and route not in never and (meant or not is_loopback(route)):
        return route
    others = (each for each in _of_machine() if each not in never and _leads_here(each))
    return next(others, _LOOPBACK)


def is_here(name: str) -> bool:
    """Whether a host's name or number is this machine's."""
    return any(is_own(str(each[0])) for *_, each in _found(name, None, socket.SOCK_STREAM))


def is_own(address: str) -> bool:
    """Whether it is an address of this machine."""
    try:
        family, kind, *_, name = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as sock:
            sock.bind(name)
    except OSError:
        return False
    return True


def is_loopback(address: str) -> bool:
    """Whether this is a loopback address; a name is none."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:  # a name
        return False


def _server(store: dist.Store | None) -> tuple[str | None, int]:
    """Host and port of the store's server, if it has one."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return (store.host, store.port) if isinstance(store, dist.TCPStore) else (None, 0)


def _towards(host: str, port: int) -> str | None:
    """This machine's address on the way to a host; nothing is sent."""
    for family, kind, _, _, name in _found(host, port, socket.SOCK_DGRAM):
        with contextlib.suppress(OSError), socket.socket(family, kind) as sock:
            sock.connect(name)  # fails where there is no route by this family
            return str(sock.getsockname()[0])
    return None


def _found(host: str, port: int | None, kind: socket.SocketKind) -> list[Any]:
    try:
        return list(socket.getaddrinfo(host, port, type=kind))
    except OSError:
        return []


def _of_machine() -> Iterator[str]:
    """Addresses by which others may know this machine, the likeliest first."""
    yield from (name[0] for *_, name in _found(socket.gethostname(), None, socket.SOCK_STREAM))
    if (out := _towards(_OUT, 9)) is not None:
        yield out
    for each in interfaces():
        yield from each.addresses


def _leads_here(address: str) -> bool:
    """Whether it is an address of this machine, but for the loopback."""
    return not is_loopback(address) and is_own(address)


def _of_interfaces(variable: str, named: str, route: str | None) -> str:
    """The address of the first named interface that has one; of several, that of the route."""
    there = interfaces()
    for name in filter(None, map(str.strip, named.split(","))):
        try:
            ipaddress.ip_address(name.partition("%")[0])
        except ValueError:
            exact = [each for each in there if each.name == name]
            for each in exact or [each for each in there if each.name.startswith(name)]:
                return route if route in each.addresses and route else each.addresses[0]
        else:
            if is_own(name):
                return name
    raise OSError(
        f"{variable}={named} names no interface with an address, and no address, of "
        f"{socket.gethostname()}: there are {_listed(there)}"
    )


def _beside(variable: str, named: str, host: str | None, route: str | None) -> str:
    """The free choice without the interfaces that a `^` list excludes."""
    banned = tuple(name for each in named.split(",") if (name := each.strip(" ^")))
    there = interfaces()
    beside = [each for each in there if banned and each.name.startswith(banned)]
    never = {address for each in beside for address in each.addresses}
    address = free_address(host, route, never)
    if address in never:
        raise OSError(f"{variable}={named} leaves no interface: there are {_listed(there)}")
    return address


def _listed(there: Sequence[Interface]) -> str:
    return ", ".join(f"{each.name} ({each.addresses[0]})" for each in there)


def _addresses(found: Iterable[Any]) -> tuple[str, ...]:
    """Numeric addresses: IPv4, then IPv6, then link-local IPv6 with its scope."""
    ipv4 = [each.address for each in found if each.family == socket.AF_INET]
    ipv6 = [each.address for each in found if each.family == socket.AF_INET6]
    return (*ipv4, *sorted(ipv6, key=lambda address: "%" in address))
