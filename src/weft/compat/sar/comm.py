"""SAR's module `comm`: start-up, and its ways to send tensors between ranks and to combine them.

Questions are about the default group, so they work in a program that has called `weft.init` itself,
too; there `backend`, `master_ip` and `master_port` have no answer. Arguments go by two names:
SAR's, which begin with an underscore, and the plain ones.

As in SAR autograd does not see the collectives (`weft.exchange` and `weft.all_to_all` are
differentiable). Every rank of the group calls them. What is sent is checked against the buffers
that it is for before any of those is written, in one small exchange more; so every rank raises the
same where one of them is wrong.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

import weft
from weft import WeftError, Wire
from weft.bootstrap import init_as, look_ahead, publish

from ..arguments import default, integer, tell, unfit, wire_of
from .tasks import CommThread as CommThread  # SAR has them here
from .tasks import comm_thread as comm_thread

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
    found = look_ahead()
    if error := found.errors.get("interface"):
        raise WeftError(str(error)) from error
    return SocketInfo(found.interface, found.address)


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


class _Settings(NamedTuple):
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
    return default() is not None


def rank() -> int:
    """The number of this rank."""
    return wire_of().rank


def world_size() -> int:
    """How many ranks there are."""
    return wire_of().size


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
    told = _settings.get(wire_of())
    return torch.device("cpu") if told is None else told.comm_device


def _told() -> _Settings:
    wire = wire_of()
    if wire not in _settings:
        raise WeftError(
            f"rank {wire.rank}: the group was not started by initialize_comms, which would know: "
            "call that instead of weft.init"
        )
    return _settings[wire]


class Config:
    """What a program sets once, on the class itself, alike on every rank.

    Attributes:
        max_collective_size: elements that a rank sends and receives together, at most, in one round
            of `all_to_all`, give or take one of each tensor; 0: all in one round. Where ranks
            differ the smallest counts.
        disable_sr, pipeline_depth: of SAR's graph classes, which are not here; have no effect.
    """

    max_collective_size: ClassVar[int] = 0
    disable_sr: ClassVar[bool] = False
    pipeline_depth: ClassVar[int] = 1


def _check(name: str, place: Any, source: int, came: Tensor) -> None:
    """See that a buffer can take what came, before any is written.

    Raises:
        WeftError: it cannot.
    """
    if not isinstance(place, Tensor):
        raise WeftError(f"{name} is a {type(place).__name__}: pass a tensor to be filled")
    if reason := unfit(place):
        raise WeftError(f"{name} is {reason}")
    if place.dtype != came.dtype:
        raise WeftError(
            f"{name} has {place.dtype}, and rank {source} sends {came.dtype}: pass one dtype"
        )
    if place.numel() != came.numel():
        raise WeftError(
            f"{name} has shape {tuple(place.shape)}, and rank {source} sends {tuple(came.shape)}: "
            "make it as large, or use exchange_tensors, which needs no sizes"
        )


def all_to_all(
    recv_tensors: Sequence[Tensor],
    send_tensors: Sequence[Tensor],
    move_to_comm_device: bool = False,
) -> None:
    """Send `send_tensors[i]` to rank i, and fill `recv_tensors[i]` with what it sent here.

    Args:
        recv_tensors: one for each rank, with the dtype and as many elements as what comes, also
            none; on any device.
        send_tensors: one for each rank, of one dtype and on one device.
        move_to_comm_device: without effect: tensors of any device are sent.

    Raises:
        WeftError: some rank's tensors are wrong, or do not fit; the same text on every rank, and
            nothing was written on any. The next call works.
        WireError: a peer or a link failed; names the culprit. The group is lost.

    Example:
        >>> from weft.testing import run
        >>> def program(wire):
        ...     send = [torch.full((to + 1,), 10 * wire.rank + to) for to in range(wire.size)]
        ...     recv = [torch.empty(wire.rank + 1, dtype=torch.int64) for _ in range(wire.size)]
        ...     all_to_all(recv, send)
        ...     return [tensor.tolist() for tensor in recv]
        >>> run(2, program)
        [[[0], [10]], [[1, 1], [11, 11]]]
    """
    _exchange(recv_tensors, send_tensors, Config.max_collective_size)


def all_to_all_rounds(recv_tensors: Sequence[Tensor], send_tensors: Sequence[Tensor]) -> None:
    """`all_to_all`, which goes in rounds by itself: see `Config.max_collective_size`."""
    all_to_all(recv_tensors, send_tensors)


def all_to_all_gloo_support(recv_tensors: Sequence[Tensor], send_tensors: Sequence[Tensor]) -> None:
    """`all_to_all` in one round, whatever `Config` says; on every backend."""
    _exchange(recv_tensors, send_tensors, 0)


def _exchange(
    recv_tensors: Sequence[Tensor], send_tensors: Sequence[Tensor], largest: object
) -> None:
    """Fill tensors with what each rank sent here, in rounds of so many elements."""

    def check(came: list[Tensor]) -> None:
        if not isinstance(recv_tensors, list | tuple) or len(recv_tensors) != len(came):
            raise WeftError(
                f"recv_tensors must be a list of {len(came)} tensors, one for each rank"
            )
        for source, (place, tensor) in enumerate(zip(recv_tensors, came, strict=True)):
            _check(f"recv_tensors[{source}]", place, source, tensor)

    for place, tensor in zip(recv_tensors, _sent(send_tensors, check, largest), strict=True):
        _fill(place, tensor)


def exchange_single_tensor(
    recv_idx: int, send_idx: int, recv_tensor: Tensor, send_tensor: Tensor
) -> None:
    """Send a tensor to one rank, and fill another with what comes from one; every rank calls it.

    Args:
        recv_idx: the rank that sends to this one.
        send_idx: the rank that this one sends to; either may be this one.
        recv_tensor: with the dtype and as many elements as what comes.
        send_tensor: of the same dtype on every rank.

    Raises:
        WeftError, WireError: as `all_to_all`.
    """
    source, to = _known("recv_idx", recv_idx), _known("send_idx", send_idx)
    if not isinstance(send_tensor, Tensor):
        tell(WeftError(f"send_tensor is a {type(send_tensor).__name__}: pass a tensor"))
    send = [torch.empty(0, dtype=send_tensor.dtype, device=send_tensor.device)] * world_size()
    send[to] = send_tensor
    largest = Config.max_collective_size
    came = _sent(
        send, lambda came: _check("recv_tensor", recv_tensor, source, came[source]), largest
    )
    _fill(recv_tensor, came[source])


def _known(name: str, given: object) -> int:
    """The rank that an argument names."""
    found, size = integer(given), world_size()
    if found is None or not 0 <= found < size:
        tell(WeftError(f"{name} is {given!r}: pass a rank of the group, 0 to {size - 1}"))
    return found


def exchange_tensors(
    tensors: Sequence[Tensor], recv_sizes: Sequence[int] | None = None
) -> list[Tensor]:
    """Send `tensors[i]` to rank i; what each rank sent here, in rank order.

    Args:
        tensors: one for each rank, of one dtype and on one device; of any shapes, also empty.
        recv_sizes: None, or the length of what comes from each rank. It is not needed: shapes
            travel with the tensors; where it is given it is checked.

    Returns:
        New tensors, on the device of `tensors`.

    Raises:
        WeftError: some rank's tensors are wrong, or what comes has another length; the same text on
            every rank. The next call works.
        WireError: a peer or a link failed; names the culprit. The group is lost.

    Example:
        >>> from weft.testing import run
        >>> def program(wire):
        ...     return exchange_tensors([torch.ones(to, 2) * wire.rank for to in range(wire.size)])
        >>> [tuple(tensor.shape) for tensor in run(3, program)[2]]
        [(2, 2), (2, 2), (2, 2)]
    """

    def check(came: list[Tensor]) -> None:
        if recv_sizes is None:
            return
        lengths = [tensor.shape[0] if tensor.dim() else 1 for tensor in came]
        try:
            expected = [int(length) for length in recv_sizes]
        except (TypeError, ValueError):
            raise WeftError(
                f"recv_sizes is {recv_sizes!r}: pass a length for each rank, or leave it out"
            ) from None
        if expected != lengths:
            raise WeftError(f"recv_sizes is {expected}, and the ranks send {lengths}: leave it out")

    return _sent(tensors, check, Config.max_collective_size)


def _sent(
    tensors: Sequence[Tensor], check: Callable[[list[Tensor]], None], largest: object
) -> list[Tensor]:
    """What came, in rounds, once no rank's `check` has anything against what came there."""
    most = None if isinstance(largest, bool) else integer(largest)
    if most is None or most < 0:
        tell(
            WeftError(
                f"Config.max_collective_size is {largest!r}: set a number of elements, or 0 for "
                "all in one round"
            )
        )
    first = tensors[0] if isinstance(tensors, list | tuple) and tensors else None
    width = first.element_size() if isinstance(first, Tensor) else 1
    with torch.no_grad():
        came = weft.all_to_all(tensors, round_bytes=most * width or None)
    weft.attempt(lambda: check(came), name="what came")
    return came


