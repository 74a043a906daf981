"""`zero_volume_tensor`: what a worker passes that has no part of a layer's tensor."""

from __future__ import annotations

import torch
from torch import Tensor


def zero_volume_tensor(
    b: int | None = None,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
    device: torch.device | str | None = None,
) -> Tensor:
    """A tensor without elements: the input of a layer on a worker that has no part of the tensor.

    Args:
        b: the batch size: the shape is [b, 0]; None: the shape is [0].
        dtype, requires_grad, device: as for `torch.empty`.

    Example:
        >>> zero_volume_tensor().shape, zero_volume_tensor(4).shape
        (torch.Size([0]), torch.Size([4, 0]))
    """
    shape = (0,) if b is None else (b, 0)
    return torch.empty(shape, dtype=dtype, device=device, requires_grad=requires_grad)
