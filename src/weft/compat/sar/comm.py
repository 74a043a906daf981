"""SAR's module `comm`: start-up, and the functions that send tensors between ranks and reduce them.

All functions use the default group, so they also work in a program that called `weft.init` itself.
There `backend`, `master_ip` and `master_port` raise an error. Some arguments have two names: SAR's,
which begin with an underscore, and the same without it.

Every rank of the group must call a collective. As in SAR, the collectives are not differentiable
(`weft.exchange` and `weft.all_to_all` are). Before weft writes to a receive buffer, the ranks check
in one more small exchange that every buffer fits what arrived. So if one does not, every rank
raises the same error, and no buffer has changed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import weft
from weft import Group, WeftError
from weft.base.tensors import extent
from weft.bootstrap import TIMEOUT, init_as, look_ahead, publish

from ..arguments import default, group_of, integer, tell
from ..arguments import unwritable as unfit
from .tasks import CommThread as CommThread  # SAR has them here
from .tasks import comm_thread as comm_thread

_P = ParamSpec("_P")
_R = TypeVar("_R")


def also(**plain: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """A decorator that gives arguments a second name: `also(rank="_rank")`.

    The decorated function raises TypeError if a call passes an argument under both names.
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
"""The port of rank 0 by its address, as `nfs_ip_init` found it."""


class SocketInfo(NamedTuple):
    """A network interface; `get_socket` returns it.

    Attributes:
        name: of the interface, such as "eth0".
        ip_addr: its numeric address.
    """

    name: str
    ip_addr: str


def get_socket() -> SocketInfo:
    """Return the network interface by which other hosts reach this rank.

    The first of `WEFT_INTERFACE`, `SAR_SOCKET_NAME` and `GLOO_SOCKET_IFNAME` that is set names it.
    If none is set, it is one with an address that is not the loopback's; the loopback if there is
    none. `initialize_comms` may use another one then: that on the route to rank 0's host.

    Raises:
        WeftError: the named interface is not on this host.

    Example:
        >>> name, address = get_socket()
        >>> type(name), type(address)
        (<class 'str'>, <class 'str'>)
    """
    found = look_ahead()
    if error := found.errors.get("interface"):
        raise WeftError(str(error)) from error
    return SocketInfo(found.interface, found.address)


@also(path="ip_file")
def dump_ip_address(ip_file: str) -> str:
    """Write the address of this process to a file, for `get_ip_address` in the other processes.

    Args:
        ip_file: the path of the file, or of a folder in which it is made; also `path`. The file has
            mode 0600.

    Returns:
        The address of this host in the file.

    Raises:
        WeftError: the file cannot be written, belongs to another user, or has other content.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     dump_ip_address(folder) == get_ip_address(folder)
        True
    """
    return publish(0, ip_file, TIMEOUT)[0]


@also(path="ip_file")
def get_ip_address(ip_file: str) -> str:
    """Read the address from the file of `dump_ip_address`; wait until that process answers there.

    A file that an earlier run left is not used, because nobody answers at its address.

    Args:
        ip_file: as for `dump_ip_address`; also `path`.

    Returns:
        The address of the other process's host.

    Raises:
        WeftError: the file belongs to another user, or has other content.
        WireError: nobody answered within 300 s.
    """
    return publish(-1, ip_file, TIMEOUT)[0]


@also(rank="_rank", path="ip_file")
def nfs_ip_init(_rank: int, ip_file: str) -> str:
    """Tell all ranks the address of rank 0 by a file on a shared file system. Every rank calls it.

    Rank 0 also chooses a free port. `initialize_comms` uses that port if it gets the address that
    this function returned, and no other port.

    Args:
        _rank: the rank of this process; also `rank`.
        ip_file: the path of the file, or of a folder in which it is made; also `path`.

    Returns:
        The address of rank 0's host.

    Raises:
        WeftError, WireError: as `dump_ip_address` and `get_ip_address`.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     address = nfs_ip_init(0, f"{folder}/ip_file")
    """
    address, published[address] = publish(_rank, ip_file, TIMEOUT)
    return address


_PORT = 12345  # SAR's
_DEVICES = {"nccl": "cuda", "xccl": "xpu"}  # of all others: "cpu"


class _Settings(NamedTuple):
    """The arguments of `initialize_comms`."""

    master_ip: str
    master_port: int
    backend: str
    comm_device: torch.device


_settings: WeakKeyDictionary[Group, _Settings] = WeakKeyDictionary()


