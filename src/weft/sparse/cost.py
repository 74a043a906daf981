"""What a call will cost: from the sizes of this call and the figures of this network.

`Load` holds the sizes, which the headers of the opening exchange say. `Link` holds the figures of
the network. Each algorithm computes its `Cost` from the load, beside its schedule; a test compares
the messages and the bytes with what the algorithm sends.

`bound` has the least that any exact schedule sends.

Source: the time is that of LogGP (Alexandrov et al., SPAA 1995) with latency `alpha`, overhead
`work` and gap a byte `beta`, and `gamma` for the arithmetic.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..kernels.meter import CALL, MARK, PLACE, SPREAD
from ..schedules.hosts import Hosts
from ..wire.link import Link
from . import codec
from .bound import rows_of_average, rows_of_busiest

Blocks = tuple[tuple[int, ...], ...]
"""The ranks of each block, ascending; every rank is in one."""

MANY = 16
"""Ranks from which messages may be what limits."""

HELD = 3
"""Latencies that a distant host's link may need for what all send to it at once.

The queue before it does not hold more: docs/performance.md has the times of `gather`, sent directly
and round the ring, with fewer bytes and with more (`benchmarks/direct.py`).
"""

_UNEVEN = 0.08  # of the bytes: streams between all pairs share links unevenly
_DISTANT = 2.5e-3  # seconds of a round, from which hosts are distant: half of what asks for BBR
# Latencies that a distant connection needs to come back to the link's rate after rows to all and a
# ring have begun together, and the link's queue has overflowed. BBR then keeps a low rate for a
# number of round trips, however many bytes follow. Measured between 4 hosts, 25 ms from one to
# another, with 100 Mbit/s: `holders` takes 0.6 to 1.0 s longer than its rounds and bytes, with zipf
# rows and with wide ones, and 0.7 to 1.5 s where packets are lost (docs/performance.md). 24 are the
# least of it.
_RECOVERY = 24
_CHUNKED = 0.3  # of its time: a stream of chunks keeps a core busy for longer than one message
_MEMORY = 1 / 1.5e9  # seconds a byte, below which a copy costs as much as a message
_SLOT = 4  # bytes that say where in a union an index belongs
_EQUAL = 3  # percent of the predicted time: so small a difference is none
_SORTING = 28  # bytes for each row that is sorted: keys, order, indices as given and as sent
_CODE = 8 << 20  # bytes that the first call needs besides: machine code, connections, headers
# what is allowed by rounded sizes (`Load.coarse`) must be allowed by the true ones, from which each
# may be a 64th off
_MARGIN = 1 + 1 / 16
_SPARE = 64 << 20  # bytes of workspace allowed besides three times the rows of the rank with fewest


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
        index: bytes of an index on the wire, 4 or 8.
        chunk: bytes of values sent at a time.
        places: indices lie below this.
        gaps: index lists are written as gaps, in few bits.
        staying: rows are on an accelerator, whose values the host does not read.
        lengths_known: both ends know the length of each message before they post it, since the wire
            is in rounds or `exact`. The same schedules run on both: every rank takes part in every
            round.
        in_order: only neighbouring ranks' rows may be combined (op is a caller's function).
        has_neutral: op has a value that changes nothing.
        identical: all ranks certainly have the same index set.
        hosts: which ranks share a host; None is one host for each.
        rows_of_hosts: for each host the rows in the union of its ranks, and those in the union of
            all other ranks: counted, or estimated from samples of each rank's indices; None:
            nothing is known of them. Then ranks count as if they drew their rows independently.
        link: the network's figures, where they are known.
        summed: the rows that ranks have are sums of some ranks each, of an earlier stage.
        sharing: so many groups of ranks have this load at the same time, over the same links;
            `link.beta` is that of a byte of one of them.
        stages: of `split`: the blocks in which ranks sum first, then those of what runs between
            these blocks, and so on (`sparse.factors`); (): it is flat. In each the ranks are
            numbered from 0: after the first they are its blocks.
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
    staying: bool = False
    lengths_known: bool = False
    in_order: bool = False
    has_neutral: bool = True
    identical: bool = False
    hosts: Hosts | None = None
    rows_of_hosts: tuple[tuple[float, float], ...] | None = None
    link: Link | None = None
    summed: bool = False
    sharing: int = 1
    stages: tuple[Blocks, ...] = ()

    @property
    def factors(self) -> tuple[int, ...]:
        """Of `split`: the ranks of a block that sum, in each stage, then the last number of blocks.

        () if it is flat.
        """
        if not self.stages:
            return ()
        return *(min(map(len, blocks)) for blocks in self.stages), len(self.stages[-1])

    @property
    def mean(self) -> float:
        """k̄, rows of the average rank."""
        return self.total / self.ranks

    @property
    def bound(self) -> float:
        """Bytes that the average rank must receive, an index counted as 4."""
        return rows_of_average(self.total, self.union, self.ranks) * (self.row + 4)

    @property
    def bound_to_one(self) -> float:
        """The bound of a call that delivers each row of the result to one rank only."""
        return max(0, self.total - self.union) / self.ranks * (self.row + 4)

    @property
    def host_bound(self) -> float:
        """Bytes that must enter or leave the link of the host with most, an index counted as 4.

        It is as good as `union` and `rows_of_hosts`. Where these are estimates, it is one; without
        `rows_of_hosts` it is too high where ranks of a host have similar rows.
        """
        if len(self.ranks_of_hosts) == 1:
            return 0.0
        own, others = self._rows_of_hosts
        # the rank with most rows sends them all, if it is alone on its host or not
        busiest = max(rows_of_busiest(own, others, self.union), self.most)
        return busiest * (self.row + 4)

    @property
    def unevenness(self) -> float:
        """How many times as much the busiest host must send or receive as the average one.

        It is as good as `host_bound`.
        """
        own, _ = self._rows_of_hosts
        average = rows_of_average(sum(own), self.union, len(own)) * (self.row + 4)
        return max(1.0, self.host_bound / average) if average else 1.0

    @property
    def _rows_of_hosts(self) -> tuple[list[float], list[float]]:
        """For each host the rows in the union of its ranks, and in that of all other ranks."""
        rows = self.rows_of_hosts
        if rows is None:
            rows = tuple(
                (self.union_of(count), self.union_of(self.ranks - count))
                for count in self.ranks_of_hosts
            )
        return [own for own, _ in rows], [others for _, others in rows]

    def least_seconds(self, link: Link) -> float:
        """The time that any exact schedule takes at least with these ranks on these hosts.

        An estimate, where `bound` and `host_bound` are.
        The link of the busiest host carries `host_bound`. All ranks together receive P times
        `bound`: over the links of the hosts and, where a rank is not alone on its host, from there.
        """
        if self.on_one_host:
            return self.bound * link.beta
        counts = self.ranks_of_hosts
        crossing = self.host_bound * link.beta
        neighbours = sum(count for count in counts if count > 1)
        if neighbours and not link.within:
            return crossing  # nobody knows how quick a host is within
        speed = len(counts) / link.beta
        if neighbours:
            speed += neighbours / link.within
        return max(crossing, self.ranks * self.bound / speed)

    def but(self, **changes: Any) -> Load:
        """This load, with some of its sizes changed."""
        return replace(self, **changes)

    @property
    def coarse(self) -> Load:
        """The load with its numbers of rows rounded, each by at most 1/64 of it.

        Predictions are not exact to that. So what is chosen by its prediction is chosen for the
        coarse load, once for all calls of about these sizes, and remembered: steps of training are
        such calls.
        """
        rows_of_hosts = self.rows_of_hosts
        if rows_of_hosts is not None:
            rows_of_hosts = tuple((_coarse(own), _coarse(others)) for own, others in rows_of_hosts)
        return self.but(
            total=_coarse(self.total),
            most=_coarse(self.most),
            fewest=_coarse(self.fewest),
            union=_coarse(self.union),
            height=None if self.height is None else _coarse(self.height),
            places=_coarse(self.places),
            rows_of_hosts=rows_of_hosts,
        )

    def of_partials(self) -> Load:
        """The load of a call whose rows are partial sums."""
        return self.but(row=self.partial)

    @property
    def incoming(self) -> int:
        """Bytes of the values of a row that a rank has, and sends to who sums it."""
        return self.partial if self.summed else self.row

    @property
    def workspace(self) -> int:
        """Bytes of workspace that `auto` lets a call use beside its result."""
        return 3 * self.fewest * (self.row + self.index) + _SPARE

    @property
    def allowed(self) -> float:
        """Bytes of workspace that a prediction may need, whether its sizes are rounded or true."""
        return self.workspace / _MARGIN

    def sends_directly(self, nbytes: float) -> bool:
        """Whether an all-gather sends directly to all ranks instead of round the ring.

        So it does where each step of a ring would be a round of its own, and if the link is about
        as quick as memory, also where the ranks of a host share it. Between distant hosts it does
        if to wait for the ring's hops costs more than to share a host's link, and if the queue
        before the link holds what all send at once.

        Args:
            nbytes: of each rank, on average; the same number on every rank.
        """
        link = self.link
        if self.at_once:
            return True
        if link is None:
            return False
        if (1 + self.queue) * link.beta < _MEMORY:
            return True
        if link.alpha < _DISTANT:
            return False
        streaming = (self.ranks - 1) * nbytes * link.beta
        sharing = self.queue * streaming
        waiting = (self._hops(nbytes) - 1) * link.alpha
        return waiting > sharing and streaming + sharing <= HELD * link.alpha

    @property
    def at_once(self) -> bool:
        """Whether all that is known is sent together: over wires in rounds or `exact`, and on
        accelerators."""
        return self.lengths_known or self.staying

    @property
    def ranks_of_hosts(self) -> tuple[int, ...]:
        """How many ranks each host has."""
        if self.hosts is None:
            return (1,) * self.ranks
        return tuple(map(len, self.hosts.ranks))

    @property
    def on_one_host(self) -> bool:
        """Whether all ranks are known to share the cores of one host."""
        return self.hosts is not None and len(self.hosts.ranks) == 1

    @property
    def queue(self) -> float:
        """How many more ranks share a host's link in an exchange of all with all than in a ring.

        In a ring one stream enters a host and one leaves it. So was the link's rate measured.
        """
        if self.hosts is None or self.on_one_host:
            return 0.0
        crowd = max(map(len, self.hosts.ranks))
        return max(0.0, crowd * (self.ranks - crowd) / (self.ranks - 1) - 1)

    def union_of(self, ranks: float) -> float:
        """Rows expected in the sum of that many ranks, if ranks draw their rows independently."""
        missed = math.pow(1 - self.mean / self._places, ranks)
        return min(self._places * (1 - missed), ranks * self.mean)

    def unions_of(self, blocks: Blocks) -> list[float]:
        """Rows expected in the sum of each block, of which more is known if it is a host."""
        return [self._union_of_block(block) for block in blocks]

    def _union_of_block(self, block: tuple[int, ...]) -> float:
        if self.hosts is not None and self.rows_of_hosts is not None:
            host = self.hosts.of[block[0]]
            if self.hosts.ranks[host] == block:
                own, _ = self.rows_of_hosts[host]
                return own
        return self.union_of(len(block))

    @functools.cached_property
    def _places(self) -> float:
        """The number of places for which independent random rows give a union of this size."""
        mean = self.mean
        union = self.union
        ranks = self.ranks
        low = max(mean, 1.0)
        high = max(2.0 * self.total, 1.0) * 1e4
        if union <= low:
            return low
        for _ in range(36):  # to less than a billionth
            middle = math.sqrt(low * high)
            if middle * (1 - (1 - min(1.0, mean / middle)) ** ranks) < union:
                low = middle
            else:
                high = middle
        return high

    # indices

    def index_of(self, count: float, share: float = 1.0) -> float:
        """Bytes of an index in a list of `count` indices, which lie in that share of the places."""
        if not self.gaps:
            return self.index
        return codec.index_bytes(count, self.places * share, self.index)

    def list_of(self, count: float, share: float = 1.0) -> float:
        """Bytes of the message that lists `count` indices, which lie in that share of the places.

        A long list travels in two.
        """
        return codec.PREFIX + count * self.index_of(count, share)

    def index_memory(self, count: float) -> float:
        """Bytes of memory for an index of a received list: as received, and again unpacked."""
        return self.index_of(count) + (self.index if self.gaps else 0)

    def uniting_memory(self, rows: float, union: float) -> float:
        """Bytes of workspace to unite index lists: the lists, a slot for each index, the union."""
        return rows * (self.index_memory(rows) + _SLOT) + union * self.index

    # messages

    def chunks(self, rows: float, row: int) -> int:
        """Messages that carry the values of this many rows."""
        return math.ceil(rows / max(1, self.chunk // max(row, 1))) if row else 0

    def parted(self, rows: float, row: int, peers: int) -> float:
        """Messages to `peers` peers, each of which gets `rows` rows on average, and some none."""
        return peers * self.chunks(rows, row) * -math.expm1(-rows)

    def hops(self, rows: float) -> float:
        """Rounds that rows wait for on their way round the ring, beside the time of their bytes.

        A rank's last chunk leaves after its others. Then each hop takes it a latency, and the time
        of its bytes. Meanwhile the links carry the chunks of all ranks. So there is a wait in each
        hop if a rank has one small chunk. With many chunks there is one, for the last of them.

        Args:
            rows: of each rank.
        """
        return self._hops(rows * self.row)

    def _hops(self, own: float) -> float:
        """The same of so many bytes of each rank."""
        link = self.link
        if self.at_once or link is None or not link.alpha:
            return 1.0
        hops = self.ranks - 1
        chunk = min(own, self.chunk)
        streaming = hops * own * link.beta

        alone = link.beta / self.sharing  # seconds a byte while no other group sends
        within = min(alone, link.within) if link.within else alone
        crossing = 1.0 if self.hosts is None else self.hosts.crossings / self.ranks
        hop = link.alpha + chunk * (crossing * alone + (1 - crossing) * within)
        last = (own - chunk) * alone + hops * hop
        return max(1.0, (last - streaming) / link.alpha)

    def hops_of_shared(self, rows: float) -> float:
        """The same of an all-gather (`stream.Ring`), which may send directly to all ranks."""
        return 1.0 if self.sends_directly(rows * self.row) else self.hops(rows)

    def crowded(self, nbytes: float) -> float:
        """The delay of a stream of chunks by busy cores, as bytes that could be received then.

        Within a host there is none: a chunk is a small frame that says where the bytes are.
        """
        if self.link is None or self.on_one_host:
            return 0.0
        idle = max(0.0, 1 - self.link.busy / self.link.beta)
        return nbytes * max(0.0, _CHUNKED - idle)

    def shared(self, rows: float) -> float:
        """The delay of an all-gather of so many rows of each rank, by links that streams share.

        Round the ring one stream enters a host. Sent directly, each rank of a host gets all.
        """
        nbytes = rows * self.row
        return self.queue * (self.ranks - 1) * nbytes if self.sends_directly(nbytes) else 0.0

    def recovering(self, nbytes: float, shared: float | None = None) -> float:
        """Latencies lost where `nbytes` from all peers arrive beside a ring, at a distant host.

        None if the queue before a link holds them: that of a usual router has the bytes of a round
        trip.

        Args:
            nbytes: received from all peers together.
            shared: rows of each rank that an all-gather shares, which may send directly to all; if
                it does, there is no ring. None: there is one.
        """
        if shared is not None and self.sends_directly(shared * self.row):
            return 0.0
        link = self.link
        if link is None or link.alpha < _DISTANT or self.ranks == 2 or self.at_once:
            return 0.0
        return _RECOVERY if nbytes * link.beta > 2 * link.alpha else 0.0

    def unevenly(self, nbytes: float) -> float:
        """The delay of `nbytes` from all peers that share links unevenly, as bytes received."""
        return _UNEVEN * nbytes if self.ranks > 2 and not self.on_one_host else 0.0

    # arithmetic

    def merging(self, rows: float, pieces: float = 0.0) -> float:
        """The cost of merging this many rows in so many kernel calls (`pieces`), in bytes merged.

        Finding a row's place costs as much as merging some bytes, and so does a call.
        """
        return rows * (self.partial + PLACE) + pieces * CALL

    def pieces(self, rows: float, runs: float, sums: float) -> float:
        """Kernel calls to merge `runs` runs of `rows` rows, a chunk of sums at a time.

        A run without rows in a chunk needs no call.
        """
        blocks = max(1, self.chunks(sums, self.row))
        return runs * blocks * -math.expm1(-rows / blocks)

    def uniting_by_bitmap(self, places: int) -> float:
        """The cost of uniting all ranks' index sets by a bitmap of places, in bytes merged."""
        return MARK * 2 * self.mean + SPREAD * self.union + places / 2


