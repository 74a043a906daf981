"""Streams of rows between ranks: the parts that schedules are made of.

* `IndexLists`: sorted index lists, whose length the receiver does not know.
  `send_list_to_all`: the lists of all ranks, on all ranks.
* `Inflow`: rows from one rank to another, in chunks.
* `Ring`: an all-gather of rows, from each left neighbour to its right one. Each host then has one
  stream in and one out, which share its link evenly; streams between all pairs do not. Measured
  at 4 hosts of 1 Gbit/s: 1.1 times the limit, against 1.6. `Sizes.sends_directly` says where each
  rank sends to all others instead.
* `Share`: one result for the sums of all owners of index ranges.
* `merge_blocks`: merges own rows and inflows in rank order, block by block, while later chunks are
  still on the wire.

Chunks need no headers: the index lists tell every length. Lists, values and sums have separate
channels, so each can be posted as soon as its own lengths are known.

To make one of these objects sends nothing. `start` posts what can be posted then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, zip_longest
from typing import Self, TypeVar

import torch
from torch import Tensor

from .. import kernels
from ..base.memory import typed
from ..group.channels import LISTS, SUMS, VALUES
from ..group.group import Group
from ..group.pending import Pending
from ..kernels.ops import Op
from ..wire.interface import Lease
from . import codec
from .call import Call
from .rows import Rows

T = TypeVar("T")

Source = Callable[[int, int], Iterable[Tensor]]
"""Given two row numbers, yields the values of a rank's rows between them, in pieces. Calls must be
in the order of the rows."""


def source_of(values: Tensor) -> Source:
    """A source of rows that are there."""
    return lambda start, stop: (values[start:stop],)


_SLOTS = 8  # chunks that one inflow has posted ahead, at most
_WINDOW = 48 << 20  # bytes that all inflows of a rank have posted ahead, at least 2 chunks each


class IndexLists:
    """Index lists, one to each of some peers, one from each of some peers: `start`, then `wait`.

    Each is a message, which may be packed (`codec`), of whatever length it turns out to have.
    """

    def __init__(
        self,
        call: Call,
        lists: Mapping[int, Tensor],
        sources: Sequence[int],
    ) -> None:
        """
        Args:
            call: the call this is for.
            lists: what to send, by peer, and this rank's own, which stays.
            sources: the peers that send a list to this rank.
        """
        self._call = call
        self._lists = lists
        self._sources = sources
        self._leases: list[Lease] = []

    def start(self) -> Self:
        """Post all lists, those that are sent and those that come."""
        peers = [peer for peer in self._lists if peer != self._call.group.rank]
        # a list that goes to several peers is packed once, and sent as one tensor
        different = {id(self._lists[peer]): self._lists[peer] for peer in peers}
        packed = {key: self._packed(indices) for key, indices in different.items()}
        sends = [(peer, packed[id(self._lists[peer])]) for peer in peers]
        # no list has more bytes: `total` counts the rows of all ranks of the call, also in a step
        most = codec.PREFIX + self._call.header.total * self._call.sizes.index
        recvs = [(peer, most) for peer in self._sources]
        self._pending = self._call.group.post(sends, recvs, LISTS)
        return self

    def _packed(self, indices: Tensor) -> Tensor:
        lease = codec.pack(indices, self._call.group.memory, gaps=self._call.sizes.gaps)
        self._leases.append(lease)
        return lease.tensor

    def wait(self) -> dict[int, Tensor]:
        """The lists for this rank, in the order of the ranks that have made them; its own, too.

        Valid until `release()`. To be called before any other wait.
        """
        rank = self._call.group.rank
        lists = {rank: self._lists[rank]}
        for peer, message in zip(self._sources, self._pending.wait(), strict=True):
            lists[peer] = self._unpacked(peer, message)
        return dict(sorted(lists.items()))

    def _unpacked(self, peer: int, message: Tensor) -> Tensor:
        call = self._call
        given = message, call.wire_index, call.sizes.end - 1, self._room
        return call.group.decode(peer, "an index list", codec.unpack, *given)

    def _room(self, nbytes: int) -> Tensor:
        self._leases.append(self._call.group.lease(nbytes))
        return self._leases[-1].tensor

    def release(self) -> None:
        """Give back the memory, once all has been sent and received."""
        self._pending.release()
        for lease in self._leases:
            lease.release()


def send_list_to_all(call: Call, indices: Tensor) -> IndexLists:
    """Begin to send this rank's index list to all others, and to receive theirs; collective.

    Args:
        call: the call this is for.
        indices: this rank's list, in the dtype `call.wire_index`.
    """
    group = call.group
    lists = dict.fromkeys([*group.peers, group.rank], indices)
    return IndexLists(call, lists, group.peers).start()


def check_lengths(call: Call, lists: Sequence[Tensor], counts: Sequence[int]) -> None:
    """Raise WireError unless each rank's list is as long as its header said."""
    for peer, (indices, count) in enumerate(zip(lists, counts, strict=True)):
        sent = indices.numel()
        if sent != count:
            name = call.group.rank_in_errors(peer)
            raise call.group.fail(peer, f"rank {name} sent {sent} indices of {count} rows")


