"""Rounding of values that are sent in fewer bits: to nearest even, once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import kernels


def narrow(values: Tensor, out: Tensor) -> None:
    """Write values (1-D) to `out`, rounded to nearest even where its dtype is narrower."""
    if values.dtype is torch.float64 and out.dtype.itemsize == 2:
        kernels.finish(values, out)  # torch would round them twice
    else:
        out.copy_(values)


def narrowed(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Values in a dtype that is no wider; differentiable, as `Tensor.to` is."""
    if values.dtype is torch.float64 and dtype is not torch.float64:
        result: Tensor = _Narrowed.apply(values, dtype)  # type: ignore[no-untyped-call]  # torch's
        return result
    return values.to(dtype)


class _Narrowed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, dtype: torch.dtype) -> Tensor:
        result = torch.empty(values.shape, dtype=dtype, device=values.device)
        narrow(values.reshape(-1), result.view(-1))
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient.double(), None
