"""SAR's ways to find this host's address and to tell it to the others through a file."""

from __future__ import annotations

from typing import NamedTuple

from ...bootstrap.rendezvous import publish
from ...errors import WeftError
from ...wire.interface import interface_of, own_address
from .names import also

__all__ = [
    "SocketInfo",
    "dump_ip_address",
    "get_ip_address",
    "get_socket",
    "nfs_ip_init",
    "published",
]

published: dict[str, int] = {}
"""By address of rank 0: the port at which it will meet the others, as `nfs_ip_init` has found."""

_TIMEOUT = 300.0  # seconds that a file is waited for


class SocketInfo(NamedTuple):
    """A network interface: its name, and its address in numbers."""

    name: str
    ip_addr: str


def get_socket() -> SocketInfo:
    """The network interface that this rank would use.

    It is the one that `WEFT_INTERFACE`, `SAR_SOCKET_NAME` or `GLOO_SOCKET_IFNAME` names, the first
    of these that is set; else the one on the way to the host of rank 0, where the environment names
    that (the loopback if it is named so); else one that leads to other hosts; the loopback if there
    is none.

    Raises:
        WeftError: the one that is named is not there.

    Example:
        >>> name, address = get_socket()
    """
    try:
        address = own_address()
    except OSError as error:
        raise WeftError(str(error)) from error
    return SocketInfo(interface_of(address) or "", address)


@also(path="ip_file")
def dump_ip_address(ip_file: str) -> str:
    """Leave a file that leads to this process, for `get_ip_address` in the others.

    Args:
        ip_file: its path, or that of a folder. It is written whole or not at all, with mode 0600;
            one that another run has left there is replaced.

    Returns:
        The address of this host that is in the file.

    Raises:
        WeftError: it cannot be written, or it is another user's.
    """
    return publish(0, ip_file, _TIMEOUT)[0]


@also(path="ip_file")
def get_ip_address(ip_file: str) -> str:
    """Wait for the file of `dump_ip_address`, until the process that wrote it answers.

    Returns:
        The address at which it answered.

    Raises:
        WeftError: the file is another user's, or is no such file.
        WireError: nobody answered within 300 s.
    """
    return publish(-1, ip_file, _TIMEOUT)[0]


@also(rank="_rank", path="ip_file")
def nfs_ip_init(_rank: int, ip_file: str) -> str:
    """Tell rank 0's address to all others through a file that all see; every rank calls it.

    Rank 0 also chooses a free port. With the address that this returns, `initialize_comms` uses
    that port, unless it is given another one.

    Args:
        _rank: of this process; also `rank`.
        ip_file: the path of the file, or of a folder; also `path`.

    Returns:
        The address of rank 0's host.

    Raises:
        WeftError, WireError: as `dump_ip_address` and `get_ip_address`.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     address = nfs_ip_init(0, f"{folder}/ip_file")
    """
    address, published[address] = publish(_rank, ip_file, _TIMEOUT)
    return address
