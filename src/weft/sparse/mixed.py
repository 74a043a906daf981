"""gather and split for rows of several shapes and dtypes at once: as few messages as for one.

`coalesced` gives the tables of a call one space of keys, in which tables of one shape and dtype are
neighbours: a *stack*. Rows travel as the bytes of all stacks, one behind the other. Stacks come in
falling order of their element sizes, so every row is aligned wherever such bytes begin, and nothing
is padded. Index lists, rings and merges are those of `gather` and `split`, which see.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from .. import kernels
from ..wire.base import Pending
from ..wire.memory import fresh, typed
from .call import Call, row_bytes
from .stream import SUMS, VALUES, IndexLists, Own, Ring, Source, chunks, merge_blocks, send_rows

__all__ = ["NAMES", "Extents", "Merge", "Stack", "Stacked", "gather", "split", "widened"]


NAMES = ("gather", "split")
"""The algorithms that are here."""


@dataclass(frozen=True, slots=True)
class Stack:
    """Tables of one row shape and dtype.

    Attributes:
        dtype: of the values, as they travel.
        row_shape: shape of a row.
        end: keys of the stack lie below this, and not below the end of the stack before.
        wide: dtype of the caller's values where they travel rounded, else None.
    """

    dtype: torch.dtype
    row_shape: tuple[int, ...]
    end: int
    wide: torch.dtype | None = None

    @property
    def given(self) -> Stack:
        """The same of values as the caller gave them, and gets them."""
        return self if self.wide is None else dataclasses.replace(self, dtype=self.wide, wide=None)

    @property
    def row(self) -> int:
        """Bytes of a row's values."""
        return row_bytes(self.row_shape, self.dtype)

    def typed(self, memory: Tensor, count: int, offset: int) -> Tensor:
        """So many rows of the stack in the bytes of `memory` from `offset` on."""
        shape = (count, *self.row_shape)
        if count == 0:  # nothing has its place anywhere, aligned or not
            return torch.empty(shape, dtype=self.dtype)
        return typed(memory, shape, self.dtype, offset)


@dataclass(frozen=True, slots=True)
class Stacked:
    """Rows of several stacks.

    Attributes:
        keys: sorted and unique.
        values: their rows, uint8, 1-D.
        begins: where in there those of some tables begin, by their places in the space of keys;
            those of others lie behind the table's before.
    """

    keys: Tensor
    values: Tensor
    begins: Mapping[int, int] = field(default_factory=dict)


class Extents:
    """Where the rows of each stack lie among sorted keys, and their bytes in a stream of rows."""

    def __init__(self, keys: Tensor, stacks: Sequence[Stack]) -> None:
        if len(stacks) == 1:
            count, size = keys.numel(), stacks[0].row
            self.rows, self._sizes, self.bytes = [0, count], [size], [0, count * size]
            return
        ends = keys.new_tensor([stack.end - 1 for stack in stacks])
        self.rows = [0, *torch.searchsorted(keys, ends, right=True).tolist()]
        counts = [high - low for low, high in pairwise(self.rows)]
        self._sizes = [stack.row for stack in stacks]
        self.bytes = [
            0, *accumulate(n * size for n, size in zip(counts, self._sizes, strict=True))
        ]  # fmt: skip

    def at(self, row: int) -> int:
        """The byte at which a row begins."""
        for (low, high), start, size in zip(
            pairwise(self.rows), self.bytes, self._sizes, strict=False
        ):
            if row < high:
                return start + (row - low) * size
        return self.bytes[-1]


class _Coming:
    """The part of a byte stream that is a stack's rows, as a source of a merge."""

    def __init__(self, come: Callable[[int], None], start: int, values: Tensor, row: int) -> None:
        self._come, self._start, self._values, self._row = come, start, values, row

    def pieces(self, start: int, stop: int) -> Iterator[Tensor]:
        if stop > start:
            self._come(self._start + stop * self._row)
            yield self._values[start:stop]


