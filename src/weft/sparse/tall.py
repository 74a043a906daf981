"""A tall table: those of one kind, one on top of the other, each with its range of keys."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from .. import kernels
from ..base.errors import conclusion
from ..base.memory import fresh
from ..base.tensors import Shape, there
from .request import Request
from .rows import Rows

_MOST = 2**63 - 1  # keys that there may be: they fit in int64, and so does the end
_SHORT = 2**31  # keys below fit in int32


class Tall(NamedTuple):
    """Tables of one dtype and row shape.

    Attributes:
        tables: their requests.
        row_shape: shape of a row.
        starts: the first key of each table, and the end of all keys.
    """

    tables: Sequence[Request]
    row_shape: Shape
    starts: list[int]

    @classmethod
    def of(cls, tables: Sequence[Request], row_shape: Shape, highest: Sequence[int]) -> Tall:
        """That of tables which have these largest indices, on this rank or on all.

        Raises:
            WeftError: their keys do not fit in int64; a single table has its indices.
        """
        starts = [0, *accumulate(index + 1 for index in highest)]
        if starts[-1] > _MOST and len(tables) > 1:
            most = max(highest)
            naming = tables[highest.index(most)].naming
            raise conclusion(f"{naming}index {most} is too large for a list: pass it alone")
        return cls(tables, row_shape, starts)

    @property
    def bounds(self) -> list[int]:
        """The first key of each table but the first."""
        return self.starts[1:-1]

    def keys(self) -> Tensor:
        """The indices of the tables, one's behind the other's, as keys."""
        if len(self.tables) == 1:
            return self.tables[0].rows.indices
        indices = torch.cat([each.rows.indices for each in self.tables])
        keys = shifted(indices, [len(each.rows) for each in self.tables], self.starts[:-1])
        return keys.to(torch.int32 if self.starts[-1] < _SHORT else torch.int64)

    def request(self) -> Request:
        """The call for the tall table."""
        first = self.tables[0]
        keys = self.keys()
        shaped = [each.rows.values.view(len(each.rows), *self.row_shape) for each in self.tables]
        if len(shaped) == 1:
            return first.of_rows(Rows(keys, shaped[0], first.rows.height))
        memory = fresh((len(keys), *self.row_shape), shaped[0].dtype, keys.device)
        return first.of_rows(Rows(keys, torch.cat(shaped, out=memory), self.starts[-1]))

    def parts(self, result: Rows, cuts: Sequence[int]) -> list[Rows]:
        """The rows of each table.

        Args:
            result: of the tall table.
            cuts: how many of its rows come before each of `bounds`.
        """
        if len(self.tables) == 1:
            return [result]
        counts = [high - low for low, high in pairwise([0, *cuts, len(result)])]
        indices = shifted(result.indices, counts, [-start for start in self.starts[:-1]])
        parts = zip(_copies(indices, counts), _apart(result.values, counts), strict=True)
        return [
            Rows(indices.to(each.rows.indices.dtype), values, each.rows.height)
            for each, (indices, values) in zip(self.tables, parts, strict=True)
        ]


def shifted(indices: Tensor, counts: Sequence[int], by: Sequence[int]) -> Tensor:
    """The indices of some tables, each with a number of its table's added; int64.

    Args:
        indices: one table's behind the other's.
        counts: how many each has.
        by: the numbers.
    """
    number, count = there([*by, *counts], indices.new_empty(0, dtype=torch.int64)).view(2, -1)
    return indices + torch.repeat_interleave(number, count, output_size=len(indices))


def _apart(whole: Tensor, counts: list[int]) -> list[Tensor]:
    """Parts with a storage of their own each, so that `torch.save` of one does not save the whole.

    On the host they share the memory of the whole; on a device they are copies.
    """
    if kernels.on_host(whole):
        return [_own(part) for part in torch.split(whole, counts)]
    return _copies(whole, counts)


def _copies(whole: Tensor, counts: list[int]) -> list[Tensor]:
    parts = [whole.new_empty((count, *whole.shape[1:])) for count in counts]
    if whole.numel():  # on CUDA torch divides by the bytes of a row
        torch.split_with_sizes_copy(whole, counts, out=parts)
    return parts


def _own(part: Tensor) -> Tensor:
    """A part of a tensor on the host, with a storage that shares that part of its memory."""
    first = part.storage_offset() * part.itemsize
    memory: torch.UntypedStorage = part.untyped_storage()[first : first + part.nbytes]
    return torch.empty(0, dtype=part.dtype).set_(memory).view(part.shape)