@also(rank="_rank", world_size="_world_size", comm_device="_comm_device")
def initialize_comms(
    _rank: int,
    _world_size: int,
    master_ip_address: str,
    backend: str,
    _comm_device: torch.device | str | None = None,
    master_port_number: int | None = None,
) -> None:
    """Start weft and torch.distributed, or use torch's default group if there is one. Collective.

    Args:
        _rank: the rank of this process; also `rank`.
        _world_size: the number of ranks; also `world_size`.
        master_ip_address: of the host of rank 0: a numeric address or a name. Ignored, as is the
            port, if torch.distributed is initialised already.
        backend: a backend of `weft.init`: "gloo", "nccl", "ccl", "mpi" and others.
        _comm_device: what `comm_device()` returns, and nothing else: weft sends tensors of any
            device, and results are on the device of the tensors. None: "cuda" for "nccl", "xpu" for
            "xccl", else "cpu". Also `comm_device`.
        master_port_number: of rank 0. None: the port that rank 0 chose in `nfs_ip_init`, or 12345
            if the address did not come from there.

    Raises:
        WeftError: the backend is not available, the port is taken, or the processes contradict each
            other.
        WireError: not all ranks came within 300 s; it names those that did not.

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
    group = init_as(_rank, _world_size, backend, master_ip_address, port)
    _settings[group] = _Settings(master_ip_address, port, backend, device)


def is_initialized() -> bool:
    """Whether there is a default group, from `initialize_comms` or from `weft.init`.

    Example:
        >>> is_initialized()
        False
    """
    return default() is not None


def rank() -> int:
    """This process's rank. Raises WeftError if there is no group; so do the functions below.

    Example:
        >>> from weft.testing import run
        >>> run(2, lambda group: (rank(), world_size(), comm_device().type))
        [(0, 2, 'cpu'), (1, 2, 'cpu')]
    """
    return group_of().rank


def world_size() -> int:
    """The number of ranks."""
    return group_of().size


def master_ip() -> str:
    """The `master_ip_address` of `initialize_comms`; WeftError if `weft.init` made the group."""
    return _told().master_ip


def master_port() -> int:
    """The port at which the ranks met; WeftError if `weft.init` made the group."""
    return _told().master_port


def backend() -> str:
    """The `backend` of `initialize_comms`; WeftError if `weft.init` made the group."""
    return _told().backend


def comm_device() -> torch.device:
    """The device of `initialize_comms`; the CPU if `weft.init` made the group."""
    told = _settings.get(group_of())
    return torch.device("cpu") if told is None else told.comm_device


def _told() -> _Settings:
    group = group_of()
    if group not in _settings:
        raise WeftError(
            f"rank {group.rank}: the group was not started by initialize_comms, which would know: "
            "call that instead of weft.init"
        )
    return _settings[group]


class Config:
    """Settings, which a program sets once on the class itself, the same on every rank.

    Attributes:
        max_collective_size: the largest number of elements that a rank sends and receives together
            in one round of a call, give or take one element of each tensor; 0: everything in one
            round. If ranks differ, the smallest number applies.
        disable_sr, pipeline_depth: of SAR's graph classes, which are not here; without effect.

    Example:
        >>> Config.max_collective_size
        0
    """

    max_collective_size: ClassVar[int] = 0
    disable_sr: ClassVar[bool] = False
    pipeline_depth: ClassVar[int] = 1


def _check(name: str, place: Any, source: int, came: Tensor) -> None:
    """Check that a receive buffer fits the tensor that arrived.

    Raises:
        WeftError: it does not.
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


def _check_apart(places: Sequence[Tensor]) -> None:
    """Check that no two receive buffers have elements in common.

    Raises:
        WeftError: two have.
    """
    spans = sorted((*extent(place), source) for source, place in enumerate(places) if place.numel())
    for number, (_, end, source) in enumerate(spans):
        for start, _, other in spans[number + 1 :]:
            if start >= end:
                break  # as all that follow do
            first, second = sorted((source, other))
            if _shared(places[first], places[second]):
                raise WeftError(
                    f"recv_tensors[{first}] and recv_tensors[{second}] share memory: pass tensors "
                    "of their own"
                )


