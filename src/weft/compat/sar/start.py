"""SAR's start-up, and what a program may ask about the group afterwards.

All of it is about the default wire, so it works in a program that has called `weft.init` itself,
too; there `backend`, `master_ip` and `master_port` have no answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch

from ...bootstrap.init import init_as
from ...errors import WeftError
from ...wire import default
from ...wire.base import Wire
from .address import published
from .names import also

__all__ = [
    "backend",
    "comm_device",
    "initialize_comms",
    "is_initialized",
    "master_ip",
    "master_port",
    "rank",
    "world_size",
]

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
