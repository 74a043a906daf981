"""Rows that come in pieces, brought to their places of a result.

A stream's pieces are many, so what is the same for all of them is looked at once: on a busy core
that takes longer than the copy itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from . import meter, pool, reference
from .compile import compiler
from .cpu_copy import whole_lines
from .cpu_shares import KEY
from .reduction import detached, on_cpu

__all__ = ["Putter"]

_PAST = 4 << 20  # bytes of a result that would not stay in a core's cache until somebody reads it


class Putter:
    """Brings the rows of several runs to their places in one tensor."""

    def __init__(self, out: Tensor, places: Sequence[Tensor]) -> None:
        """All the places of each run.

        Args:
            out: `[n, *row_shape]`.
            places: int32 `[k]` for each run, all different.
        """
        self._out, self._places = out, [each.contiguous() for each in places]
        self._dtype, self._row_shape = out.dtype, out.shape[1:]
        self._size = out.element_size() * math.prod(self._row_shape)
        self._height, self._to = out.shape[0], out.data_ptr()
        self._counts = [each.numel() for each in self._places]
        self._where = [each.data_ptr() for each in self._places]
        self._plain = on_cpu(out) and out.is_contiguous()
        if out.nbytes >= _PAST and whole_lines(self._to, self._size):
            self._word = 32
        else:
            self._word = next(word for word in (8, 4, 1) if self._size % word == 0)

    def put(self, run: int, first: int, values: Tensor) -> None:
        """Bring rows to some of a run's places: `out[places[first + i]] = values[i]`.

        Args:
            run: which.
            first: number of the first place.
            values: `[m, *row_shape]`, of the dtype of `out`.

        Raises:
            IndexError: a place is not one of a row of `out`.

        Example:
            >>> import torch
            >>> out = torch.zeros(3)
            >>> putter = Putter(out, [torch.tensor([2, 0], dtype=torch.int32)])
            >>> putter.put(0, 0, torch.tensor([1.0]))
            >>> putter.put(0, 1, torch.tensor([4.0]))
            >>> out
            tensor([4., 0., 1.])
        """
        count = values.shape[0]
        fit = values.dtype == self._dtype and values.shape[1:] == self._row_shape
        if not (fit and 0 <= first <= first + count <= self._counts[run]):
            raise ValueError(
                f"places {first} to {first + count} of {self._counts[run]}, values "
                f"{tuple(values.shape)} of {values.dtype} and out {tuple(self._out.shape)} of "
                f"{self._dtype} do not fit together: give a place for each row, and rows of one "
                "shape and dtype"
            )
        size = self._size
        if not (count and size):
            return
        meter.spend(meter.CALL + meter.PUT * count * size)
        loops = compiler.loops(KEY) if self._plain else None
        if loops is None or not on_cpu(values):
            reference.put(self._out, self._places[run][first : first + count], detached(values))
            return
        values = values.resolve_neg().contiguous()
        loop, height, words = loops[f"put{self._word}"], self._height, size // self._word
        to, where, from_ = self._to, self._where[run] + 4 * first, values.data_ptr()

        def part(start: int, stop: int) -> int:
            outside: int = loop(to, height, where, from_, size, start, stop, words)
            return outside

        cuts = pool.ranges(0, count, pool.share(2 * count * size))
        if outside := sum(pool.run(part, cuts)):
            raise IndexError(
                f"{outside} of {count} rows belong outside of places 0 to {height - 1}: "
                "pass places of the result only"
            )
