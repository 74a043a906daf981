"""`distdl.utilities.torch` and `distdl.functional`: zero-volume tensors, and tensor structures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from weft import nn


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


class ZeroVolumeCorrectorFunction:
    """Replaces the loss of a worker that has no part of the output by a scalar zero."""

    @staticmethod
    def apply(input: Tensor) -> Tensor:
        """Return a copy of a tensor with elements, else a zero: both differentiable.

        It is `weft.nn.ZeroVolumeCorrector`.

        Example:
            >>> loss = ZeroVolumeCorrectorFunction.apply(zero_volume_tensor(2, requires_grad=True))
            >>> loss.backward()
            >>> loss.shape
            torch.Size([])
        """
        corrected: Tensor = nn.ZeroVolumeCorrector()(input)
        return corrected


@dataclass(init=False)
class TensorStructure:
    """The shape, dtype and requires_grad of a tensor; None if unknown.

    Args:
        tensor: the tensor; None: all three are unknown.

    Example:
        >>> TensorStructure(torch.zeros(2))
        TensorStructure(shape=torch.Size([2]), dtype=torch.float32, requires_grad=False)
    """

    shape: Any = None
    dtype: torch.dtype | None = None
    requires_grad: bool | None = None

    def __init__(self, tensor: Tensor | None = None) -> None:
        if tensor is not None:
            self.fill_from_tensor(tensor)

    def fill_from_tensor(self, tensor: Tensor) -> None:
        """Set them to those of a tensor."""
        self.shape, self.dtype = tensor.shape, tensor.dtype
        self.requires_grad = tensor.requires_grad


def distdl_padding_to_torch_padding(pad: ArrayLike) -> tuple[int, ...]:
    """Convert padding, (before, after) for each dimension, to what torch.nn.functional.pad takes.

    torch's begins with the last dimension.

    Example:
        >>> distdl_padding_to_torch_padding([(1, 2), (3, 4)])
        (3, 4, 1, 2)
    """
    return tuple(np.asarray(pad, dtype=np.int64).reshape(-1, 2)[::-1].ravel().tolist())
