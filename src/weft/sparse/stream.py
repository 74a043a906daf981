"""Streams of rows between ranks: the parts that schedules are made of.

* `IndexLists`: sorted index lists whose length the receiver does not know. The first message has a
  fixed cap and says the length; what does not fit in it follows in one message of known size.
  `all_lists`: those of all ranks at all ranks.
* `send_rows` and `Inflow`: one rank's rows on their way to another, in chunks; `ToOwners`: all
  ranks' rows on their way to those that own them.
* `Ring`: everybody's rows on their way to everybody, each rank hearing its left neighbour and
  telling its right one. One stream into each host and one out of it share its link evenly, where
  streams between all pairs do not: measured at 4 hosts of 1 Gbit/s, 1.1 against 1.6 of the limit.
  Where links are as quick as memory, each rank tells all others directly.
* `share`: the sums of all owners of index ranges on their way to everybody.
* `merge_blocks`: merges own rows and inflows in rank order, block by block, while later
  chunks are still on the wire.

Chunks need no headers: once the index lists are known, so is every length. Lists, values and sums
go on channels of their own, so that each may be posted as soon as its own lengths are known.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Protocol

import torch
from torch import Tensor

from .. import kernels
from ..rows import Rows
from ..wire.base import SMALL, Lease, Pending, peers, typed
from . import codec
from .call import Call
from .cost import Load

HEAD = 128 << 10
"""Bytes of the first message of an index list."""

LISTS, VALUES, SUMS, FIRST = range(4)
"""The channels."""

_SLOTS = 8  # chunks that an inflow is ahead at the most
_WINDOW = 48 << 20  # bytes that all inflows of a rank are ahead, unless two chunks each are more


def window(load: Load) -> int:
    """Chunks that a peer's rows may be ahead of what is merged."""
    fair = _WINDOW // max(1, load.ranks - 1) // max(1, load.chunk)
    return max(2, min(_SLOTS, fair))


def list_messages(size: float) -> int:
    """Messages in which an index list of so many bytes travels."""
    return 1 if codec.PREFIX + size <= HEAD else 2


class IndexLists:
    """Index lists on their way: one to each of some peers, one from each of some peers."""

    def __init__(self, call: Call, lists: Mapping[int, Tensor], sources: Sequence[int]) -> None:
        self._wire, self._sources, self._dtype = call.wire, sources, call.wire_index
        self._last = call.load.places - 1
        self._most = codec.PREFIX + call.load.total * call.load.index  # bytes of any list
        self._leases: list[Lease] = []
        packed: dict[int, Tensor] = {}  # by the list's address: the same list to all, packed once
        for indices in lists.values():
            if id(indices) not in packed:
                self._leases.append(codec.pack(indices, self._wire.memory, gaps=call.load.gaps))
                packed[id(indices)] = self._leases[-1].tensor
        messages = [(peer, packed[id(indices)]) for peer, indices in lists.items()]
        self._heads = self._wire.post(
            [(peer, message[:HEAD]) for peer, message in messages],
            [(peer, HEAD) for peer in sources],
            SMALL,
        )
        rests = [(peer, message[HEAD:]) for peer, message in messages if len(message) > HEAD]
        self._sent = self._wire.post(rests, (), LISTS)

    def wait(self) -> dict[int, Tensor]:
        """The lists by peer; valid until `release()`. To be called before any other wait."""
        heads = dict(zip(self._sources, self._heads.wait(), strict=True))
        rests: dict[int, tuple[Tensor, Pending]] = {}
        for peer, head in heads.items():
            size = codec.bytes_of(head)
            if not codec.PREFIX <= size <= self._most:
                raise codec.damaged(self._wire, peer, f"{size} bytes are said to come")
            if size > HEAD:
                whole = self._room(size)
                whole[:HEAD] = head
                rests[peer] = whole, self._wire.post((), [(peer, whole[HEAD:])], LISTS)
        found = {}
        for peer in sorted(heads, key=rests.__contains__):  # read some while others still come
            message = heads[peer]
            if peer in rests:
                message, pending = rests[peer]
                pending.wait()
            found[peer] = codec.received(
                self._wire, peer, message, self._dtype, self._last, self._room
            )
        return found

    def _room(self, nbytes: int) -> Tensor:
        self._leases.append(self._wire.lease(nbytes))
        return self._leases[-1].tensor

    def release(self) -> None:
        """Wait until all own lists are sent, then give back the memory."""
        self._sent.wait()
        self._heads.release()
        for lease in self._leases:
            lease.release()


def all_lists(call: Call, indices: Tensor) -> tuple[list[Tensor], IndexLists]:
    """The index lists of all ranks, in rank order.

    Args:
        call: the call this is for.
        indices: this rank's, as on the wire.

    Returns:
        The lists, and what to release when they are not needed any more.
    """
    wire = call.wire
    lists = IndexLists(call, dict.fromkeys(peers(wire), indices), peers(wire))
    found = lists.wait() | {wire.rank: indices}
    return [found[rank] for rank in range(wire.size)], lists


