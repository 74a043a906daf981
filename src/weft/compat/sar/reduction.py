"""SAR's `all_reduce`, in place, and its ways to keep a model alike on all ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ... import comm
from ...comm.all_reduce import combined
from ...wire import default
from .buffers import unwritable

__all__ = ["all_reduce", "gather_grads", "sync_params"]


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