class _Inbound:
    """Bytes of one peer on their way here, in chunks."""

    def __init__(self, call: Call, peer: int, memory: Tensor) -> None:
        self._step = call.chunk_rows
        self._coming: list[Pending] = [
            call.wire.post((), [(peer, chunk)], VALUES) for chunk in chunks(call, memory)
        ]
        self._here = 0

    def come(self, nbytes: int) -> None:
        """Wait until so many are here."""
        last = -(-nbytes // self._step)
        for pending in self._coming[self._here : last]:
            pending.wait()
        self._here = max(self._here, last)


def gather(rows: Stacked, call: Call, stacks: Sequence[Stack]) -> Stacked:
    """All rows of all ranks go round the ring; everybody merges them all."""
    wire, order = call.wire, range(call.wire.size)
    lists = IndexLists(call, dict.fromkeys(wire.peers, rows.keys), wire.peers)
    found = lists.wait() | {wire.rank: rows.keys}
    runs = [found[rank] for rank in order]
    extents = [Extents(run, stacks) for run in runs]
    as_bytes = _of_bytes(call, stacks)
    sizes = [extent.bytes[-1] * (rank != wire.rank) for rank, extent in enumerate(extents)]
    starts = [0, *accumulate(-(-size // 8) * 8 for size in sizes)]
    with wire.lease(starts[-1]) as memory:
        streams = [memory[start : start + size] for start, size in zip(starts, sizes, strict=False)]
        ring = Ring(as_bytes, dict(enumerate(streams)), VALUES)
        ring.send(rows.values)
        merge = Merge(call, stacks, runs, extents)
        values = fresh((merge.extents.bytes[-1],), torch.uint8)
        streams[wire.rank] = rows.values

        def comes(rank: int) -> Callable[[int], None] | None:
            return None if rank == wire.rank else lambda nbytes: ring.come(rank, nbytes)

        for _ in merge.into(values, streams, [comes(rank) for rank in order]):
            pass
        ring.finish()
    result = Stacked(merge.keys, values)
    lists.release()
    return result


def split(rows: Stacked, call: Call, stacks: Sequence[Stack], cuts: Sequence[int]) -> Stacked:
    """The owner of a range of keys, from one cut to the next, sums it, then shares the sums."""
    wire, me, peers = call.wire, call.wire.rank, call.wire.peers
    order = range(wire.size)
    as_bytes, own = _of_bytes(call, stacks), Extents(rows.keys, stacks)
    ends = torch.searchsorted(rows.keys, rows.keys.new_tensor(cuts)).tolist()
    part = [slice(low, high) for low, high in pairwise([0, *ends, rows.keys.numel()])]
    spans = [slice(own.at(each.start), own.at(each.stop)) for each in part]

    # keys to their owners, and all values behind them
    lists = IndexLists(call, {peer: rows.keys[part[peer]] for peer in peers}, peers)
    sent = [
        pending for peer in peers for pending in send_rows(as_bytes, peer, rows.values[spans[peer]])
    ]
    found = lists.wait() | {me: rows.keys[part[me]]}
    runs = [found[rank] for rank in order]
    extents = [Extents(run, stacks) for run in runs]
    sizes = [extent.bytes[-1] * (rank != me) for rank, extent in enumerate(extents)]
    starts = [0, *accumulate(-(-size // 8) * 8 for size in sizes)]
    with wire.lease(starts[-1]) as memory:
        streams = [memory[start : start + size] for start, size in zip(starts, sizes, strict=False)]
        inbound = {peer: _Inbound(as_bytes, peer, streams[peer]) for peer in peers}
        merge = Merge(call, stacks, runs, extents)
        sums = IndexLists(call, dict.fromkeys(peers, merge.keys), peers)

        # now everybody knows the result's keys, and the place of every owner's sums in it
        summed = sums.wait() | {me: merge.keys}
        offsets = [0, *accumulate(Extents(summed[r], stacks).bytes[-1] for r in order)]
        values = fresh((offsets[-1],), torch.uint8)
        place = [values[low:high] for low, high in pairwise(offsets)]
        ring = Ring(as_bytes, dict(enumerate(place)), SUMS)
        streams[me] = rows.values[spans[me]]
        comes = [inbound[rank].come if rank != me else None for rank in order]
        done, step = 0, as_bytes.chunk_rows
        for end in merge.into(place[me], streams, comes):
            whole = end // step * step
            ring.send(place[me][done:whole])
            done = max(done, whole)
        ring.send(place[me][done:])
        ring.finish()
        for pending in sent:
            pending.wait()
    keys = torch.cat([summed[rank] for rank in order])
    lists.release()
    sums.release()
    return Stacked(keys, values)


def _of_bytes(call: Call, stacks: Sequence[Stack]) -> Call:
    """The same call about rows of one byte; which may be those of numbers of one dtype."""
    plain = copy.copy(call)
    plain.row_shape, plain.dtype = (), torch.uint8
    plain.load = dataclasses.replace(call.load, row=1)
    dtype = stacks[0].dtype
    if all(stack.dtype == dtype for stack in stacks) and plain.chunk_rows % dtype.itemsize == 0:
        plain.carried = dtype
    return plain


class Merge:
    """The merge of several runs of rows, stack by stack.

    Attributes:
        stacks: of rows of one kind.
        unions: of each stack, of the keys of all runs.
        keys: of the result.
        extents: of the result.
    """

    def __init__(
        self,
        call: Call,
        stacks: Sequence[Stack],
        runs: Sequence[Tensor],
        extents: Sequence[Extents],
    ) -> None:
        self._call, self.stacks, self._extents = call, stacks, extents
        self._runs = [
            [
                run[slice(*extent.rows[stack : stack + 2])]
                for run, extent in zip(runs, extents, strict=True)
            ]
            for stack in range(len(stacks))
        ]
        self.unions = [kernels.union(parts) for parts in self._runs]
        self.keys = torch.cat([union.indices for union in self.unions])
        self.extents = Extents(self.keys, stacks)

    def into(
        self,
        out: Tensor,
        streams: Sequence[Tensor],
        comes: Sequence[Callable[[int], None] | None],
    ) -> Iterator[int]:
        """Merge the streams of all ranks into `out`; yields how many of its bytes are final."""
        for number, stack in enumerate(self.stacks):
            call = copy.copy(self._call)
            call.row_shape, call.dtype, call.wide = stack.row_shape, stack.dtype, stack.wide
            partial = row_bytes(stack.row_shape, call.partial)
            call.load = dataclasses.replace(self._call.load, row=stack.row, partial=partial)
            sources: list[Source] = []
            for stream, come, extent, run in zip(
                streams, comes, self._extents, self._runs[number], strict=True
            ):
                start = extent.bytes[number]
                values = stack.typed(stream, run.numel(), start)
                sources.append(
                    Own(values) if come is None else _Coming(come, start, values, stack.row)
                )
            union, begin = self.unions[number], self.extents.bytes[number]
            into = stack.typed(out, union.indices.numel(), begin)
            for _, stop in merge_blocks(call, self._runs[number], sources, union, into):
                yield begin + stop * stack.row


def widened(narrow: Stacked, stacks: Sequence[Stack]) -> Stacked:
    """A result with its values in the dtypes of the callers'."""
    given = [stack.given for stack in stacks]
    if all(stack.wide is None for stack in stacks):
        return narrow
    come, go = Extents(narrow.keys, stacks), Extents(narrow.keys, given)
    values = fresh((go.bytes[-1],), torch.uint8)
    counts = [high - low for low, high in pairwise(come.rows)]
    for old, new, count, start, into in zip(
        stacks, given, counts, come.bytes, go.bytes, strict=False
    ):
        new.typed(values, count, into).copy_(old.typed(narrow.values, count, start))
    return Stacked(narrow.keys, values)