class Source(Protocol):
    """Rows of one rank, to be read once, in order."""

    def pieces(self, start: int, stop: int) -> Iterator[Tensor]:
        """The values of rows `start` to `stop`, in one or several pieces."""


class Own:
    """This rank's own rows, as a source."""

    def __init__(self, values: Tensor) -> None:
        self._values = values

    def pieces(self, start: int, stop: int) -> Iterator[Tensor]:
        if stop > start:
            yield self._values[start:stop]


class Inflow:
    """A peer's rows on their way here, in chunks that are read where the wire has them.

    A chunk is given back when the rows behind it are asked for, and then the next is awaited. So no
    peer gets far ahead of the others, and the workspace is bounded.
    """

    def __init__(self, call: Call, peer: int, count: int) -> None:
        self._call, self._peer, self._count = call, peer, count
        self._step = call.chunk_rows
        self._chunks = -(-count // self._step) if call.load.row else 0
        self._ahead = window(call.load)
        self._posted: list[Pending] = []
        self._read = 0  # chunks that were given back
        self._post_until(self._ahead)

    def _post_until(self, chunk: int) -> None:
        for index in range(len(self._posted), min(chunk, self._chunks)):
            size = self._rows(index) * self._call.load.row
            self._posted.append(self._call.wire.post((), [(self._peer, size)], VALUES))

    def _rows(self, chunk: int) -> int:
        return min(self._step, self._count - chunk * self._step)

    def _give_back(self, until: int) -> None:
        for pending in self._posted[self._read : until]:
            pending.release()
        self._read = max(self._read, until)

    def pieces(self, start: int, stop: int) -> Iterator[Tensor]:
        shape, dtype = self._call.row_shape, self._call.dtype
        if not self._chunks:  # rows without bytes
            if stop > start:
                yield torch.empty((stop - start, *shape), dtype=dtype)
            return
        while start < stop:
            chunk = start // self._step
            self._give_back(chunk)
            self._post_until(chunk + self._ahead)
            memory = self._posted[chunk].wait()[0]
            first = start - chunk * self._step
            last = min(stop - chunk * self._step, self._step)
            yield typed(memory, (self._rows(chunk), *shape), dtype)[first:last]
            start = chunk * self._step + last

    def release(self) -> None:
        """Give back what is left; everything must have been read."""
        self._give_back(self._chunks)


def chunks(call: Call, values: Tensor) -> list[Tensor]:
    """Rows of values as the messages that they travel in; none if a row has no bytes."""
    step = call.chunk_rows
    count = values.shape[0] if call.load.row else 0
    if count <= step:
        rows = [values] * bool(count)
    else:
        rows = [values[start : start + step] for start in range(0, count, step)]
    return rows


def send_rows(call: Call, peer: int, values: Tensor) -> list[Pending]:
    """Post all of `values` to a peer, in chunks."""
    return [call.wire.post([(peer, chunk)], (), VALUES) for chunk in chunks(call, values)]


class ToOwners:
    """Rows on their way to the ranks that own them, and those that this rank owns on theirs here.

    Index sets go first, and enough values to keep the link busy behind them; `send_rest` sends the
    bulk, so that what the caller sends before that is not held up by it.

    Attributes:
        runs: the sorted indices of the rows that are owned here, by the rank they are of.
    """

    def __init__(
        self,
        call: Call,
        indices: Tensor,
        values: Tensor,
        part: Sequence[slice],
        owners: Sequence[int],
        sources: Sequence[int],
    ) -> None:
        """Send each other owner its part of the rows, indices as on the wire; hear `sources`."""
        self._call = call
        self._values = [values[each] for each in part]
        me, step = call.wire.rank, call.chunk_rows
        self._lists = IndexLists(call, {peer: indices[part[peer]] for peer in owners}, sources)
        self._lead = {peer: step * -(-len(self._values[peer]) // (4 * step)) for peer in owners}
        self._sent: list[Pending] = []
        for peer, lead in self._lead.items():
            self._sent += send_rows(call, peer, self._values[peer][:lead])
        self.runs = self._lists.wait() | {me: indices[part[me]]}
        self._inflows = {peer: Inflow(call, peer, self.runs[peer].numel()) for peer in sources}

    def send_rest(self) -> None:
        """Send all values that are not under way yet."""
        for peer, lead in self._lead.items():
            self._sent += send_rows(self._call, peer, self._values[peer][lead:])

    def source(self, rank: int) -> Source:
        """The values that belong to `runs[rank]`."""
        return self._inflows.get(rank) or Own(self._values[rank])

    def finish(self) -> None:
        """Wait until all is sent, and give back the memory; everything must have been read."""
        for pending in self._sent:
            pending.wait()
        self._lists.release()
        for inflow in self._inflows.values():
            inflow.release()


class Ring:
    """Everybody's rows on their way to everybody, in chunks: round the ring of ranks, or directly.

    Round the ring, first comes what the left neighbour has itself, then what its left neighbour
    has, and so on; a chunk goes on to the right as soon as it is here, behind what was sent before.
    Directly, each rank sends its chunks to all others, in one message where the wire can do that:
    that takes fewer copies, and is for links that are about as quick as memory (`Load.direct`).
    """

    def __init__(self, call: Call, memory: Mapping[int, Tensor], channel: int) -> None:
        """Post the receives: into `memory[origin]`, which has exactly origin's rows."""
        self._call, self._channel = call, channel
        self._step = call.chunk_rows
        wire = call.wire
        left, self._right = (wire.rank - 1) % wire.size, (wire.rank + 1) % wire.size
        self._direct = call.load.direct
        self._to = peers(wire) if self._direct else [self._right][: wire.size - 1]
        self._coming: list[tuple[int, Tensor, Pending]] = []
        self._first: dict[int, int] = {}  # of each origin, the number of its first chunk
        self._here = 0  # chunks that have come, and gone on
        self._sent: list[Pending] = []
        for distance in range(1, wire.size):
            origin = (wire.rank - distance) % wire.size
            source = origin if self._direct else left
            self._first[origin] = len(self._coming)
            for chunk in chunks(call, memory[origin]):
                pending = wire.post((), [(source, chunk)], channel)
                self._coming.append((origin, chunk, pending))

    def send(self, values: Tensor) -> None:
        """Send rows of this rank's own; all but the last piece a multiple of a chunk."""
        for chunk in chunks(self._call, values):
            self._send(chunk)

    def _send(self, chunk: Tensor) -> None:
        sends = [(peer, chunk) for peer in self._to]
        self._sent.append(self._call.wire.post(sends, (), self._channel))

    def come(self, origin: int, rows: int) -> None:
        """Wait until so many of an origin's rows are here."""
        if not self._call.load.row:
            return
        first = self._first[origin]
        last = first + -(-rows // self._step)
        if self._direct:
            for _, _, pending in self._coming[first:last]:
                pending.wait()
        else:
            self._advance(last)

    def _advance(self, count: int) -> None:
        for origin, chunk, pending in self._coming[self._here : count]:
            pending.wait()
            if not self._direct and origin != self._right:
                self._send(chunk)
        self._here = max(self._here, count)

    def finish(self) -> None:
        """Wait until everything is here, and sent on."""
        self._advance(len(self._coming))
        for pending in self._sent:
            pending.wait()


class FromRing:
    """One origin's rows in a ring, as a source."""

    def __init__(self, ring: Ring, origin: int, values: Tensor) -> None:
        self._ring, self._origin, self._values = ring, origin, values

    def pieces(self, start: int, stop: int) -> Iterator[Tensor]:
        if stop > start:
            self._ring.come(self._origin, stop)
            yield self._values[start:stop]


def share(call: Call, summed: Sequence[Tensor]) -> tuple[Rows, Tensor, Ring]:
    """The result, as far as the indices that each rank sums, in rank order, say it.

    Returns:
        The result, whose indices are there; the part of its values that this rank sums; and the
        ring that brings the others' sums to their places, and takes this rank's once sent.
    """
    offsets = [0, *accumulate(indices.numel() for indices in summed)]
    result = call.result(offsets[-1])
    place = [slice(a, b) for a, b in pairwise(offsets)]
    for part, indices in zip(place, summed, strict=True):
        result.indices[part] = indices
    values = {rank: result.values[part] for rank, part in enumerate(place)}
    return result, values[call.wire.rank], Ring(call, values, SUMS)


def merge_blocks(
    call: Call,
    runs: Sequence[Tensor],
    sources: Sequence[Source],
    union: kernels.Union,
    out: Tensor,
) -> Iterator[tuple[int, int]]:
    """Merge runs in the given order into `out`; yields each block (start, stop) when it is final.

    Args:
        call: the call this is for.
        runs: the sorted indices of each source.
        sources: where their values come from.
        union: what `kernels.union(runs)` said.
        out: `[U, *row_shape]` in the dtype of the result.
    """
    step, total = call.chunk_rows, union.indices.numel()
    starts = range(0, total, step)
    if len(starts) == 1:
        bounds = [[0, run.numel()] for run in runs]
    else:
        first_keys = union.indices[torch.arange(0, total, step)]
        bounds = [[*torch.searchsorted(run, first_keys).tolist(), run.numel()] for run in runs]
    direct = call.partial == call.dtype
    with call.wire.lease(0 if direct else step * call.load.partial) as memory:
        for block, start in enumerate(starts):
            stop = min(start + step, total)
            final = out[start:stop]
            sums = final if direct else typed(memory, tuple(final.shape), call.partial)
            for run, source in enumerate(sources):
                row, last = bounds[run][block], bounds[run][block + 1]
                for piece in source.pieces(row, last):
                    end = row + piece.shape[0]
                    kernels.combine(sums, union.slots[run][row:end], piece, call.op, start)
                    row = end
            call.finish(sums, final)
            yield start, stop
