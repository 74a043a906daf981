"""SAR's module `comm`: start-up, and the functions that send tensors between ranks and reduce them.

All functions use the default group, so they also work in a program that called `weft.init` itself.
Tensors on another device than that of `initialize_comms` are copied there and back: so one trains
on GPUs over a backend of CPUs, and the other way round.

Every rank of the group must call a collective. As in SAR, the collectives are not differentiable
(`weft.exchange` and `weft.all_to_all` are). Before weft writes to a receive buffer, the ranks tell
each other in one more small exchange whether every buffer fits what arrived. So if one does not,
every rank raises the same error, and no buffer has changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

import weft
from weft import Group, WeftError
from weft.base.tensors import overlapping, unwritable, write
from weft.bootstrap import TIMEOUT, init_as, publish

from ..arguments import group_of, telling

_PORT = 12345  # SAR's
_DEVICES = {"nccl": "cuda", "xccl": "xpu"}  # of all others: "cpu"

_ports: dict[str, int] = {}  # of rank 0 by its address, as `nfs_ip_init` found it
_devices: WeakKeyDictionary[Group, torch.device] = WeakKeyDictionary()


def nfs_ip_init(_rank: int, ip_file: str) -> str:
    """Tell all ranks the address of rank 0 by a file on a shared file system. Every rank calls it.

    Rank 0 also chooses a free port. `initialize_comms` uses that port if it gets the address that
    this function returned, and no other port. A file that an earlier run left is not used, because
    nobody answers at its address.

    Args:
        _rank: the rank of this process.
        ip_file: the path of the file, or of a folder in which it is made. The file has mode 0600.

    Returns:
        The address of rank 0's host.

    Raises:
        WeftError: the file cannot be written, belongs to another user, or has other content.
        WireError: nobody answered within 300 s.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     address = nfs_ip_init(0, f"{folder}/ip_file")
    """
    address, _ports[address] = publish(_rank, ip_file, TIMEOUT)
    return address


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
        _rank: the rank of this process.
        _world_size: the number of ranks.
        master_ip_address: of the host of rank 0: a numeric address or a name. Ignored, as is the
            port, if torch.distributed is initialised already.
        backend: a backend of `weft.init`: "gloo", "nccl", "ccl", "mpi" and others.
        _comm_device: the device to which tensors are copied to be sent. None: "cuda" for "nccl",
            "xpu" for "xccl", else "cpu".
        master_port_number: of rank 0. None: the port that rank 0 chose in `nfs_ip_init`, or 12345
            if the address did not come from there.

    Raises:
        WeftError: the backend is not available, the port is taken, or the processes contradict each
            other.
        WireError: not all ranks came within 300 s; it names those that did not.

    Example:
        >>> import weft
        >>> initialize_comms(0, 1, "127.0.0.1", "gloo", master_port_number=29432)
        >>> rank(), world_size()
        (0, 1)
        >>> weft.shutdown()
    """
    device = torch.device(_comm_device or _DEVICES.get(backend, "cpu"))
    port = master_port_number
    if port is None:
        port = _ports.get(master_ip_address, _PORT)
    group = init_as(_rank, _world_size, backend, master_ip_address, port)
    _devices[group] = device


def rank() -> int:
    """This process's rank. Raises WeftError if there is no group; so do the functions below.

    Example:
        >>> from weft.testing import run
        >>> run(2, lambda group: (rank(), world_size()))
        [(0, 2), (1, 2)]
    """
    return group_of().rank


def world_size() -> int:
    """The number of ranks."""
    return group_of().size


def all_to_all(
    recv_tensors: Sequence[Tensor],
    send_tensors: Sequence[Tensor],
    move_to_comm_device: bool = False,
) -> None:
    """Send `send_tensors[i]` to rank i; fill `recv_tensors[i]` with what rank i sent. Collective.

    Args:
        recv_tensors: a tensor for each rank, on any device, with the dtype and the number of
            elements of what that rank sends; its shape may be another. It may have no elements. No
            two may lie in the same memory, as the columns of a matrix do.
        send_tensors: a tensor for each rank; all of one dtype.
        move_to_comm_device: without effect: what must be moved is.

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
    with telling():
        sent = [_sendable(each) for each in send_tensors]
    with torch.no_grad():
        came = weft.all_to_all(sent)
    weft.attempt(lambda: _check(recv_tensors, came), name="what came")
    for place, tensor in zip(recv_tensors, came, strict=True):
        write(place, tensor.view(place.shape))


def all_reduce(red_tensor: Tensor, op: Any, move_to_comm_device: bool = False) -> None:
    """Reduce a tensor over all ranks, in place. Collective.

    Args:
        red_tensor: of the same shape and dtype on every rank, on any device.
        op: a `torch.distributed.ReduceOp`, or a name that `weft.all_reduce` takes.
        move_to_comm_device: without effect: what must be moved is.

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
    with telling():
        _check_place("red_tensor", red_tensor)
        sent = _sendable(red_tensor.detach())
    write(red_tensor, weft.all_reduce(sent, op))