def _shared(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have an element in common; two columns of a matrix have none."""
    return one.device == other.device and np.shares_memory(_outline(one), _outline(other))


def _outline(tensor: Tensor) -> NDArray[Any]:
    """An array with a tensor's addresses, on any device and of any dtype, which nobody may read."""
    size = tensor.element_size()
    interface = {
        "version": 3,
        "data": (tensor.data_ptr(), True),
        "typestr": f"|V{size}",
        "shape": tuple(tensor.shape),
        "strides": tuple(step * size for step in tensor.stride()),
    }
    return np.asarray(SimpleNamespace(__array_interface__=interface))


def all_to_all(
    recv_tensors: Sequence[Tensor],
    send_tensors: Sequence[Tensor],
    move_to_comm_device: bool = False,
) -> None:
    """Send `send_tensors[i]` to rank i; fill `recv_tensors[i]` with what rank i sent. Collective.

    Args:
        recv_tensors: a tensor for each rank, on any device, with the dtype and the number of
            elements of what that rank sends; its shape may be another. It may have no elements. No
            two may have elements in common.
        send_tensors: a tensor for each rank; all of one dtype, on one device.
        move_to_comm_device: without effect: weft sends tensors of any device.

    Raises:
        WeftError: some rank's tensors are wrong or do not fit; the same text on every rank, naming
            the rank. No tensor was written on any rank. The next call works.
        WireError: a peer or a link failed; names the culprit. The group is lost.

    Example:
        >>> from weft.testing import run
        >>> def program(group):
        ...     send = [torch.full((to + 1,), 10 * group.rank + to) for to in range(group.size)]
        ...     recv = [torch.empty(group.rank + 1, dtype=torch.int64) for _ in range(group.size)]
        ...     all_to_all(recv, send)
        ...     return [tensor.tolist() for tensor in recv]
        >>> run(2, program)
        [[[0], [10]], [[1, 1], [11, 11]]]
    """
    _exchange(recv_tensors, send_tensors, Config.max_collective_size)


def all_to_all_rounds(recv_tensors: Sequence[Tensor], send_tensors: Sequence[Tensor]) -> None:
    """The same as `all_to_all`, which works in rounds itself (`Config.max_collective_size`).

    Example:
        >>> from weft.testing import run
        >>> def program(group):
        ...     recv = [torch.empty(1) for _ in range(group.size)]
        ...     all_to_all_rounds(recv, [torch.tensor([group.rank + 1.0])] * group.size)
        ...     return [tensor.item() for tensor in recv]
        >>> run(2, program)
        [[1.0, 2.0], [1.0, 2.0]]
    """
    all_to_all(recv_tensors, send_tensors)


def all_to_all_gloo_support(recv_tensors: Sequence[Tensor], send_tensors: Sequence[Tensor]) -> None:
    """The same as `all_to_all`, but in one round, whatever `Config` says; on every backend.

    Example:
        >>> from weft.testing import run
        >>> def program(group):
        ...     recv = [torch.empty(1) for _ in range(group.size)]
        ...     all_to_all_gloo_support(recv, [torch.tensor([group.rank + 1.0])] * group.size)
        ...     return [tensor.item() for tensor in recv]
        >>> run(2, program)
        [[1.0, 2.0], [1.0, 2.0]]
    """
    _exchange(recv_tensors, send_tensors, 0)


def _exchange(
    recv_tensors: Sequence[Tensor], send_tensors: Sequence[Tensor], largest: object
) -> None:
    """Fill tensors with what each rank sent, in rounds of at most `largest` elements."""

    def check(came: list[Tensor]) -> None:
        if not isinstance(recv_tensors, list | tuple) or len(recv_tensors) != len(came):
            raise WeftError(
                f"recv_tensors must be a list of {len(came)} tensors, one for each rank"
            )
        for source, (place, tensor) in enumerate(zip(recv_tensors, came, strict=True)):
            _check(f"recv_tensors[{source}]", place, source, tensor)
        _check_apart(recv_tensors)

    for place, tensor in zip(recv_tensors, _sent(send_tensors, check, largest), strict=True):
        _fill(place, tensor)


def exchange_single_tensor(
    recv_idx: int, send_idx: int, recv_tensor: Tensor, send_tensor: Tensor
) -> None:
    """Send a tensor to one rank, and fill another with what one rank sends. Collective.

    Every rank must call it. Rank a's `send_idx` is b where rank b's `recv_idx` is a.

    Args:
        recv_idx: the rank that sends to this one; it may be this one.
        send_idx: the rank to which this one sends; it may be this one.
        recv_tensor: with the dtype and the number of elements of what arrives, on any device.
        send_tensor: of any shape, and of the same dtype on every rank.

    Raises:
        WeftError, WireError: as `all_to_all`.

    Example:
        >>> from weft.testing import run
        >>> def program(group):
        ...     after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
        ...     place = torch.empty(1)
        ...     exchange_single_tensor(before, after, place, torch.tensor([float(group.rank)]))
        ...     return place.item()
        >>> run(3, program)
        [2.0, 0.0, 1.0]
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
    """An argument as a rank of the group; if it is none, all ranks raise WeftError."""
    found, size = integer(given), world_size()
    if found is None or not 0 <= found < size:
        tell(WeftError(f"{name} is {given!r}: pass a rank of the group, 0 to {size - 1}"))
    return found


def exchange_tensors(
    tensors: Sequence[Tensor], recv_sizes: Sequence[int] | None = None
) -> list[Tensor]:
    """Send `tensors[i]` to rank i; return what each rank sent to this one. Collective.

    Args:
        tensors: a tensor for each rank; all of one dtype, on one device; of any shapes, also empty.
        recv_sizes: None, or the length (`shape[0]`) of what each rank sends. weft sends shapes with
            the tensors, so it needs no sizes; it checks those that it gets.

    Returns:
        New tensors in rank order, with the shapes that were sent, on the device of `tensors`.

    Raises:
        WeftError: some rank's tensors are wrong, or a length differs from `recv_sizes`; the same
            text on every rank, naming the rank. The next call works.
        WireError: a peer or a link failed; names the culprit. The group is lost.

    Example:
        >>> from weft.testing import run
        >>> def program(group):
        ...     parts = [torch.ones(to, 2) * group.rank for to in range(group.size)]
        ...     return exchange_tensors(parts)
        >>> [tuple(tensor.shape) for tensor in run(3, program)[2]]
        [(2, 2), (2, 2), (2, 2)]
    """

    def check(came: list[Tensor]) -> None:
        if recv_sizes is None:
            return
        lengths = [tensor.shape[0] if tensor.dim() else 1 for tensor in came]
        try:
            expected = [integer(length) for length in recv_sizes]
        except TypeError:  # it has no elements
            expected = [None]
        if None in expected:
            raise WeftError(
                f"recv_sizes is {recv_sizes!r}: pass a length for each rank, or leave it out"
            )
        if expected != lengths:
            raise WeftError(f"recv_sizes is {expected}, and the ranks send {lengths}: leave it out")

    return _sent(tensors, check, Config.max_collective_size)


def _sent(
    tensors: Sequence[Tensor], check: Callable[[list[Tensor]], None], largest: object
) -> list[Tensor]:
    """Exchange tensors in rounds; return what arrived if `check` raises on no rank."""
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
    """Write what arrived to a buffer that fits it."""
    with torch.no_grad():
        place.copy_(came.view(place.shape))


def all_reduce(red_tensor: Tensor, op: Any, move_to_comm_device: bool = False) -> None:
    """Reduce a tensor over all ranks, in place. Collective.

    Args:
        red_tensor: of the same shape and dtype on every rank, on any device.
        op: a `torch.distributed.ReduceOp`, or a name that `weft.all_reduce` takes.
        move_to_comm_device: without effect: weft reduces tensors of any device.

    Raises:
        WeftError, WireError: as `weft.all_reduce`. WeftError also if some rank's is no tensor, or
            one that cannot be written; then no rank's is.

    Example:
        >>> from weft.testing import run
        >>> def program(group):
        ...     tensor = torch.tensor([group.rank, 1])
        ...     all_reduce(tensor, torch.distributed.ReduceOp.SUM)
        ...     return tensor.tolist()
        >>> run(3, program)
        [[3, 3], [3, 3], [3, 3]]
    """
    if not isinstance(red_tensor, Tensor):
        tell(WeftError(f"red_tensor is a {type(red_tensor).__name__}: pass a tensor to be filled"))
    if reason := unfit(red_tensor):
        tell(WeftError(f"red_tensor is {reason}"))
    with torch.no_grad():
        red_tensor.copy_(weft.all_reduce(red_tensor, op))


def sync_params(model: torch.nn.Module) -> None:
    """Give every rank the parameters and buffers of rank 0's model. Collective: `weft.sync_params`.

    Example:
        >>> from weft.testing import run
        >>> def program(group):
        ...     model = torch.nn.Linear(1, 1, bias=False)
        ...     torch.nn.init.constant_(model.weight, group.rank + 5)
        ...     sync_params(model)
        ...     return model.weight.item()
        >>> run(2, program)
        [5.0, 5.0]
    """
    weft.sync_params(model)


def gather_grads(model: torch.nn.Module) -> None:
    """Sum a model's gradients over all ranks: `weft.sync_grads(model, average=False)`. Collective.

    Example:
        >>> from weft.testing import run
        >>> def program(group):
        ...     weight = torch.nn.Parameter(torch.zeros(1))
        ...     weight.grad = torch.tensor([group.rank + 1.0])
        ...     gather_grads(torch.nn.ParameterList([weight]))
        ...     return weight.grad.item()
        >>> run(2, program)
        [3.0, 3.0]
    """
    weft.sync_grads(model, average=False)