def _fill(place: Tensor, came: Tensor) -> None:
    """Write what came into a buffer that is fit for it."""
    with torch.no_grad():
        place.copy_(came.view(place.shape))


def all_reduce(red_tensor: Tensor, op: Any, move_to_comm_device: bool = False) -> None:
    """Combine a tensor over all ranks, in place.

    Args:
        red_tensor: of one shape and dtype on every rank, on any device.
        op: a `torch.distributed.ReduceOp`, or a name that `weft.all_reduce` takes.
        move_to_comm_device: without effect: tensors of any device are reduced.

    Raises:
        WeftError, WireError: as `weft.all_reduce`; or a rank's tensor cannot be written, and then
            none is.

    Example:
        >>> from weft.testing import run
        >>> def program(wire):
        ...     tensor = torch.tensor([wire.rank, 1])
        ...     all_reduce(tensor, torch.distributed.ReduceOp.SUM)
        ...     return tensor.tolist()
        >>> run(3, program)
        [[3, 3], [3, 3], [3, 3]]
    """
    if isinstance(red_tensor, Tensor) and (reason := unfit(red_tensor)):
        tell(WeftError(f"red_tensor is {reason}"))
    with torch.no_grad():
        red_tensor.copy_(weft.all_reduce(red_tensor, op))


def sync_params(model: torch.nn.Module) -> None:
    """Give every rank the parameters and buffers of rank 0's model: `weft.sync_params`."""
    weft.sync_params(model)


def gather_grads(model: torch.nn.Module) -> None:
    """Sum the gradients over all ranks, by name: `weft.sync_grads(model, average=False)`."""
    weft.sync_grads(model, average=False)
