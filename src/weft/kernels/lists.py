"""Rows of lists of tables: laid where others read them, sorted by their keys, added, taken apart.

A key is an index and a table in one number: in a *space* of keys each table begins where the one
before ends. A list of some thousand rows costs more in calls than in work, so all tables are done
at once, in machine code (`list_loops`, `owned_loops`). Where there is none, NumPy gives the same
numbers, or None says that nothing was done.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from itertools import accumulate, pairwise
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .compile import Key, compiler
from .cpu import value_key
from .cpu_copy import whole_lines
from .ops import Op

__all__ = [
    "KEY",
    "Ends",
    "Place",
    "Sorted",
    "Spans",
    "adds",
    "even_cuts",
    "joined",
    "laid",
    "parted",
    "sorted_keys",
    "spans",
    "sums",
    "sums_key",
]

KEY: Key = ("list",)
"""The one set of loops."""

_BINS = 64
_DIGIT = 12  # bits that one pass of the sort looks at; its counts then fit the first cache
_ITEMSIZE = attrgetter("itemsize")
_HASHED = 1 << 16  # rows of a table; places of more are not in the cache, and sorting is quicker

Longs = NDArray[np.int64]


def joined(parts: Sequence[Tensor]) -> tuple[Tensor, Longs, Longs]:
    """The keys of some tables' indices (int32 or int64, not empty), in the order they have.

    Returns:
        Those, int64; and of each table the least and the greatest index. Where one is negative, or
        they are too large for a list, keys may be anything.

    Example:
        >>> joined([torch.tensor([3, 0]), torch.tensor([1])])
        (tensor([3, 0, 5]), array([0, 1]), array([3, 1]))
    """
    parts = [part.contiguous() for part in parts]
    counts = [part.numel() for part in parts]
    loops = compiler.loops(KEY)
    if loops is None:
        indices = torch.cat(parts).long().numpy()
        begins = np.cumsum([0, *counts[:-1]])
        lows, highs = (f.reduceat(indices, begins) for f in (np.minimum, np.maximum))
        keys = indices + np.repeat(np.cumsum(highs + 1) - highs - 1, counts)
        return torch.from_numpy(keys), lows, highs
    given = array("q")
    for part, count in zip(parts, counts, strict=True):
        given.extend((part.data_ptr(), count, part.element_size()))
    keys, ends = torch.empty(sum(counts), dtype=torch.int64), np.empty((2, len(parts)), np.int64)
    at = ends.ctypes.data
    loops["joined"](given.buffer_info()[0], len(parts), at, at + 8 * len(parts), keys.data_ptr())
    return keys, ends[0], ends[1]


def even_cuts(
    points: Longs, weights: Longs, end: int, ranks: int, sizes: Longs | None = None
) -> list[int]:
    """Where to cut keys, so that all ranges have equal work.

    What an owner of a range does grows with the rows it receives for it and with the sums it sends,
    one to each other rank; both are estimated from points, bin by bin, in integers or in operations
    that every machine rounds alike.

    Args:
        points: keys, ascending.
        weights: how many rows lie from each to the next.
        end: all keys lie below this.
        ranks: how many ranges.
        sizes: bytes of the rows at each point; None: all are alike.

    Returns:
        `ranks - 1` keys, ascending.
    """
    count = len(points)
    if not count:
        return [0] * (ranks - 1)
    bins = min(_BINS, count)
    starts = np.arange(bins, dtype=np.int64) * count // bins
    edges = np.append(points[starts], end)
    rows = np.add.reduceat(weights, starts)
    width = np.maximum(np.diff(edges), 1)

    # rows of `ranks` ranks, thrown into `width` places independently, meet in so many of them
    missing = np.maximum(1.0 - rows / (width * float(ranks)), 0.0)
    nobody = np.ones_like(missing)
    power = ranks
    while power:  # by multiplications alone: pow() is not the same everywhere
        if power & 1:
            nobody = nobody * missing
        missing = missing * missing
        power >>= 1
    union = np.minimum(np.rint(width * (1.0 - nobody)).astype(np.int64), rows)
    work = rows + (ranks - 1) * np.maximum(union, 1)
    if sizes is not None:
        work = work * np.maximum(np.add.reduceat(weights * sizes, starts) // rows, 1)

    done = np.concatenate([[0], np.cumsum(work)])
    result = []
    for rank in range(1, ranks):
        goal = int(done[-1]) * rank // ranks
        bin_ = int(np.searchsorted(done, goal, side="right")) - 1
        into = (goal - int(done[bin_])) * int(edges[bin_ + 1] - edges[bin_]) // int(work[bin_])
        result.append(int(edges[bin_]) + into)
    return result


class Ends(NamedTuple):
    """Of each table how many rows it has, its least index, and its greatest."""

    counts: list[int]
    lows: list[int]
    highs: list[int]


def laid(
    tables: Sequence[tuple[Tensor, Tensor]], op: Op, indices: Tensor, values: Tensor
) -> Ends | None:
    """Lay rows of tables of one kind one behind the other, those of one index as one.

    These are combined in the order in which they come, where the first of them is. The rows of a
    table come in no order that anybody may rely on.

    Args:
        tables: indices (int32 or int64, not empty) and values of each.
        op: how to combine.
        indices: int32 or int64, with room for all; to be filled from its beginning.
        values: uint8, likewise.

    Returns:
        Of each table how many rows are left, its least index, and its greatest. None: nothing was
        laid, for want of machine code, because other ways are quicker, or because an index does not
        fit into `indices`.

    Example:
        >>> from weft.kernels.ops import OPS
        >>> compiler.make(sums_key(torch.float32, OPS["sum"]))
        >>> rows = torch.tensor([3, 0, 3]), torch.tensor([1.0, 2.0, 4.0])
        >>> indices, values = torch.empty(3, dtype=torch.int32), torch.empty(12, dtype=torch.uint8)
        >>> laid([rows], OPS["sum"], indices, values)
        Ends(counts=[2], lows=[0], highs=[3])
        >>> indices[:2], values[:8].view(torch.float32)
        (tensor([3, 0], dtype=torch.int32), tensor([5., 2.]))
    """
    # what is the same for all of them, loops in C look at: `map`, `all` and `any`
    which, rows = zip(*tables, strict=True)
    key = sums_key(rows[0].dtype, op)
    loops = None if key is None else compiler.loops(key)
    counts = list(map(Tensor.numel, which))
    most = max(counts)
    if loops is None or key is None or most > _HASHED:
        return None
    if not all(map(Tensor.is_contiguous, which)):
        which = tuple(map(Tensor.contiguous, which))
    if any(map(Tensor.is_neg, rows)) or not all(map(Tensor.is_contiguous, rows)):
        rows = tuple(each.resolve_neg().contiguous() for each in rows)
    width, itemsize, size = math.prod(rows[0].shape[1:]), rows[0].itemsize, len(tables)
    told = array("q", map(Tensor.data_ptr, which))
    told.extend(counts)
    told.extend(map(_ITEMSIZE, which))
    told.extend(map(Tensor.data_ptr, rows))
    told.extend(map(int.bit_length, counts))
    ends = array("q", bytes(24 * size))
    at = ends.buffer_info()[0]
    places = torch.empty(4 << most.bit_length(), dtype=torch.int32)
    if loops["laid"](
        *(told.buffer_info()[0], size),
        *(width * itemsize if key[1] == "u8" else width, indices.itemsize == 8),
        *(indices.data_ptr(), values.data_ptr(), at, at + 8 * size, at + 16 * size),
        places.data_ptr(),
    ):
        return None
    found = ends.tolist()
    return Ends(found[:size], found[size : 2 * size], found[2 * size :])


class Spans(NamedTuple):
    """Where the rows of each table begin, of each rank, and where the last ones end.

    Attributes:
        counts: of each rank how many rows each table has.
        rows: of each rank, and then of all together, where they begin, counted in rows.
        bytes: the same in bytes of values.
        itemsizes: bytes of an index of each rank, which it lays as int32 if all are.
    """

    counts: list[list[int]]
    rows: list[list[int]]
    bytes: list[list[int]]
    itemsizes: list[int]


def spans(told: Longs, which: array[int]) -> Spans:
    """Where the rows of some tables lie that ranks have laid one behind the other.

    Args:
        told: `[ranks, tables, columns]`: how many rows, the greatest index, and anything else.
        which: of each table that lies there its number, and the bytes of a row.

    Example:
        >>> told = np.array([[[5, 9], [0, -1], [2, 3]], [[1, 9], [0, -1], [0, -1]]])
        >>> found = spans(told, array("q", (0, 8, 2, 4)))
        >>> found.counts, found.rows, found.itemsizes
        ([[5, 2], [1, 0]], [[0, 5, 7], [0, 1, 1], [0, 6, 8]], [4, 4])
        >>> found.bytes
        [[0, 40, 48], [0, 8, 8], [0, 48, 56]]
    """
    loops, (ranks, known, columns), tables = compiler.loops(KEY), told.shape, len(which) // 2
    each, all_of = ranks * tables, (ranks + 1) * (tables + 1)
    if loops is None:
        numbers, sizes = np.array(which, np.int64).reshape(-1, 2).T
        counts = told[:, numbers, 0]
        every = np.concatenate([counts, counts.sum(0, keepdims=True)])
        rows, nbytes = (
            [[0, *accumulate(row)] for row in (every * by).tolist()] for by in (1, sizes)
        )
        highs = told[:, numbers, 1].max(1, initial=-1).tolist()
        return Spans(counts.tolist(), rows, nbytes, [4 if high < 2**31 else 8 for high in highs])
    out = array("q", bytes(8 * (each + 2 * all_of + ranks)))
    loops["spans"](
        *(torch.from_numpy(told).data_ptr(), ranks, known, columns),
        *(which.buffer_info()[0], tables, out.buffer_info()[0]),
    )
    found = np.frombuffer(out, np.int64)
    rows, nbytes = found[each : each + 2 * all_of].reshape(2, ranks + 1, tables + 1).tolist()
    return Spans(
        found[:each].reshape(ranks, tables).tolist(),
        *(rows, nbytes),
        [4 if high < 2**31 else 8 for high in found[-ranks:].tolist()],
    )


class Place(NamedTuple):
    """Where a rank's rows of some tables lie in this process.

    Attributes:
        indices: the address of the first index.
        itemsize: bytes of an index, 4 or 8.
        values: the address of the first row.
    """

    indices: int
    itemsize: int
    values: int


class Sorted(NamedTuple):
    """Keys of some ranks' rows, in order, with where they come from.

    Attributes:
        words: key, rank and position in one number each, see `list_loops.sorted_keys`.
        many: how many.
        low, high: keys of a list are at least `low`, from which they count, and below `high`.
        position_bits, bits: of positions, and of ranks and positions.
    """

    words: Tensor
    many: int
    low: int
    high: int
    position_bits: int
    bits: int

    def before(self, key: int) -> int:
        """How many words there are of lesser keys."""
        if not self.low < key < self.high:
            return self.many if key >= self.high else 0
        words = self.words.numpy()[: self.many]
        return int(words.searchsorted((key - self.low) << self.bits))

    def distinct(self, first: int, last: int) -> int:
        """How many keys the words have from the first to before the last."""
        loops = compiler.loops(KEY)
        assert loops is not None  # by which the words were made
        return int(loops["distinct"](self.words.data_ptr(), first, last, self.bits))


def sorted_keys(
    places: Sequence[Place], rows: Sequence[Sequence[int]], starts: Longs, low: int, high: int
) -> Sorted | None:
    """Sort the keys of some tables of all ranks that are `low` to `high - 1`.

    Args:
        places: of each rank.
        rows: of each how many it has of each table.
        starts: where the tables begin in the space of keys; contiguous.
        low, high: keys.

    Returns:
        None where there is no machine code for it, or too many keys.
    """
    loops, ranks, tables = compiler.loops(KEY), len(rows), len(rows[0])
    totals = list(map(sum, rows))
    position_bits = max(1, max(totals).bit_length())
    bits, key_bits = position_bits + (ranks - 1).bit_length(), max(1, (high - low).bit_length())
    if loops is None or bits + key_bits > 63 or high <= low:
        return None
    room = sum(totals) + 1
    passes = -(-key_bits // _DIGIT)
    digit = -(-key_bits // passes)
    scratch = torch.empty(2 * room + (1 << digit) // 2, dtype=torch.int64)
    sources, at = array("q"), scratch.data_ptr()
    for place, own in zip(places, rows, strict=True):
        sources.extend((place.indices, place.itemsize, *own))
    begins = torch.from_numpy(starts).data_ptr()
    count = loops["sorted_keys"](
        *(sources.buffer_info()[0], ranks, tables, begins, low, high - low),
        *(position_bits, bits, digit, passes, at, at + 8 * room, at + 16 * room),
    )
    return Sorted(scratch, count, low, high, position_bits, bits)


def sums(
    keys: Sorted,
    first: int,
    last: int,
    bases: Sequence[int],
    op: Op,
    found: Tensor,
    out: Tensor,
    *,
    past: bool = False,
) -> int:
    """Add up the rows of some words, those of one kind, in the order of their keys.

    Each rank has a row of a key once; they are added in the order of ranks.

    Args:
        keys: what was sorted.
        first, last: words; other keys begin there.
        bases: where each rank's row of position 0 would lie.
        op: how to combine.
        found: int32 or int64, to be filled from its beginning with the keys.
        out: `[n, *row_shape]`, to be filled likewise, contiguous.
        past: this process is not going to read `out` soon, so that it need not come into its cache.

    Returns:
        How many keys there are.

    Raises:
        TypeError: there is no machine code for it, which `adds` tells.
    """
    key = sums_key(out.dtype, op)
    loops = None if key is None else compiler.loops(key)
    if loops is None or key is None:
        raise TypeError(f"no machine code adds rows of {out.dtype} here")
    width, where, at = math.prod(out.shape[1:]), array("q", bases), out.data_ptr()
    row = width * out.element_size()
    many: int = loops["sums"](
        *(keys.words.data_ptr(), first, last, keys.position_bits, keys.bits, keys.low),
        *(where.buffer_info()[0], row if key[1] == "u8" else width, found.element_size() == 8),
        *(past and whole_lines(at, row), found.data_ptr(), at),
    )
    return many


def adds(dtype: torch.dtype, op: Op) -> bool:
    """Whether `sums` adds rows of that dtype; once it does, it always will."""
    key = sums_key(dtype, op)
    return key is not None and compiler.loops(key) is not None


def sums_key(dtype: torch.dtype, op: Op) -> Key | None:
    """The set of loops for `laid` and `sums`; None: there is none for that."""
    key = value_key(dtype, dtype, op)
    if key is None or key[4] != key[2] or key[1] in ("f16", "bf16"):
        return None
    return ("owned", key[1], key[3])


def parted(keys: Tensor, starts: Longs, dtype: torch.dtype) -> tuple[Tensor, list[int]]:
    """The indices in their tables of sorted keys in the space of all, and where each table ends.

    Args:
        keys: int32 or int64, sorted, in the space.
        starts: where tables begin there, and its end; contiguous.
        dtype: of the indices, int32 or int64.

    Example:
        >>> parted(torch.tensor([0, 10, 11]), np.array([0, 10, 20]), torch.int32)
        (tensor([0, 0, 1], dtype=torch.int32), [1, 3])
    """
    loops = compiler.loops(KEY)
    if loops is None:
        ends = torch.searchsorted(keys, keys.new_tensor(starts[1:] - 1), right=True).tolist()
        counts = [high - low for low, high in pairwise([0, *ends])]
        shift = torch.from_numpy(np.repeat(starts[:-1], counts)).to(keys.dtype)
        return (keys - shift).to(dtype), ends
    out, found = torch.empty(keys.shape, dtype=dtype), array("q", bytes(8 * (len(starts) - 1)))
    kinds, begins = 16 * keys.itemsize + dtype.itemsize, torch.from_numpy(starts).data_ptr()
    loops["parted"](
        *(keys.data_ptr(), keys.numel(), kinds, begins, len(found)),
        *(out.data_ptr(), found.buffer_info()[0]),
    )
    return out, found.tolist()