class Inflow:
    """Rows that a peer sends here in chunks, which are read in the wire's own memory.

    When the rows behind a chunk are asked for, the chunk is released and one more receive posted.
    So no peer gets far ahead of the others, and the workspace is bounded.
    """

    def __init__(self, call: Call, peer: int, count: int) -> None:
        self._call = call
        self._peer = peer
        self._to_post = count if call.sizes.row else 0  # rows without bytes are not sent
        self._posted: deque[tuple[int, Pending]] = deque()
        self._reading: Pending | None = None
        self._chunk = torch.empty(0)  # that is read
        self._end = 0  # the row behind it

    def start(self) -> Self:
        """Post the receives of the first chunks."""
        sizes = self._call.sizes
        fair = _WINDOW // max(1, sizes.ranks - 1) // max(1, sizes.chunk)
        ahead = max(2, min(_SLOTS, fair))
        while self._to_post and len(self._posted) < ahead:
            self._post()
        return self

    def _post(self) -> None:
        if count := min(self._call.chunk_rows, self._to_post):
            size = count * self._call.sizes.row
            self._posted.append((count, self._call.group.post((), [(self._peer, size)], VALUES)))
            self._to_post -= count

    def _next(self) -> None:
        if self._reading is not None:
            self._reading.release()
            self._post()
        count, self._reading = self._posted.popleft()
        memory = self._reading.wait()[0]
        self._chunk = typed(memory, (count, *self._call.row_shape), self._call.dtype)
        self._end += count

    def pieces(self, start: int, stop: int) -> Iterator[Tensor]:
        """The `Source`: each piece is valid until the next one is asked for."""
        while start < stop:
            if start == self._end:
                self._next()
            first = self._end - self._chunk.shape[0]
            last = min(stop, self._end)
            yield self._chunk[start - first : last - first]
            start = last

    def release(self) -> None:
        """Release the chunk that was read last."""
        if self._reading is not None:
            self._reading.release()


def wait_all(some: Iterable[Pending]) -> None:
    """Wait until all of these are done."""
    for pending in some:
        pending.wait()


