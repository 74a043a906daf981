"""`distdl.utilities.torch` and `distdl.functional`: tensors without elements, and descriptions."""

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
    """A tensor without elements, for a worker that has nothing to bring.

    Args:
        b: the size of the batch; the shape is [b, 0], or [0] without it.
        dtype, requires_grad, device: as torch's.

    Example:
        >>> zero_volume_tensor().shape, zero_volume_tensor(4).shape
        (torch.Size([0]), torch.Size([4, 0]))
    """
    shape = (0,) if b is None else (b, 0)
    return torch.empty(shape, dtype=dtype, device=device, requires_grad=requires_grad)


class ZeroVolumeCorrectorFunction:
    """A scalar in place of a loss that this worker does not have."""

    @staticmethod
    def apply(input: Tensor) -> Tensor:
        """A copy, or a zero if there are no elements: `weft.nn.functional.zero_volume_corrector`.

        Example:
            >>> ZeroVolumeCorrectorFunction.apply(zero_volume_tensor(2)).backward()
        """
        return nn.functional.zero_volume_corrector(input)


@dataclass(init=False)
class TensorStructure:
    """Shape, dtype and requires_grad of a tensor; None where unknown."""

    shape: Any = None
    dtype: torch.dtype | None = None
    requires_grad: bool | None = None

    def __init__(self, tensor: Tensor | None = None) -> None:
        if tensor is not None:
            self.fill_from_tensor(tensor)

    def fill_from_tensor(self, tensor: Tensor) -> None:
        """Take those of a tensor."""
        self.shape, self.dtype = tensor.shape, tensor.dtype
        self.requires_grad = tensor.requires_grad


def distdl_padding_to_torch_padding(pad: ArrayLike) -> tuple[int, ...]:
    """Padding (before, after) for each dimension, as torch.nn.functional.pad takes it.

    Example:
        >>> distdl_padding_to_torch_padding([(1, 2), (3, 4)])
        (3, 4, 1, 2)
    """
    return tuple(np.asarray(pad, dtype=np.int64).reshape(-1, 2)[::-1].ravel().tolist())
