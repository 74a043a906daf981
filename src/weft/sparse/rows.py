"""Rows: the sparse values that weft moves, and the way from and to torch's sparse COO tensors.

Rows say which rows of a taller tensor are there, and what they hold. They are *canonical* when
the indices are sorted and unique, as those of every reduction's result are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..base.errors import WeftError


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Some rows of a tensor of `height` rows.

    Attributes:
        indices: indices of the rows; int32 or int64, shape `[k]`, any order, duplicates allowed.
        values: the rows; shape `[k, *row_shape]`.
        height: rows of the dense tensor, or None if unknown.

    Example:
        >>> rows = Rows(torch.tensor([3, 0, 3]), torch.tensor([1.0, 2.0, 4.0]), height=5)
        >>> rows.dense()
        tensor([2., 0., 0., 5., 0.])
    """

    indices: Tensor
    values: Tensor
    height: int | None = None

    def __len__(self) -> int:
        return self.indices.numel()

    @property
    def row_shape(self) -> torch.Size:
        """Shape of one row; `torch.Size([])` for scalars."""
        return self.values.shape[1:]

    def dense(self) -> Tensor:
        """The dense tensor `[height, *row_shape]` these rows add up to.

        Raises:
            WeftError: the height is unknown.
            IndexError: an index is negative, or not below the height.
        """
        if self.height is None:
            raise WeftError("rows without a height have no dense form: pass height=")
        out = self.values.new_zeros((self.height, *self.row_shape))
        return out.index_add_(0, self.indices.long(), self.values)

    @classmethod
    def from_coo(cls, tensor: Tensor) -> Rows:
        """Rows of a sparse COO tensor; several sparse dimensions become one, row-major.

        Raises:
            WeftError: the tensor has another layout; or, on the CPU, an index of several sparse
                dimensions is outside of its own.

        Example:
            >>> where, what = [[0, 1], [2, 0]], [5.0, 7.0]
            >>> coo = torch.sparse_coo_tensor(where, what, (2, 3), check_invariants=True)
            >>> Rows.from_coo(coo).indices
            tensor([2, 3])
        """
        if tensor.layout != torch.sparse_coo:
            raise WeftError(f"from_coo takes a sparse COO tensor, this one is {tensor.layout}")
        heights = tensor.shape[: tensor.sparse_dim()]
        indices, values = tensor._indices(), tensor._values()
        if len(heights) == 1:
            return cls(indices[0], values, heights[0])
        linear = torch.zeros_like(indices[0]) if len(indices) else indices.new_zeros(len(values))
        wrong = torch.zeros_like(linear, dtype=torch.bool)
        for axis, height in zip(indices, heights, strict=True):
            linear = linear * height + axis
            wrong |= (axis < 0) | (axis >= height)
        if wrong.device.type == "cpu" and wrong.any():
            bad = tuple(indices[:, int(wrong.byte().argmax())].tolist())
            raise WeftError(f"index {bad} is outside of the sparse dimensions {tuple(heights)}")
        # On an accelerator, where looking costs a wait, such an index becomes one beyond the height
        # which the call that gets these rows refuses: else it would name another row.
        return cls(linear.masked_fill(wrong, math.prod(heights)), values, math.prod(heights))

    def to_coo(self, shape: Sequence[int] | None = None, *, canonical: bool = False) -> Tensor:
        """A sparse COO tensor of the given shape (default: `[height, *row_shape]`).

        Args:
            shape: sizes of the sparse dimensions, whose product is the height, then `row_shape`.
            canonical: the rows are known to be sorted and unique, so mark the tensor coalesced.

        Raises:
            WeftError: there is neither a height nor a shape.
        """
        if shape is None:
            if self.height is None:
                raise WeftError("rows without a height have no COO form: pass shape=")
            shape = (self.height, *self.row_shape)
        heights = list(shape)[: len(shape) - self.values.dim() + 1]
        if len(heights) == 1:
            indices = self.indices.unsqueeze(0)
        else:
            linear, axes = self.indices, []
            for height in reversed(heights):
                axes.append(linear % max(height, 1))
                linear = linear // max(height, 1)
            indices = torch.stack(axes[::-1]) if axes else self.indices.new_zeros((0, len(self)))
        return torch.sparse_coo_tensor(
            indices, self.values, tuple(shape), is_coalesced=canonical, check_invariants=False
        )
