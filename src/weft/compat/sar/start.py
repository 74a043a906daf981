"""SAR's start-up: the address of rank 0, the group, and what a program may ask about it afterwards.

Questions are about the default wire, so they work in a program that has called `weft.init` itself,
too; there `backend`, `master_ip` and `master_port` have no answer. Arguments go by two names:
SAR's, which begin with an underscore, and the plain ones.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import torch

from ...bootstrap.init import init_as
from ...bootstrap.rendezvous import publish
from ...errors import WeftError
from ...wire import default
from ...wire.base import Wire
from ...wire.interface import interface_of, own_address

_P = ParamSpec("_P")
_R = TypeVar("_R")


def also(**plain: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Let a function take arguments by other names, too: `also(rank="_rank")`.

    Raises:
        TypeError: when it is called with one of them under both names.
    """

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        @functools.wraps(function)
        def called(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            for other in plain.keys() & kwargs.keys():
                name = plain[other]
                if name in kwargs:
                    raise TypeError(f"{function.__name__}: {name} and {other} are one argument")
                kwargs[name] = kwargs.pop(other)
            return function(*args, **kwargs)

        return called

    return decorate


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
        ip_file: its path, or that of a folder. It has mode 0600; what another run has left there
            is not believed.

    Returns:
        The address of this host that is in the file.

    Raises:
        WeftError: it cannot be written, is another user's, or no such file.
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


_PORT = 12345  # SAR's
_DEVICES = {"nccl": "cuda", "xccl": "xpu"}  # others take tensors of the host


@dataclass(frozen=True, slots=True)
class _Settings:
    """What `initialize_comms` was told."""

    master_ip: str
    master_port: int
    backend: str
    comm_device: torch.device


_settings: WeakKeyDictionary[Wire, _Settings] = WeakKeyDictionary()


@also(rank="_rank", world_size="_world_size", comm_device="_comm_device")
def initialize_comms(
    _rank: int,
    _world_size: int,
    master_ip_address: str,
    backend: str,
    _comm_device: torch.device | str | None = None,
    master_port_number: int | None = None,
) -> None:
    """Start weft and torch.distributed, or adopt its default group if there is one; collective.

    Args:
        _rank: of this process; also `rank`.
        _world_size: how many there are; also `world_size`.
        master_ip_address: of the host of rank 0, by number or name.
        backend: a backend of `weft.init`: "gloo", "nccl", "ccl", "mpi" and others.
        _comm_device: also `comm_device`. Only kept for `comm_device()`: tensors of any device are
            sent, and results come back to where the tensors were. None: the one that follows from
            the backend.
        master_port_number: None: the one that rank 0 chose in `nfs_ip_init`, or 12345 if the
            address did not come from there.

    Raises:
        WeftError: the backend is not there, the port is taken, or the processes do not fit
            together; the same on every rank that comes.
        WireError: not all ranks came within 300 s; it names who is missing.

    Example:
        >>> import weft
        >>> initialize_comms(0, 1, "127.0.0.1", "gloo", master_port_number=29432)
        >>> rank(), world_size(), comm_device(), master_port()
        (0, 1, device(type='cpu'), 29432)
        >>> weft.shutdown()
    """
    device = torch.device(_comm_device or _DEVICES.get(backend, "cpu"))
    port = master_port_number
    if port is None:
        port = published.get(master_ip_address, _PORT)
    wire = init_as(_rank, _world_size, backend, master_ip_address, port)
    _settings[wire] = _Settings(master_ip_address, port, backend, device)


def is_initialized() -> bool:
    """Whether there is a group, from `initialize_comms` or from `weft.init`."""
    try:
        default.current()
    except WeftError:
        return False
    return True


def rank() -> int:
    """The number of this rank."""
    return default.current().rank


def world_size() -> int:
    """How many ranks there are."""
    return default.current().size


def master_ip() -> str:
    """The address that `initialize_comms` was given."""
    return _told().master_ip


def master_port() -> int:
    """The port at which the ranks met."""
    return _told().master_port


def backend() -> str:
    """The backend that `initialize_comms` was given."""
    return _told().backend


def comm_device() -> torch.device:
    """The device that `initialize_comms` was given, or chose; without it, the CPU."""
    told = _settings.get(default.current())
    return torch.device("cpu") if told is None else told.comm_device


def _told() -> _Settings:
    wire = default.current()
    if wire not in _settings:
        raise WeftError(
            f"rank {wire.rank}: the group was not started by initialize_comms, which would know: "
            "call that instead of weft.init"
        )
    return _settings[wire]
