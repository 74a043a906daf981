"""Tensors without elements: what ranks pass and get that have no part of a layer's tensor."""

from __future__ import annotations

import torch
from torch import Tensor


def zero_volume_tensor(
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    requires_grad: bool = False,
) -> Tensor:
    """A tensor of shape `[0]`: the input of a layer on a rank that has no part of the tensor.

    Layers ignore its dtype.

    Args:
        dtype, device, requires_grad: as for `torch.empty`.

    Example:
        >>> zero_volume_tensor().shape
        torch.Size([0])
    """
    return torch.empty(0, dtype=dtype, device=device, requires_grad=requires_grad)


class ZeroVolumeCorrector(torch.nn.Module):
    """Replaces a tensor without elements by a scalar zero, so that every rank has a loss.

    Apply it to a loss that not every rank has. A tensor with elements is copied. Of one without,
    the output is a zero of shape `[]`, of its dtype and on its device. If gradients are recorded, a
    floating-point or complex zero requires one. Its backward runs that of the input, so
    `loss.backward()` runs the backward of the layers before it on every rank.

    Example:
        >>> corrector = ZeroVolumeCorrector()
        >>> corrector(torch.tensor([2.0])), corrector(zero_volume_tensor())
        (tensor([2.]), tensor(0., grad_fn=<AddBackward0>))
        >>> corrector(zero_volume_tensor(dtype=torch.int16))
        tensor(0, dtype=torch.int16)
    """

    def forward(self, x: Tensor) -> Tensor:
        if x.numel():
            return x.clone()
        zero = x.sum(dtype=x.dtype)
        if torch.is_grad_enabled() and (x.is_floating_point() or x.is_complex()):
            zero = zero + torch.zeros((), dtype=x.dtype, device=x.device, requires_grad=True)
        return zero
