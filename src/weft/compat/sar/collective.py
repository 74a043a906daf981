"""SAR's ways to send tensors between ranks and to combine them, over weft's routines.

As in SAR autograd does not see them (`weft.exchange` and `weft.all_to_all` are differentiable). All
of them are collective: every rank of the group calls them.

What is sent is checked against the buffers that it is for before any of those is written, in one
small exchange more; so every rank raises the same where one of them is wrong.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from ... import comm
from ...comm.all_reduce import combined
from ...comm.all_to_all import scattered
from ...comm.named import expanded_dims
from ...comm.opening import opened
from ...tensors import has_elements, lacking
from ...wire import default


class Config:
    """What a program sets once, on the class itself, alike on every rank.

    Attributes:
        max_collective_size: elements that a rank sends and receives together, at most, in one round
            of `all_to_all`, give or take one of each tensor; 0: all in one round. Where ranks
            differ the smallest counts.
    """

    max_collective_size: ClassVar[int] = 0


def unwritable(name: str, place: Tensor) -> str | None:
    """Why a tensor of the caller's cannot be filled, or None."""
    if not has_elements(place):
        return f"{name} is {lacking(place)}: pass a strided tensor with data"
    if expanded_dims(place):
        return f"{name} is expanded, its elements share memory: pass one that can be written"
    if place.is_inference() and not torch.is_inference_mode_enabled():
        return f"{name} is of inference mode: pass one that can be written, or a clone of it"
    return None


def unfit(name: str, place: object, source: int, came: Tensor) -> str | None:
    """Why a buffer cannot take what came, or None."""
    if not isinstance(place, Tensor):
        return f"{name} is a {type(place).__name__}: pass a tensor to be filled"
    if error := unwritable(name, place):
        return error
    if place.dtype != came.dtype:
        return f"{name} has {place.dtype}, and rank {source} sends {came.dtype}: pass one dtype"
    if place.numel() != came.numel():
        return (
            f"{name} has shape {tuple(place.shape)}, and rank {source} sends {tuple(came.shape)}: "
            "make it as large, or use exchange_tensors, which needs no sizes"
        )
    return None


def fill(place: Tensor, came: Tensor) -> None:
    """Write what came into a buffer that is fit for it."""
    with torch.no_grad():
        place.copy_(came.view(place.shape))


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
    size = default.current().size

    def check(came: list[Tensor]) -> str | None:
        if not isinstance(recv_tensors, list | tuple) or len(recv_tensors) != size:
            return f"recv_tensors must be a list of {size} tensors, one for each rank"
        wrong = (unfit(f"recv_tensors[{i}]", recv_tensors[i], i, came[i]) for i in range(size))
        return next(filter(None, wrong), None)

    came = _sent("all_to_all", send_tensors, check, "send_tensors")
    for place, tensor in zip(recv_tensors, came, strict=True):
        fill(place, tensor)


def all_to_all_rounds(recv_tensors: Sequence[Tensor], send_tensors: Sequence[Tensor]) -> None:
    """`all_to_all`, which goes in rounds by itself: see `Config.max_collective_size`."""
    all_to_all(recv_tensors, send_tensors)


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
    size = default.current().size
    one = isinstance(send_tensor, Tensor)
    source, to = _whole(recv_idx), _whole(send_idx)
    wrong = [
        f"{name} is {given!r}: pass a rank of the group, 0 to {size - 1}"
        for name, given, index in (("recv_idx", recv_idx, source), ("send_idx", send_idx, to))
        if not 0 <= index < size
    ]
    if not one:
        wrong.append(f"send_tensor is a {type(send_tensor).__name__}: pass a tensor")

    def check(came: list[Tensor]) -> str | None:
        if wrong:
            return wrong[0]
        return unfit("recv_tensor", recv_tensor, source, came[source])

    send = [send_tensor.new_empty(0) if one else torch.empty(0)] * size
    if not wrong:
        send[to] = send_tensor
    fill(recv_tensor, _sent("exchange_single_tensor", send, check, "send_tensor")[source])


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

    def check(came: list[Tensor]) -> str | None:
        if recv_sizes is None:
            return None
        lengths = [tensor.shape[0] if tensor.dim() else 1 for tensor in came]
        try:
            expected = [int(length) for length in recv_sizes]
        except (TypeError, ValueError):
            return f"recv_sizes is {recv_sizes!r}: pass a length for each rank, or leave it out"
        if expected == lengths:
            return None
        return f"recv_sizes is {expected}, and the ranks send {lengths}: leave it out"

    return _sent("exchange_tensors", tensors, check, "tensors")


def _sent(
    name: str, tensors: Sequence[Tensor], check: Callable[[list[Tensor]], str | None], said: str
) -> list[Tensor]:
    """What came, once all ranks agree that it is what each of them expects.

    Args:
        name: of the call.
        tensors: one for each rank.
        check: what is wrong with what came, or None.
        said: what the caller calls the tensors.
    """
    wire, most = default.current(), _whole(Config.max_collective_size)
    error = None
    if most < 0:
        error = (
            f"Config.max_collective_size is {Config.max_collective_size!r}: set a number of "
            "elements, or 0 for all in one round"
        )
    width = tensors[0].element_size() if tensors and isinstance(tensors[0], Tensor) else 1
    limit = most * width if most and not error else None
    with torch.no_grad():
        came = scattered(wire, tensors, limit, error, said)

    def job() -> None:
        with opened(wire, name, {}, check(came)):
            pass

    wire.worker.call(name, job)
    return came


def _whole(number: Any) -> int:
    """A whole number of any kind, such as NumPy's, as Python's; -1 if it is none."""
    try:
        return -1 if isinstance(number, bool) else operator.index(number)
    except TypeError:
        return -1


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
    error = unwritable("red_tensor", red_tensor) if isinstance(red_tensor, Tensor) else None
    with torch.no_grad():
        result = combined(default.current(), red_tensor, op, error)
        red_tensor.copy_(result)


def sync_params(model: torch.nn.Module) -> None:
    """Give every rank the parameters and buffers of rank 0's model: `weft.sync_params`."""
    comm.sync_params(model)


def gather_grads(model: torch.nn.Module) -> None:
    """Sum the gradients over all ranks, by name: `weft.sync_grads(model, average=False)`."""
    comm.sync_grads(model, average=False)
