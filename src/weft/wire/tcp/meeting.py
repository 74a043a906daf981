"""Meetings of ranks of one host, by words and slots in the segments that they share.

To tell each other a few bytes by messages costs each rank three system calls, and the bookkeeping
of a message three times. Here a rank leaves its message in its own segment, stores a number, and
looks at the numbers of the others.

At the start of a rank's segment is its *page* (`kernels.page` says what lies where), and behind it
*slots*, each for one message. Only the owner writes there. A page has a line for each other rank,
and nothing that belongs to a set of ranks: who reads number n of a pair hears what the other one
said in its own number n of them, whoever else was in that.

**To begin** a meeting (`begin`, `_post`), a rank

1. numbers it with each peer, and queues it for each;
2. waits for room, which is there once each peer has read all but `DEPTH - 1` of the meetings before
   it. Without room the meeting stays unposted, and so do later ones that share a peer with it;
3. copies its message to the first slot whose readers have all read it;
4. stores, with each peer, the entry, then BEGUN, and then looks who sleeps, and rings those.

**To read** (`_read`), of each peer in order, whether or not the meeting is waited for: BEGUN is
high enough; then the entry is copied, and checked; then the message is copied; then READ is
stored, and the peer rung if it sleeps for room.

**To sleep** (`fall_asleep`), in the poll of the wire, a rank stores WANTS or ROOM, then the number
of its sleep, and *then reads everything that is there, and posts what has room*: who comes later
sees it asleep. Then it polls. A ring is a frame on the socket (`connection`), which says nothing:
who wakes up looks again. So whatever ends a wait for messages ends this one: a death, an abort, a
signal, a deadline.

All numbers are stored and loaded by machine code, in one order for all processes. What is read is a
stranger's: what steers memory is copied, then checked, then used. Who is not what it should be:

* ranks that sleep in a circle, each for the next, are found by one of them (`_circle`);
* numbers, or a message's place, that cannot be garble the wire, and name who wrote them.

Nothing here waits, and the wire holds its `_turn` in every call but those of `TcpMeeting`.
"""

from __future__ import annotations

import mmap
import platform
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from ...kernels import jit
from ...kernels.page import BEGUN, DEPTH, LINE, READ, ROOM, WANTS
from ..interface import MEETS, Failure, WireFailed
from . import shm

SETS = 1000
"""Of ranks, of which is remembered where their lines are."""

LOOKS = 40  # at a peer's number before a sleep; with more, other work on this core waits


def architecture() -> str:
    """What all ranks that meet have the same; empty: this one cannot, since it has no machine code.

    It loads the machine code, or makes it, which may take ten seconds once on a machine.
    """
    return "" if jit.loops() is None else platform.machine()


def room_for(size: int, near: int) -> int:
    """Bytes at the start of a segment, of a wire of `size` ranks, for meetings with so many peers.

    Each slot in use has a reader that has not read it, and none has more than `DEPTH` to read: so
    one is free.
    """
    return _whole_pages(_start_of_slots(size) + (DEPTH * near + 1) * MEETS)


def _start_of_slots(size: int) -> int:
    return _whole_pages(LINE * (1 + size))


def _whole_pages(nbytes: int) -> int:
    """So many bytes, and what is left of the last page of memory."""
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _array(numbers: Sequence[int]) -> tuple[array[int], int]:
    """Private memory for machine code, and its address."""
    made = array("q", numbers)
    return made, made.buffer_info()[0]


def _impossible(peer: int) -> WireFailed:
    return WireFailed(
        Failure("garbled", peer, f"rank {peer} sent numbers of meetings that cannot be")
    )


class _Waits(Protocol):
    """What a meeting asks of its wire.

    Attributes:
        rank, size: as of a wire.
    """

    rank: int
    size: int

    def finish_meeting(self, awaited: TcpMeeting, timeout: float | None) -> None:
        """Wait for a meeting, and move messages meanwhile."""


class Peers:
    """Those that a rank meets at once, and where their words lie, for machine code.

    Attributes:
        ranks: the peers.
        count: how many.
        own_lines, lines, pages: addresses of arrays: for each peer this rank's line for it, its
            line for this rank, its page.
        place: for each peer that of its message among all.
        own_place: that of this rank's message.
    """

    def __init__(self, meetings: Meetings, ranks: Sequence[int]) -> None:
        own = meetings.rank
        self.ranks = tuple(rank for rank in ranks if rank != own)
        self.count = len(self.ranks)
        self.place = {rank: place for place, rank in enumerate(ranks)}
        self.own_place = self.place[own]
        own_lines = [meetings.line(own, peer) for peer in self.ranks]
        lines = [meetings.line(peer, own) for peer in self.ranks]
        pages = [meetings.page(peer) for peer in self.ranks]
        self._arrays = [_array(each) for each in (own_lines, lines, pages)]
        self.own_lines, self.lines, self.pages = (address for _, address in self._arrays)


