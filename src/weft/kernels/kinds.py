"""Which of some indices are equal, on whatever device: nothing here waits for one.

How many kinds there are only the device knows: who asks reads `total`, and says it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .reference import Distinct


class Kinds(NamedTuple):
    """Indices in ascending order: equal ones are of a kind.

    Attributes:
        ascending: the indices, `[k]`.
        order: what sorts them stably, int64 `[k]`.
        upto: how many kinds there are up to each, int64 `[k]`.
        total: how many there are, int64 `[1]`.
    """

    ascending: Tensor
    order: Tensor
    upto: Tensor
    total: Tensor

    @classmethod
    def of(cls, indices: Tensor, count: int | None = None) -> Kinds:
        """Those of indices (1-D); only the `count` least, if that is given.

        Example:
            >>> Kinds.of(torch.tensor([7, 2, 7])).upto
            tensor([1, 2, 2])
        """
        ascending, order = (each[:count] for each in torch.sort(indices, stable=True))
        is_first = torch.ones_like(ascending, dtype=torch.bool)
        torch.ne(ascending[1:], ascending[:-1], out=is_first[1:])
        return cls(ascending, order, torch.cumsum(is_first, 0), is_first.sum().view(1))

    def distinct(self, count: int, most: int) -> Distinct:
        """One of each kind, and where it occurs.

        Args:
            count: how many kinds there are.
            most: how often one occurs, at most.
        """
        starts = self.starts(count)
        indices = self.ascending.index_select(0, starts[:-1])
        return Distinct(indices, self.order, starts, most)

    def starts(self, count: int) -> Tensor:
        """Where each of the first kinds begins, and the end of the last, int64 `[count + 1]`.

        Example:
            >>> Kinds.of(torch.tensor([7, 2, 7])).starts(2)
            tensor([0, 1, 3])
        """
        numbers = torch.arange(1, count + 2, device=self.upto.device)
        return torch.searchsorted(self.upto, numbers)