def sync_params(model: nn.Module) -> None:
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
    twin, pairs = _moved(model)
    weft.sync_params(twin)
    for own, other in pairs:
        write(own, other.detach())


def gather_grads(model: nn.Module) -> None:
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
    twin, pairs = _moved(model)
    weft.sync_grads(twin, average=False)
    for own, other in pairs:
        if other.grad is not None:
            own.grad = other.grad.to(own.device)


def _comm_device() -> torch.device | None:
    """The device of `initialize_comms`; None if `weft.init` made the group."""
    return _devices.get(group_of())


def _sendable(tensor: Any) -> Any:
    """A tensor on the device of communication; whatever else it is, weft's call refuses."""
    device = _comm_device()
    if device is None or not isinstance(tensor, Tensor) or tensor.is_meta:
        return tensor
    return tensor.to(device)


_Pairs = list[tuple[Tensor, Tensor]]
"""A model's tensors, each with its copy."""


def _moved(model: nn.Module) -> tuple[nn.Module, _Pairs]:
    """A model on the device of communication, and which copy is whose: itself if it is there."""
    device = _comm_device()
    if device is None or not isinstance(model, nn.Module):  # which weft's call refuses
        return model, []
    tensors = *model.parameters(), *model.buffers()
    if all(tensor.device.type == device.type for tensor in tensors):
        return model, []
    twin = nn.Module()  # with copies of parameters, their gradients, and buffers
    pairs: _Pairs = []
    with telling():
        for name, parameter in model.named_parameters():
            other = nn.Parameter(parameter.detach().to(device), parameter.requires_grad)
            if parameter.grad is not None:
                other.grad = parameter.grad.to(device)
            _home(twin, name).register_parameter(name.rpartition(".")[2], other)
            pairs.append((parameter, other))
        for name, buffer in model.named_buffers():
            copy = buffer.to(device)
            _home(twin, name).register_buffer(name.rpartition(".")[2], copy)
            pairs.append((buffer, copy))
    return twin, pairs


def _home(module: nn.Module, name: str) -> nn.Module:
    """The submodule that has the tensor of this name, made if there is none yet."""
    for part in name.split(".")[:-1]:
        if part not in dict(module.named_children()):
            module.add_module(part, nn.Module())
        module = module.get_submodule(part)
    return module


def _check_place(name: str, place: Any) -> None:
    """Check that a tensor can be written to.

    Raises:
        WeftError: it cannot.
    """
    if not isinstance(place, Tensor):
        raise WeftError(f"{name} is a {type(place).__name__}: pass a tensor to be filled")
    if reason := unwritable(place):
        raise WeftError(f"{name} is {reason}")


def _check(places: Any, came: Sequence[Tensor]) -> None:
    """Check that receive buffers fit what arrived, and do not lie in the same memory.

    Raises:
        WeftError: they do not.
    """
    if not isinstance(places, list | tuple) or len(places) != len(came):
        raise WeftError(f"recv_tensors must be a list of {len(came)} tensors, one for each rank")
    for source, (place, tensor) in enumerate(zip(places, came, strict=True)):
        name = f"recv_tensors[{source}]"
        _check_place(name, place)
        if place.dtype != tensor.dtype:
            raise WeftError(
                f"{name} has {place.dtype}, and rank {source} sends {tensor.dtype}: pass one dtype"
            )
        if place.numel() != tensor.numel():
            raise WeftError(
                f"{name} has shape {tuple(place.shape)}, and rank {source} sends "
                f"{tuple(tensor.shape)}: make it as large, or use weft.all_to_all, which needs no "
                "sizes"
            )
    if overlapping(*places):
        raise WeftError("some of recv_tensors lie in the same memory: pass tensors of their own")