def _coarse(count: float) -> int:
    """A number of rows, rounded to six binary digits."""
    whole = round(count)
    dropped = max(0, whole.bit_length() - 6)
    half = (1 << dropped) >> 1
    return ((whole + half) >> dropped) << dropped


_figures = operator.attrgetter(
    "rounds", "messages", "bytes", "merged", "overlapped", "delayed", "memory", "recovering"
)  # of a `Cost`, all but `slowest`


@dataclass(frozen=True, slots=True)
class Cost:
    """What the average rank does.

    Attributes:
        rounds: times that a rank waits for a message that depends on an earlier one.
        messages: sent.
        bytes: received.
        merged: bytes of rows that go through kernels while nothing is received.
        overlapped: bytes of rows that go through kernels while others are received: they take
            time only as far as the core is not idle then.
        delayed: bytes that could be received in the time that those received wait for links that
            ranks share, or for cores.
        memory: bytes of workspace beyond the result and the call's own copy of the rank's rows,
            at the rank with fewest rows.
        recovering: latencies in which connections come back to the link's rate, after more was sent
            to it than its queue holds. Real links have such queues, a simulated one has not.
        slowest: what the rank that all wait for does, where that is not the average one.
    """

    rounds: float
    messages: int
    bytes: float
    merged: float = 0.0
    overlapped: float = 0.0
    delayed: float = 0.0
    memory: float = 0.0
    recovering: float = 0.0
    slowest: Cost | None = None

    def __add__(self, other: Cost) -> Cost:
        """One after the other; `slowest` is left out."""
        return Cost(*map(operator.add, _figures(self), _figures(other)))

    def seconds(self, link: Link) -> float:
        """Predicted time on that link."""
        if self.slowest is not None:
            return self.slowest.seconds(link)
        streaming = (self.bytes + self.delayed) * link.beta
        idle = max(0.0, streaming - self.bytes * link.busy)
        late = max(0.0, self.overlapped * link.gamma - idle)
        waiting = (self.rounds + self.recovering) * link.alpha + self.messages * link.work
        return waiting + streaming + late + self.merged * link.gamma