class _Turn:
    """The numbers that one meeting has with each of its peers.

    Attributes:
        peers: whom it is with.
        numbers: in their order.
        address: of the numbers, for machine code.
    """

    __slots__ = ("_reached", "address", "numbers", "peers")

    def __init__(self, peers: Peers, numbers: Sequence[int], reached: Callable[..., int]) -> None:
        self.peers = peers
        self.numbers, self.address = _array(numbers)
        self._reached = reached

    def is_begun(self, looks: int) -> bool:
        """Whether all peers have begun it, after so many looks at most."""
        peers = self.peers
        return bool(self._reached(peers.lines, peers.count, BEGUN, self.address, 0, looks))

    def is_read(self) -> bool:
        """Whether all peers have read this rank's message."""
        peers = self.peers
        return bool(self._reached(peers.lines, peers.count, READ, self.address, 0, 0))

    def has_room(self) -> bool:
        """Whether all peers have read what lies where its entries would."""
        peers = self.peers
        return bool(self._reached(peers.lines, peers.count, READ, self.address, DEPTH, 0))


class TcpMeeting:
    """One meeting of this rank; a `weft.wire.interface.PendingBytes`.

    Attributes:
        turn: its numbers.
        message: this rank's.
        messages: all of them, as far as they have come, in the order asked for.
        missing: how many it lacks: those that have not come, and this rank's, until peers can read
            that.
        without_room: peers that have to read more before they can.
    """

    __slots__ = ("_wire", "message", "messages", "missing", "turn", "without_room")

    def __init__(self, wire: _Waits, turn: _Turn, message: bytes | bytearray) -> None:
        self._wire = wire
        self.turn = turn
        self.message = message
        self.messages: list[bytes | bytearray | None] = [None] * (turn.peers.count + 1)
        self.messages[turn.peers.own_place] = message
        self.missing = turn.peers.count and turn.peers.count + 1
        self.without_room: set[int] = set()

    def wait(self, timeout: float | None = None) -> list[bytes | bytearray]:
        if self.missing:
            self._wire.finish_meeting(self, timeout)
        return [message for message in self.messages if message is not None]

    def waiting_for(self) -> list[int]:
        peers = self.turn.peers
        late = {peer for peer in peers.ranks if self.messages[peers.place[peer]] is None}
        return sorted(late | self.without_room)


