"""Tensors without elements: what ranks pass and get that have no part in a layer."""

from __future__ import annotations

import torch
from torch import Tensor


def zero_volume_tensor(
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    requires_grad: bool = False,
) -> Tensor:
    """A tensor of shape `[0]`, for a rank that has nothing to bring; its dtype says nothing.

    Example:
        >>> zero_volume_tensor().shape
        torch.Size([0])
    """
    return torch.empty(0, dtype=dtype, device=device, requires_grad=requires_grad)


def zero_volume_corrector(x: Tensor) -> Tensor:
    """A scalar zero in place of a tensor without elements, so that every rank has a loss.

    A tensor with elements is copied. The zero requires a gradient wherever gradients are recorded,
    and hands its backward pass on to `x`, so `loss.backward()` runs the layers behind it on every
    rank.

    Args:
        x: any tensor.

    Returns:
        A copy of `x`, or a zero of shape `[]` and of its dtype.

    Example:
        >>> zero_volume_corrector(zero_volume_tensor())
        tensor(0., grad_fn=<AddBackward0>)
    """
    if x.numel():
        return x.clone()
    zero = x.sum()
    if torch.is_grad_enabled() and (x.is_floating_point() or x.is_complex()):
        if not torch.compiler.is_compiling():
            zero = zero + torch.zeros((), dtype=x.dtype, device=x.device, requires_grad=True)
        elif not zero.requires_grad:
            zero = zero + (_ANCHOR * 0).to(x.device, x.dtype)
    return zero


_ANCHOR = torch.zeros((), device="cpu", requires_grad=True)
"""For compiled code, which cannot make a tensor that requires a gradient; its gradient is zero."""


class ZeroVolumeCorrector(torch.nn.Module):
    """`zero_volume_corrector` as a module: put it behind a loss that not every rank has."""

    def forward(self, x: Tensor) -> Tensor:
        return zero_volume_corrector(x)
