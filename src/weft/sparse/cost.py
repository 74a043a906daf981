"""What a call will cost: from the sizes of this call and the figures of this network.

`Load` is what the headers say, `weft.wire.link.Link` what the network is like. Each algorithm
computes its `Cost` from the load, beside its schedule; a test holds it against what is sent.

The bound: an index that m ranks hold needs m-1 messages to combine its rows at one of its holders
and P-1 to deliver the sum, so the average rank must receive at least [K + (P-2)·U] / P rows.

Bytes, here and in the bound, are those of rows and indices as `last_call` counts them. Where
numbers are packed on their way (`weft.wire.pieces`), time is computed from what is left of them.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

from ..kernels import floats
from ..kernels.meter import CALL, PLACE
from ..wire import pieces
from ..wire.hosts import Hosts
from ..wire.link import Link
from . import codec

__all__ = ["UNEVEN", "Cost", "Load"]

UNEVEN = 0.08
"""Of the bytes: streams between all pairs share links unevenly, and a ring waits for the last."""

_CARRY = 16  # at least: bytes merged while the other ranks of a core send and receive one
_CHUNKED = 0.3  # of its time: a stream of chunks keeps a core busy for longer than one message does
_SLOT = 4  # bytes that say where in a union an index belongs
_PACKING = 10  # bytes merged while numbers are packed, and read, so that they take a byte less


_PLACING = {"ranks", "total", "union"}  # what `Load._places` comes of


@dataclass(frozen=True)
class Load:
    """The sizes of one call, the same on every rank.

    Attributes:
        ranks: P.
        total: K, rows of all ranks, each rank's duplicates removed.
        most: rows of the rank with most.
        fewest: rows of the rank with fewest.
        union: U, rows of the result; an estimate.
        height: rows of the dense tensor, or None if nothing is known of it.
        row: bytes of a row's values.
        partial: bytes of a row's values while only some ranks' are added.
        kind: of the numbers in a row's values, one of `weft.wire.pieces.KINDS`; "" for others.
        partial_kind: of those while only some ranks' are added.
        index: bytes of an index on the wire, 4 or 8.
        chunk: bytes of values sent at a time.
        places: indices lie below this.
        gaps: index lists are written as gaps, in few bits.
        in_order: only neighbouring ranks' rows may be combined (op is a caller's function).
        identical: all ranks certainly have the same index set.
        hosts: which ranks share a host; None is one host for each.
        link: the network's figures, where they are known.
        packs: numbers of these kinds travel in fewer bytes.
    """

    ranks: int
    total: int
    most: int
    fewest: int
    union: int
    height: int | None
    row: int
    partial: int
    index: int
    chunk: int = 1 << 18
    places: int = 0
    gaps: bool = False
    in_order: bool = False
    identical: bool = False
    hosts: Hosts | None = None
    link: Link | None = None
    kind: str = ""
    partial_kind: str = ""
    packs: bool = False

    @property
    def mean(self) -> float:
        """k̄, rows of the average rank."""
        return self.total / self.ranks

    @property
    def bound(self) -> float:
        """Bytes that the average rank must receive, an index counted as 4."""
        return (self.total + (self.ranks - 2) * self.union) / self.ranks * (self.row + 4)

    @property
    def bound_to_one(self) -> float:
        """The same, where each row of the result is wanted on one rank only."""
        return max(0, self.total - self.union) / self.ranks * (self.row + 4)

    def but(self, **changes: Any) -> Load:
        """This load, with some of its sizes changed."""
        # as `dataclasses.replace` makes it, which takes more than the costs of an algorithm
        assert changes.keys() <= Load.__dataclass_fields__.keys()
        load = object.__new__(Load)
        load.__dict__.update(self.__dict__, **changes)
        if not _PLACING.isdisjoint(changes):
            load.__dict__.pop("_places", None)
        return load

    def merging(self, rows: float, pieces: float = 0.0) -> float:
        """What merging so many rows costs, in bytes: finding a row's place is worth some more, and
        so is each of the pieces that a kernel is called for."""
        return rows * (self.partial + PLACE) + pieces * CALL

    def pieces(self, rows: float, runs: float, sums: float) -> float:
        """Pieces in which so many runs of so many rows each are merged, a chunk of sums at a time;
        runs may have no row there."""
        blocks = max(1, self.chunks(sums, self.row))
        return runs * blocks * -math.expm1(-rows / blocks)

    @property
    def on_one_host(self) -> bool:
        """Whether all ranks are known to be on one host."""
        return self.hosts is not None and len(self.hosts.ranks) == 1

    @property
    def queue(self) -> float:
        """Ranks of a host that share its link when each sends to each, less the one.

        None do on the ring of ranks, where one stream enters a host and one leaves it, and that is
        how a link's rate was measured.
        """
        if self.hosts is None or self.on_one_host:
            return 0.0
        crowd = max(map(len, self.hosts.ranks))
        return max(0.0, crowd * (self.ranks - crowd) / (self.ranks - 1) - 1)

    def union_of(self, ranks: float) -> float:
        """Rows expected in the sum of that many ranks."""
        missed = math.pow(1 - self.mean / self._places, ranks)
        return min(self._places * (1 - missed), ranks * self.mean)

    def of_partials(self) -> Load:
        """The same load, of rows that are sums of some ranks' already."""
        return self.but(row=self.partial, kind=self.partial_kind)

    def spared(self, nbytes: float, message: float, *, partial: bool = False) -> float:
        """Of so many bytes of values, in messages of so many, those that need not travel.

        Args:
            nbytes: of them.
            message: bytes of a message, at the most a chunk counts; short ones are not packed.
            partial: whether they are of sums of some ranks' rows.
        """
        kind = self.partial_kind if partial else self.kind
        if not (self.packs and kind and message >= pieces.LEAST):
            return 0.0
        return nbytes * (1 - floats.SHARES[kind])

    def with_union(self, union: int) -> Load:
        """The same load, with the union's size as it turned out."""
        return self.but(union=union)

    @functools.cached_property
    def _places(self) -> float:
        """So many places, filled independently at random, would meet in a union of this size."""
        mean, union, ranks = self.mean, self.union, self.ranks
        low, high = max(mean, 1.0), max(2.0 * self.total, 1.0) * 1e4
        if union <= low:
            return low
        for _ in range(36):  # to a millionth
            middle = math.sqrt(low * high)
            if middle * (1 - (1 - min(1.0, mean / middle)) ** ranks) < union:
                low = middle
            else:
                high = middle
        return high

    def uniting(self, rows: float, union: float) -> float:
        """Workspace that index lists of so many rows take until they are united: the lists, a slot
        for each index, and the union."""
        return rows * (self.listed(rows) + _SLOT) + union * self.index

    def listed(self, count: float) -> float:
        """Bytes that an index of a received list takes: as it came, and again once it is read."""
        return self.index_of(count) + (self.index if self.gaps else 0)

    def index_of(self, count: float) -> float:
        """Bytes of an index in a list of so many over all places."""
        return codec.index_bytes(count, self.places, self.index) if self.gaps else self.index

    def behind(self, rows: float) -> float:
        """Bytes of so many rows of values that follow their first chunk."""
        return max(0.0, rows * self.row - max(self.chunk, self.row))

    def chunks(self, rows: float, row: int) -> int:
        """Messages in which so many rows of values travel."""
        return math.ceil(rows / max(1, self.chunk // max(row, 1))) if row else 0

    def trailing(self, rows: float) -> int:
        """Of those messages, how many follow another."""
        return max(0, self.chunks(rows, self.row) - 1)

    def parted(self, rows: float, row: int, peers: int) -> float:
        """Messages to that many peers, each of whom gets so many rows, by chance; some get none."""
        return peers * self.chunks(rows, row) * -math.expm1(-rows)


@dataclass(frozen=True, slots=True)
class Cost:
    """What the average rank does.

    Attributes:
        rounds: times that everybody waits for what others only then send.
        messages: sent.
        bytes: received.
        merged: bytes of rows that go through kernels.
        memory: bytes of workspace beyond the result and the call's own copy of the rank's rows,
            at the rank with fewest rows.
        queued: bytes that pass its host's link meanwhile, for the other ranks of the host.
        slowest: what the rank that all wait for does, where that is not the average one.
        hops: times that what came from one neighbour is handed on to the next.
        behind: bytes that are under way behind the first message of a hop, so that a wait for it
            costs nothing.
        direct: of the messages, those that are posted all at once, each to another peer: half of
            their work is done while the first are on their way.
        trailing: of the messages, those that follow another one to the same peer: their work is
            done while that is under way, as far as the core is idle then.
        meanwhile: pairs of bytes of rows that go through kernels and bytes that are received at the
            same time: it takes time only so far as the core is not idle then.
        spared: of the bytes, those that need not travel, since numbers are packed.
    """

    rounds: int
    messages: int
    bytes: float
    merged: float
    memory: float = 0.0
    queued: float = 0.0
    slowest: Cost | None = None
    hops: int = 0
    behind: float = 0.0
    direct: int = 0
    trailing: float = 0.0
    meanwhile: tuple[tuple[float, float], ...] = ()
    spared: float = 0.0

    @property
    def travels(self) -> float:
        """Bytes that are received as they travel."""
        return self.bytes - self.spared

    def seconds(self, link: Link) -> float:
        """Predicted time on that link."""
        if self.slowest is not None:
            return self.slowest.seconds(link)
        left = self.travels / self.bytes if self.spared else 1.0  # what queues is packed, too
        streaming = (self.bytes + self.queued) * left * link.beta
        waiting = self.rounds * link.alpha + self.messages * link.work
        waiting += self.hops * max(0.0, link.alpha - self.behind * link.beta)
        hidden = min(self.direct * link.work / 2, streaming)
        others = link.gamma * (1 - 1 / link.share)
        idle = max(0.0, streaming - self.travels * max(_CARRY * others, link.carry))
        if self.trailing:
            waiting += max(0.0, _CHUNKED * streaming - idle)
        hidden += min(self.trailing * link.work, idle)
        free = max(0.0, idle - self.trailing * link.work) / max(1.0, self.bytes)  # for each byte
        late = sum(max(0.0, rows * link.gamma - under * free) for rows, under in self.meanwhile)
        worked = self.merged + self.spared * _PACKING
        return waiting - hidden + streaming + late + worked * link.gamma