class Meetings:
    """All meetings of one rank.

    Attributes:
        rank: this one.
        under_way: how many messages are to be read, or to be left for peers.
        loops: the machine code, by name; `reached`, `find` and `confirm` are some of it.
        peers_of: whom some ranks are, for machine code, by these ranks.
        sleep_count: how often this rank fell asleep.
    """

    def __init__(
        self,
        wire: _Waits,
        segment: shm.Segment,
        segments: Mapping[int, shm.Peer],
        ring: Callable[[int], None],
    ) -> None:
        """
        Args:
            wire: the wire that these are of.
            segment: of this rank, with `room_for` them at its start.
            segments: of the others of this host.
            ring: wakes a peer up that may be asleep.
        """
        loops = jit.loops()
        assert loops is not None  # all ranks have voted so
        self.rank = wire.rank
        self.under_way = 0
        self._wire = wire
        self._ring = ring
        self.loops = loops
        self.reached = loops["reached"]
        self.find = loops["find"]
        self.confirm = loops["confirm"]
        everybody: dict[int, shm.Segment | shm.Peer] = {**segments, wire.rank: segment}
        # held, so that it stays mapped whatever closes the wire in the middle of something
        self._memory = {rank: memoryview(each.pages) for rank, each in everybody.items()}
        self._bases = {rank: each.address for rank, each in everybody.items()}
        self._slots_at = _start_of_slots(wire.size)
        # of each slot the turn whose message it has; None: it had none
        self._slots: list[_Turn | None] = [None] * (DEPTH * len(segments) + 1)
        # by peer: where this rank's line for it lies, its line for this rank, and its page; and
        # the bytes of its segment
        self._places = {
            peer: (
                self.line(wire.rank, peer),
                self.line(peer, wire.rank),
                self.page(peer),
                each.nbytes,
            )
            for peer, each in segments.items()
        }
        self._begun = dict.fromkeys(segments, 0)  # by peer: meetings, posted or not
        self._has_read = dict.fromkeys(segments, 0)  # by peer: its messages
        # by peer: the meetings whose message of it is yet to be read, in order
        self._queues: dict[int, deque[TcpMeeting]] = {peer: deque() for peer in segments}
        self._unposted: list[TcpMeeting] = []
        self.peers_of: dict[tuple[int, ...], Peers] = {}
        self._near = Peers(self, [wire.rank, *segments])
        self._sleeps, self._sleeps_at = _array([0] * len(segments))
        self._zeros, self._zeros_at = _array([0] * len(segments))
        self._entry, self._entry_at = _array([0] * 2)
        self.sleep_count = 0  # how often this rank fell asleep

    def page(self, owner: int) -> int:
        """The address of a rank's page."""
        return self._bases[owner]

    def line(self, owner: int, other: int) -> int:
        """The address of an owner's line for another rank."""
        return self._bases[owner] + LINE * (1 + other)

    def peers_among(self, ranks: tuple[int, ...]) -> Peers:
        """Whom this rank meets, with these ranks.

        Raises:
            ValueError: they are not distinct ranks of this host, this one among them.
        """
        found = self.peers_of.get(ranks)
        if found is None:
            near = {self.rank, *self._queues}
            if self.rank not in ranks or len(set(ranks)) < len(ranks) or not near.issuperset(ranks):
                raise ValueError(
                    f"rank {self.rank} cannot meet ranks {[*ranks]}: pass it and some others of "
                    f"{sorted(near)}, each once"
                )
            if len(self.peers_of) >= SETS:
                self.peers_of.clear()
            found = self.peers_of[ranks] = Peers(self, ranks)
        return found

    def begin(self, message: bytes | bytearray, peers: Peers) -> TcpMeeting:
        """Begin a meeting, and post it if there is room."""
        for peer in peers.ranks:
            self._begun[peer] += 1
        turn = _Turn(peers, [self._begun[peer] for peer in peers.ranks], self.reached)
        meeting = TcpMeeting(self._wire, turn, message)
        if meeting.missing:
            self.under_way += meeting.missing
            for peer in peers.ranks:
                self._queues[peer].append(meeting)
            self._unposted.append(meeting)
            self._post_all()
        return meeting

    def move(self) -> bool:
        """Read all that is there, and post what has room; whether anything was.

        Raises:
            WireFailed: a peer wrote what cannot be.
        """
        has_moved = False
        for peer, queue in self._queues.items():
            while queue and self._read(peer, queue[0]):
                queue.popleft()
                has_moved = True
        if self._unposted:
            has_moved |= self._post_all()
        return has_moved

    # posting

    def _post_all(self) -> bool:
        """Post what has room; only what shares a peer with one before it has to wait for that."""
        has_posted = False
        held_up: dict[int, set[int]] = {}  # by peer: who keeps meetings with it from being posted
        waiting = self._unposted
        self._unposted = []
        for meeting in waiting:
            turn = meeting.turn
            meeting.without_room = set()
            for peer in turn.peers.ranks:
                if peer in held_up:
                    meeting.without_room |= held_up[peer]
            if not turn.has_room():
                meeting.without_room |= self._without_room(turn)
            if meeting.without_room:
                held_up |= dict.fromkeys(turn.peers.ranks, meeting.without_room)
                self._unposted.append(meeting)
            else:
                self._post(meeting)
                has_posted = True
        return has_posted

    def _without_room(self, turn: _Turn) -> set[int]:
        """The peers that have to read more before this is posted."""
        return {
            peer
            for peer, number in zip(turn.peers.ranks, turn.numbers, strict=True)
            if self.loops["look"](self.line(peer, self.rank) + READ) < number - DEPTH
        }

    def _post(self, meeting: TcpMeeting) -> None:
        """Leave this rank's message where all peers can read it, and wake up who sleeps."""
        turn = meeting.turn
        peers = turn.peers
        slot = self._free_slot()
        offset = self._slots_at + slot * MEETS
        length = len(meeting.message)
        self._memory[self.rank][offset : offset + length] = meeting.message
        self._slots[slot] = turn
        sleepers = self.loops["announce"](
            peers.own_lines,
            peers.pages,
            peers.count,
            turn.address,
            offset,
            length,
            self._sleeps_at,
        )
        meeting.missing -= 1
        self.under_way -= 1
        if sleepers:
            for peer, sleep in zip(peers.ranks, self._sleeps, strict=False):
                if sleep:
                    self._ring(peer)

    def _free_slot(self) -> int:
        """The first slot that nobody has to read any more: its pages are warm."""
        for slot, turn in enumerate(self._slots):
            if turn is None or turn.is_read():
                return slot
        self._check_numbers()  # a peer has taken back what it had read
        raise AssertionError("all slots are in use")

    # reading

    def _read(self, peer: int, meeting: TcpMeeting) -> bool:
        """Read a peer's message of this meeting, if it is there."""
        number = self._has_read[peer] + 1
        own_line, line, page, nbytes = self._places[peer]
        found = self.find(line, number, self._entry_at)
        if not found:
            return False
        if found < 0:
            raise _impossible(peer)
        offset, length = self._entry  # private now: the peer may change its own
        peers = meeting.turn.peers
        if not (0 <= length <= MEETS and 0 <= offset <= nbytes - length):
            text = f"rank {peer} sent a message of {length} bytes at {offset} of its segment"
            raise WireFailed(Failure("garbled", peer, text))
        place = peers.place[peer]
        meeting.messages[place] = bytearray(self._memory[peer][offset : offset + length])
        meeting.missing -= 1
        self.under_way -= 1
        self._has_read[peer] = number
        if self.confirm(own_line, line, page, number):  # it sleeps until this was read
            self._ring(peer)
        return True

    # sleeping

    def fall_asleep(self, awaited: TcpMeeting | None) -> None:
        """Say that this rank sleeps; the caller then moves once more what is there, and polls.

        Args:
            awaited: what it sleeps for, if it would for ever: then it may be part of a circle. Not
                so while it has something to post, which may end the sleep of others.
        """
        put_each = self.loops["put_each"]
        for meeting in self._unposted:
            peers = meeting.turn.peers
            for peer in peers.ranks:
                self.loops["put"](self.line(self.rank, peer) + ROOM, 1)
        if awaited is not None and not self._unposted:
            peers = awaited.turn.peers
            put_each(peers.own_lines, peers.count, WANTS, awaited.turn.address)
        self.sleep_count += 1
        self.loops["put"](self._bases[self.rank], self.sleep_count)

    def wake_up(self) -> None:
        """Say that this rank is awake."""
        near = self._near
        self.loops["put"](self._bases[self.rank], 0)
        for word in (WANTS, ROOM):
            self.loops["put_each"](near.own_lines, near.count, word, self._zeros_at)

    def check_sleep(self, awaited: TcpMeeting | None) -> None:
        """Once this rank has said that it sleeps, and nothing was left to move: may it ever wake?

        Raises:
            WireFailed: a peer wrote numbers that cannot be; or ranks sleep in a circle.
        """
        self._check_numbers()
        if awaited is None or self._unposted:
            return
        circle = self._circle()
        if circle:
            text = (
                f"ranks {circle} wait for each other, each for a meeting with the next: all have "
                "to begin the meetings that two of them are in in one order"
            )
            raise WireFailed(Failure("stuck", None, text, tuple(circle)))

    def _check_numbers(self) -> None:
        near = self._near
        place = self.loops["impossible"](near.own_lines, near.lines, near.count)
        if place >= 0:
            raise _impossible(near.ranks[place])

    def _circle(self) -> list[int]:
        """Ranks that sleep, each for a meeting that the next has not begun; none: there is none.

        Who sleeps for a meeting posts nothing. So if each of them is in the same sleep before and
        after all that was seen between, they sleep at once, and nobody will end it.
        """
        sleeps: dict[int, int] = {}
        circle = self._search(self.rank, [], sleeps)
        look = self.loops["look"]
        if all(look(self.page(rank)) == sleeps[rank] for rank in circle):
            return sorted(circle)
        return []

    def _search(self, rank: int, path: list[int], sleeps: dict[int, int]) -> list[int]:
        """A circle that is found by going on from a rank that others wait for; none: there is none.

        Args:
            rank: to go on from.
            path: the ranks that led there, each of which waits for the next.
            sleeps: of all ranks that were seen, the number of the sleep they are in; 0: of none.
        """
        if rank in path:
            return path[path.index(rank) :]
        if rank in sleeps:  # seen before, and no circle leads through it
            return []
        look = self.loops["look"]
        sleeps[rank] = look(self.page(rank))
        if not sleeps[rank]:
            return []
        for other in self._bases:
            if other == rank:
                continue
            wanted = look(self.line(rank, other) + WANTS)
            if wanted and look(self.line(other, rank) + BEGUN) < wanted:
                circle = self._search(other, [*path, rank], sleeps)
                if circle:
                    return circle
        return []