def chunks(call: Call, values: Tensor) -> Sequence[Tensor]:
    """Values cut into the messages in which they are sent; none if a row has no bytes."""
    if not values.numel():
        return ()
    rows = values.shape[0]
    step = max(1, call.sizes.chunk // (values.nbytes // rows))
    return (values,) if rows <= step else torch.split(values, step)


def left_of(group: Group) -> int:
    """The rank that this one hears, round the ring."""
    return (group.rank - 1) % group.size


def right_of(group: Group) -> int:
    """The rank that this one tells, round the ring."""
    return (group.rank + 1) % group.size


class Ring:
    """An all-gather of rows in chunks: round the ring of ranks, or directly.

    Round the ring: the left neighbour sends its own rows first, then those of its left neighbour,
    and so on. A rank sends each chunk on to the right as soon as it has received it. Directly
    (`Sizes.sends_directly`): each rank sends its chunks to all others, and waits for the n-th
    chunks of all together. That takes fewer copies, and no hop of a ring waits.
    """

    def __init__(
        self,
        call: Call,
        memory: Sequence[Tensor],
        channel: int,
        nbytes: float,
    ) -> None:
        """
        Args:
            call: the call this is for.
            memory: for each rank, where its rows belong.
            channel: on which they travel.
            nbytes: of the average rank's rows; the same number on every rank.
        """
        group = call.group
        self._call = call
        self._memory = memory
        self._channel = channel
        self._direct = call.sizes.sends_directly(nbytes)
        self._right = right_of(group)
        self._to = group.peers if self._direct else [self._right][: group.size - 1]
        self._here = [0] * group.size  # rows of each origin that were received
        self._sent: list[Pending] = []
        # posts in order: whose chunks each receives, and into which memory
        self._posted: deque[tuple[list[tuple[int, Tensor]], Pending]] = deque()

    def start(self) -> Self:
        """Post the receives of all chunks, in the order in which these come."""
        group = self._call.group
        origins = [(group.rank - distance) % group.size for distance in range(1, group.size)]
        flows = [
            [(origin, chunk) for chunk in chunks(self._call, self._memory[origin])]
            for origin in origins
        ]
        if self._direct:  # the n-th chunks of all together, each from its origin
            for chunk_of_each in zip_longest(*flows):
                some = [chunk for chunk in chunk_of_each if chunk is not None]
                self._posted.append((some, group.post((), some, self._channel)))
        else:
            for origin, chunk in chain(*flows):
                pending = group.post((), [(left_of(group), chunk)], self._channel)
                self._posted.append(([(origin, chunk)], pending))
        return self

    def send(self, values: Tensor) -> None:
        """Send the next rows of this rank's own: all but the last ones a multiple of a chunk."""
        for chunk in chunks(self._call, values):
            self._send(chunk)

    def _send(self, chunk: Tensor) -> None:
        sends = [(peer, chunk) for peer in self._to]
        self._sent.append(self._call.group.post(sends, (), self._channel))

    def source(self, origin: int) -> Source:
        """A source of the rows of one rank, which waits for them when they are asked for."""

        def pieces(start: int, stop: int) -> Iterator[Tensor]:
            while self._here[origin] < stop and self._posted:
                self._next()
            yield self._memory[origin][start:stop]

        return pieces

    def _next(self) -> None:
        some, pending = self._posted.popleft()
        pending.wait()
        for origin, chunk in some:
            if not self._direct and origin != self._right:
                self._send(chunk)
            self._here[origin] += chunk.shape[0]

    def finish(self) -> None:
        """Wait until all rows are received and sent on."""
        while self._posted:
            self._next()
        wait_all(self._sent)


class Share:
    """What each rank of a group sums, on all of its ranks: an all-gather of sums in chunks."""

    def __init__(self, call: Call, among: Call | None = None) -> None:
        """
        Args:
            call: makes the result: all ranks' sums, one after the other.
            among: the same call for the ranks that share, if they are not all.
        """
        self._call = call
        self._among = among or call

    def send_list(self, indices: Tensor) -> None:
        """Send the list of what this rank sums to the others, and begin to receive theirs.

        Args:
            indices: the list, in the dtype `call.wire_index`.
        """
        self._lists = send_list_to_all(self._among, indices)

    def start(self) -> Tensor:
        """Wait for the lists of the others, and begin to receive their sums; where this rank's
        belong in the result."""
        lists = self._lists.wait().values()
        self._result = self._call.result_at(*lists)
        parts = torch.split(self._result.values, [len(each) for each in lists])
        self._mine = parts[self._among.group.rank]
        self._sent = 0  # of this rank's sums
        nbytes = self._result.values.nbytes / len(parts)
        self._ring = Ring(self._among, parts, SUMS, nbytes).start()
        return self._mine

    def allocate(self, indices: Tensor) -> Rows:
        """Where sums with these indices, which are all of this rank's, belong in the result."""
        self.send_list(indices)
        return Rows(indices, self.start(), self._call.height)

    def send(self, stop: int) -> None:
        """Send this rank's sums before `stop` that were not sent: they do not change any more."""
        if stop < len(self._mine):
            stop -= stop % self._among.chunk_rows  # chunks are full, but the last
        if stop > self._sent:
            self._ring.send(self._mine[self._sent : stop])
            self._sent = stop

    def finish(self) -> Rows:
        """Send what is left, wait until all is received and sent, and give back the memory of the
        lists; the result."""
        self.send(len(self._mine))
        self._ring.finish()
        self._lists.release()
        return self._result


PlacedRun = tuple[Tensor, Source, Sequence[int]]
"""The slots of some rows in a result, their values, and the first row of each block."""


def combine_block(sums: Tensor, runs: Iterable[PlacedRun], block: int, start: int, op: Op) -> None:
    """Combine the rows of runs, in their order, that belong in a block of the result.

    Args:
        sums: of the block.
        runs: from which its rows come.
        block: its number.
        start: its first row in the result.
        op: how to combine.
    """
    for slots, source, bounds in runs:
        row, last = bounds[block : block + 2]
        for piece in source(row, last) if row < last else ():
            end = row + piece.shape[0]
            kernels.combine(sums, slots[row:end], piece, op, start)
            row = end


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
        union: of the runs.
        out: `[U, *row_shape]` in the dtype of the result.
    """
    step = call.chunk_rows
    total = union.indices.numel()
    if not call.sizes.row:  # rows without bytes are not sent
        yield 0, total
        return
    starts = range(0, total, step)
    if len(starts) == 1:
        bounds = [[0, run.numel()] for run in runs]
    else:
        first_keys = union.indices[torch.arange(0, total, step)]
        bounds = [[*torch.searchsorted(run, first_keys).tolist(), run.numel()] for run in runs]
    direct = call.partial_dtype == call.dtype
    placed = [*zip(union.slots, sources, bounds, strict=True)]
    with call.group.lease(0 if direct else min(step, total) * call.sizes.partial_row) as memory:
        for block, start in enumerate(starts):
            stop = min(start + step, total)
            sums = final = out[start:stop]
            if not direct:
                sums = typed(memory, (stop - start, *call.row_shape), call.partial_dtype)
            combine_block(sums, placed, block, start, call.op)
            call.finish(sums, final)
            yield start, stop