def needed(load: Load, cost: Cost) -> float:
    """Bytes of workspace that a call needs beside its result."""
    return cost.memory + load.fewest * (load.row + _SORTING) + _CODE


def preferred(load: Load, costs: Sequence[Cost], ranks: int) -> int:
    """The number of the trial to take: the quickest, or of many ranks one with fewer messages.

    Only those that need no more workspace than is allowed; if none does, that which needs least.

    Args:
        load: of the call.
        costs: of each trial, for that load.
        ranks: among whom the trials differ.
    """
    assert load.link is not None
    fits = [number for number, cost in enumerate(costs) if needed(load, cost) <= load.allowed]
    if not fits:
        return min(range(len(costs)), key=lambda number: round(costs[number].memory))
    seconds = [costs[number].seconds(load.link) for number in fits]
    return fits[nearly_quickest(ranks, seconds, [costs[number].messages for number in fits])]


def nearly_quickest(ranks: int, seconds: Sequence[float], messages: Sequence[int]) -> int:
    """The number of the quickest trial, or of many ranks of one with fewer messages.

    Predictions are not exact to 3 percent. So of `MANY` ranks, all trials that are predicted to
    take at most that much longer than the quickest count as quick as it. What a message needs
    besides (a connection, memory, a rank that has to be there) is in no prediction.

    More ranks make predictions less exact (those of 256 are within 8 percent of the simulation),
    and a ring has more hops, each of which waits for one more rank: predictions hide them behind
    the ring's bytes, but not where that rank stalls. So whenever the number of ranks doubles, it is
    one percent more, for trials that send at most half of the messages of the quickest.

    Args:
        ranks: how many take part.
        seconds: predicted, of each trial.
        messages: that a rank sends, of each trial.

    Example:
        >>> nearly_quickest(64, [1.00, 1.02, 1.04, 1.06], [30, 20, 18, 10])
        1
        >>> nearly_quickest(64, [1.00, 1.02, 1.04, 1.06], [30, 20, 15, 10])  # 5 percent, for half
        2
        >>> nearly_quickest(8, [1.00, 1.02, 1.04, 1.06], [30, 20, 15, 10])
        0
    """
    times = [round(1e6 * each) for each in seconds]  # every machine rounds microseconds alike
    quickest = min(range(len(times)), key=lambda number: (times[number], messages[number]))
    if ranks < MANY:
        return quickest
    doublings = (ranks // MANY).bit_length() - 1

    def counts_as_quick(number: int) -> bool:
        halves = 2 * messages[number] <= messages[quickest]
        percent = _EQUAL + (doublings if halves else 0)
        return 100 * times[number] <= (100 + percent) * times[quickest]

    equal = filter(counts_as_quick, range(len(times)))
    return min(equal, key=lambda number: (messages[number], times[number]))
