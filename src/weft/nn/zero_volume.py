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

    Layers ignore its dtype, but not in code that torch.compile has compiled.

    Args:
        dtype, device, requires_grad: as for `torch.empty`.

    Example:
        >>> zero_volume_tensor().shape
        torch.Size([0])
    """
    return torch.empty(0, dtype=dtype, device=device, requires_grad=requires_grad)


def zero_volume_corrector(x: Tensor) -> Tensor:
    """Replace a tensor without elements by a scalar zero, so that every rank has a loss.

    A tensor with elements is copied. If gradients are recorded, a floating-point or complex zero
    requires one. Its backward runs that of `x`, so `loss.backward()` runs the backward of the
    layers before it on every rank.

    Args:
        x: any tensor.

    Returns:
        A copy of `x`; or a zero of shape `[]`, with the dtype and on the device of `x`.

    Example:
        >>> zero_volume_corrector(zero_volume_tensor())
        tensor(0., grad_fn=<AddBackward0>)
        >>> zero_volume_corrector(zero_volume_tensor(dtype=torch.int16))
        tensor(0, dtype=torch.int16)
    """
    if x.numel():
        return x.clone()
    zero = x.sum(dtype=x.dtype)
    if torch.is_grad_enabled() and (x.is_floating_point() or x.is_complex()):
        if not torch.compiler.is_compiling():
            zero = zero + torch.zeros((), dtype=x.dtype, device=x.device, requires_grad=True)
        elif not zero.requires_grad:
            zero = zero + (_ANCHOR * 0).to(x.device, x.dtype)
    return zero


_ANCHOR = torch.zeros((), device="cpu", requires_grad=True)
"""For compiled code, which cannot make a tensor that requires a gradient. Its own gradient is zero.
"""


class ZeroVolumeCorrector(torch.nn.Module):
    """`zero_volume_corrector` as a module: apply it to a loss that not every rank has.

    Example:
        >>> ZeroVolumeCorrector()(torch.tensor([2.0]))
        tensor([2.])
    """

    def forward(self, x: Tensor) -> Tensor:
        return zero_volume_corrector(x)
