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
import logging
import os
import socket
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any

import psutil
import torch.distributed as dist

from ..base.within import within

NO_SIGNAL = getattr(socket, "MSG_NOSIGNAL", 0)  # of a send to one that has gone; not on macOS
GLOO = "GLOO_SOCKET_IFNAME"
VARIABLES = ("WEFT_INTERFACE", "SAR_SOCKET_NAME", GLOO)

_OUT = "192.0.2.1"  # reserved for documentation (RFC 5737): nobody's, so it leads out
_LOOPBACK = "127.0.0.1"
LOOKUP = 10.0  # seconds for a name; the system waits for 5 s for each of its name servers, twice

_log = logging.getLogger("weft")


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
    by_name = psutil.net_if_addrs()  # which knows no order
    in_order = []
    for _, name in socket.if_nameindex():
        addresses = _addresses(by_name.get(name, ()))
        if addresses:
            in_order.append(Interface(name, addresses))
    return tuple(in_order)


def interface_of(address: str) -> str | None:
    """The name of the interface that has an address, or None."""
    return next((each.name for each in interfaces() if address in each.addresses), None)


def named_for_gloo() -> tuple[str, ...]:
    """The interfaces that GLOO_SOCKET_IFNAME lists, if gloo would understand the list; else none.

    weft reads more than names of interfaces in that variable: see `own_address`.
    """
    known = {name for _, name in socket.if_nameindex()}
    names = os.environ.get(GLOO, "").split(",")
    return tuple(names) if known.issuperset(names) else ()


def gloo_interfaces(store: dist.Store) -> tuple[str, ...]:
    """The interfaces at which gloo should listen; none where they are not known.

    By itself gloo takes the address that the host's name means. On many hosts that is 127.0.1.1,
    which no other host reaches.

    Raises:
        OSError: as `own_address`.
    """
    names = named_for_gloo()
    if names:
        return names
    interface = interface_of(own_address(store))
    return () if interface is None else (interface,)


def own_address(store: dist.Store | None = None) -> str:
    """The numeric host to listen on, for the ranks that meet at this store, or at none yet.

    Raises:
        OSError: an interface is named, and has no address here; or an address, of another machine.
    """
    host, port = server_of(store)
    route = None if host is None else address_towards(host, port)
    for variable in VARIABLES:
        value = os.environ.get(variable, "").strip()
        if value.startswith("^"):
            return _address_beside(variable, value, host, route)
        if value:
            return _address_of(variable, value, route)
    return free_address(host, route)


def free_address(
    host: str | None = None, route: str | None = None, never: Set[str] = frozenset()
) -> str:
    """The address of the route to the store's host, else another one; none of those in `never`."""
    is_local = host is not None and (host.lower() == "localhost" or is_loopback(host))
    if route is not None and route not in never and (is_local or not is_loopback(route)):
        return route
    for address in addresses_of_machine():
        if address not in never and leads_here(address):
            return address
    return _LOOPBACK


def is_here(name: str) -> bool:
    """Whether a host's name or number is this machine's."""
    return any(is_own(str(each[0])) for *_, each in _resolved(name, None, socket.SOCK_STREAM))


def is_own(address: str) -> bool:
    """Whether it is an address of this machine."""
    try:
        family, kind, *_, name = socket.getaddrinfo(
            address, 0, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
        )[0]
        with socket.socket(family, kind) as sock:
            sock.bind(name)
    except OSError:
        return False
    return True


def is_loopback(address: str) -> bool:
    """Whether this is a loopback address; a name is none."""
    number = _number(address)
    return number is not None and number.is_loopback


def _number(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """A numeric address; None: it is a name."""
    try:
        return ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return None


def server_of(store: dist.Store | None) -> tuple[str | None, int]:
    """Host and port of the store's server, if it has one."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if isinstance(store, dist.TCPStore):
        return store.host, store.port
    return None, 0


def address_towards(host: str, port: int) -> str | None:
    """This machine's address on the way to a host; nothing is sent."""
    for family, kind, _, _, name in _resolved(host, port, socket.SOCK_DGRAM):
        with contextlib.suppress(OSError), socket.socket(family, kind) as sock:
            sock.connect(name)  # fails where there is no route by this family
            return str(sock.getsockname()[0])
    return None


def _resolved(host: str, port: int | None, kind: socket.SocketKind) -> list[Any]:
    """What `socket.getaddrinfo` knows of a host; nothing, if it knows none of that name in time."""
    with contextlib.suppress(OSError):  # a number, for which no server is asked
        return list(socket.getaddrinfo(host, port, type=kind, flags=socket.AI_NUMERICHOST))
    try:
        return within(LOOKUP, lambda: list(socket.getaddrinfo(host, port, type=kind)))
    except TimeoutError:
        _log.warning("no name server has said within %g s what %s is", LOOKUP, host)
    except OSError:  # there is no such name
        pass
    return []


def addresses_of_machine() -> Iterator[str]:
    """Addresses by which others may know this machine, the likeliest first."""
    for *_, name in _resolved(socket.gethostname(), None, socket.SOCK_STREAM):
        yield name[0]
    outwards = address_towards(_OUT, 9)
    if outwards is not None:
        yield outwards
    for each in interfaces():
        yield from each.addresses


def leads_here(address: str) -> bool:
    """Whether it is an address of this machine, but for the loopback."""
    return not is_loopback(address) and is_own(address)


def _address_of(variable: str, value: str, route: str | None) -> str:
    """The address of the first interface in a list that has one; of several, that of the route."""
    known = interfaces()
    for name in filter(None, map(str.strip, value.split(","))):
        if _number(name) is not None:  # and no name of an interface
            if is_own(name):
                return name
            continue
        matching = [each for each in known if each.name == name]
        if not matching:
            matching = [each for each in known if each.name.startswith(name)]
        if matching:
            addresses = matching[0].addresses
            return route if route is not None and route in addresses else addresses[0]
    raise OSError(
        f"{variable}={value} names no interface with an address, and no address, of "
        f"{socket.gethostname()}: there are {_listed(known)}"
    )


def _address_beside(variable: str, value: str, host: str | None, route: str | None) -> str:
    """The free choice without the interfaces that a `^` list excludes."""
    known = interfaces()
    beginnings = tuple(name for each in value.split(",") if (name := each.strip(" ^")))
    never: set[str] = set()
    for each in known:
        if each.name.startswith(beginnings):
            never.update(each.addresses)
    address = free_address(host, route, never)
    if address in never:
        raise OSError(f"{variable}={value} leaves no interface: there are {_listed(known)}")
    return address


def _listed(known: Sequence[Interface]) -> str:
    return ", ".join(f"{each.name} ({each.addresses[0]})" for each in known)


def _addresses(entries: Iterable[Any]) -> tuple[str, ...]:
    """Numeric addresses: IPv4, then IPv6, then link-local IPv6 with its scope."""
    ipv4 = [each.address for each in entries if each.family == socket.AF_INET]
    ipv6 = [each.address for each in entries if each.family == socket.AF_INET6]
    return (*ipv4, *sorted(ipv6, key=lambda address: "%" in address))
