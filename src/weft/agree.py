"""The opening exchange of every call: everybody learns what everybody was asked to do.

Nothing that changes what is communicated may be decided from one rank's data, so each call opens
with a *statement* that every rank makes to every rank: a fingerprint (fields that must be equal on
all ranks), the error its caller made, if any, and a body of the call's own (sizes, samples, small
payloads). From the same statements every rank draws the same conclusion: either all go on, or all
raise the same text, and the next call works. Beside it a rank may tell each other rank something in
private, on which nothing may be decided but between those two.

Up to `DIRECT` ranks send their statements directly to each other: one round. Above that,
statements are combined pairwise, in ceil(log2 P) rounds of recursive doubling, the lower ranks
always on the left, so that all ranks end with the same bytes.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import WeftError
from .wire.base import Pending, Wire
from .wire.routine import Rooms

__all__ = [
    "BODY",
    "CAP",
    "DIRECT",
    "Agreement",
    "agree",
    "concluded",
    "is_direct",
    "opening_of",
    "rooms",
]

DIRECT = 16
"""Up to this many ranks exchange statements directly."""

BODY = 136 << 10
"""Bytes that a body may have, with what is said in private. Every rank receives at this cap,
whatever it is about to call."""

_FINGERPRINT = 1024  # bytes that a rank's may have
# bytes that fingerprints and errors may have, each: room for four of the longest. Of those that
# agree no call has more than three, by what is unknown to some; so one that differs is among them.
_TEXT = 4608
# number of the call; magic, bytes of: groups, error, body, what is said in private; whose error
_HEAD = struct.Struct("<Q4sIIIII")
_MAGIC = b"weft"
_ALIGNED = 16  # bytes, to a multiple of which a body begins: enough for any dtype
CAP = _HEAD.size + 2 * _TEXT + 2 * _ALIGNED + BODY
"""Bytes that a statement may have."""

_FIELD, _VALUE, _GROUP = "\x1d", "\x1e", "\x1f"
_UNKNOWN = "?"  # a field with this value agrees with every other
_SPELLED = 1 << 10  # fingerprints that are kept as they travel: training makes the same calls
_NAMED = 8  # ranks named for each differing value

_NOTHING = memoryview(b"")

Combine = Callable[[Tensor, Tensor], Tensor]

Private = Sequence[bytes | memoryview]
"""Pieces of what is said to one rank."""


@dataclass(slots=True)
class Agreement:
    """What came of it.

    Attributes:
        fields: the agreed fingerprint; a field that some ranks did not know has the others' value.
        said: the bodies, one for each rank where statements are direct, else the one combined body;
            valid until `release()`.
        private: what each rank said to this one alone, in rank order, its own not
            included; as `said`.
        fingerprints: what each rank stated as its own, as it travels, where statements are direct.
    """

    fields: dict[str, str]
    said: list[memoryview]
    private: list[memoryview]
    fingerprints: list[bytes]
    _release: Callable[[], None]

    @property
    def bodies(self) -> list[Tensor]:
        """What was said, as tensors: uint8, 1-D, of the same memory."""
        return [_tensor(body) for body in self.said]

    def release(self) -> None:
        """Give back the memory of the bodies. Twice is fine."""
        self._release()


@dataclass(slots=True)
class _Statement:
    number: int  # of the call; 0 where the fingerprint has it
    groups: bytes  # who said which fingerprint: `fields GROUP rank,rank,... count` for each
    error: bytes
    error_rank: int
    body: memoryview
    private: memoryview

    def pack(self) -> Callable[[Private], Tensor]:
        """Makes the messages, each with what is said in private to whom it is for."""
        groups, error, body = len(self.groups), len(self.error), len(self.body)
        gap, rest = -(_HEAD.size + groups + error) % _ALIGNED, -body % _ALIGNED
        common = b"".join([self.groups, self.error, bytes(gap), self.body, bytes(rest)])

        def message(private: Private) -> Tensor:
            size = sum(map(len, private))
            head = _HEAD.pack(self.number, _MAGIC, groups, error, body, size, self.error_rank)
            return torch.frombuffer(bytearray().join([head, common, *private]), dtype=torch.uint8)

        return message

    @classmethod
    def unpack(cls, message: Tensor) -> _Statement:
        raw = message.numpy().data
        number, magic, groups, error, body, private, rank = _HEAD.unpack_from(raw)
        if magic != _MAGIC:
            raise RuntimeError("what arrived is no statement of weft: the ranks are out of step")
        middle, end = _HEAD.size + groups, _HEAD.size + groups + error
        start = end + -end % _ALIGNED
        after = start + body + -body % _ALIGNED
        return cls(
            number,
            bytes(raw[_HEAD.size : middle]),
            bytes(raw[middle:end]),
            rank,
            raw[start : start + body],
            raw[after : after + private],
        )

    def numbered(self) -> _Statement:
        """The same, with the number of the call in its one fingerprint, as errors spell it."""
        fields, ranks, count = self.groups.decode().rsplit(_VALUE, 2)
        call, *rest = fields.split(_FIELD)
        fields = _FIELD.join([f"{call} (call {self.number} of the group)", *rest])
        groups = _VALUE.join([fields, ranks, count]).encode()
        return _Statement(0, groups, self.error, self.error_rank, self.body, self.private)


def _tensor(raw: memoryview) -> Tensor:
    return torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)


def is_direct(wire: Wire) -> bool:
    """Whether every rank hears every rank's own statement."""
    return wire.size <= DIRECT


def agree(
    wire: Wire,
    call: str,
    fields: Mapping[str, object],
    error: str | None,
    body: Tensor | bytearray,
    combine: Combine,
    *,
    meanwhile: Callable[[], object] = lambda: None,
    watch: Callable[[Pending], object] = lambda pending: None,
    private: Sequence[Private] | None = None,
) -> Agreement:
    """Exchange statements; collective.

    Args:
        wire: among whom.
        call: name of the call; ranks in different calls are told so.
        fields: what must be equal on all ranks, by name; None says that this rank does not know.
        error: what this rank's caller did wrong, in a sentence without the rank.
        body: uint8, 1-D, at most `BODY` bytes.
        combine: makes one body of two; the left one is of lower ranks. Only used, and only
            needed, where statements are not direct.
        meanwhile: local work to do while the statements are under way.
        watch: is told what is waited for, where statements are direct: one message of each rank.
        private: what to say to each rank, in rank order; with the body at most `BODY` bytes. Only
            where statements are direct.

    Raises:
        WeftError: a rank stated an error, or fingerprints differ; the same text on every rank.
        WireError: as every wait does.
    """
    wire.sequence += 1
    known = {"call": call, **_known(fields)}
    mine = _Statement(
        wire.sequence,
        _groups(tuple(known.items()), wire.named),
        b"" if error is None else f"rank {wire.named}: {error}".encode()[:_TEXT],
        wire.named,
        body.numpy().data if isinstance(body, Tensor) else memoryview(body),
        _NOTHING,
    )
    longest = len(mine.body) + max((sum(map(len, said)) for said in private or ()), default=0)
    if len(mine.groups) > _FINGERPRINT or longest > BODY:
        raise RuntimeError(f"a statement of {len(mine.groups)} + {longest} bytes is too long")
    release: Callable[[], None] = _nothing
    if wire.size == 1:
        meanwhile()
        said = [mine]
    elif is_direct(wire):
        pending = _directly(wire, mine, private)
        watch(pending)
        meanwhile()
        said = [_Statement.unpack(message) for message in pending.wait()]
        said.insert(wire.rank, mine)
        release = pending.release
    else:
        meanwhile()
        said = [_combining(wire, mine.numbered(), combine)]
    return _agreed(wire, known, mine, said, release)


def rooms(wire: Wire) -> Rooms:
    """Memory of a wire for whole statements of its peers, which routines on it share."""
    kept: Rooms = wire.kept.setdefault("statements", Rooms(CAP))
    return kept


def opening_of(fingerprint: bytes, named: int, body: bytes, size: int, private: int) -> bytes:
    """What a statement without an error begins with, but for the 8 bytes of the call's number.

    So that what a rank said before need not be put together, nor looked at, again.

    Args:
        fingerprint: as in an agreement.
        named: who makes the statement.
        body: what its body begins with.
        size: bytes of all its body.
        private: bytes of what is said in private, behind the body and a gap to the next 16.
    """
    head = _HEAD.pack(0, _MAGIC, len(fingerprint), 0, size, private, named)[8:]
    return b"".join([head, fingerprint, bytes(-(_HEAD.size + len(fingerprint)) % _ALIGNED), body])


def concluded(wire: Wire, messages: Sequence[Tensor]) -> Agreement:
    """What follows from whole statements, this rank's own included, in rank order.

    Raises:
        WeftError: as `agree`.
    """
    said = [_Statement.unpack(message) for message in messages]
    mine = said[wire.rank]
    known = _parse(mine.groups.decode().rsplit(_VALUE, 2)[0])
    return _agreed(wire, known, mine, said, _nothing)


def _known(fields: Mapping[str, object]) -> dict[str, str]:
    return {name: _UNKNOWN if value is None else str(value) for name, value in fields.items()}


@functools.lru_cache(_SPELLED)
def _groups(known: tuple[tuple[str, str], ...], named: int) -> bytes:
    text = _FIELD.join(f"{name}{_VALUE}{value}" for name, value in known)
    return f"{text}{_VALUE}{named}{_VALUE}1".encode()


def _agreed(
    wire: Wire,
    known: dict[str, str],
    mine: _Statement,
    said: list[_Statement],
    release: Callable[[], None],
) -> Agreement:
    try:
        if not _alike(said, mine):
            known = _conclude(wire, [each.numbered() if each.number else each for each in said])
    except WeftError:
        release()
        raise
    return Agreement(
        known,
        [each.body for each in said],
        [each.private for each in said],
        [each.groups for each in said],
        release,
    )


def _nothing() -> None:
    return None


def _directly(wire: Wire, mine: _Statement, private: Sequence[Private] | None) -> Pending:
    """From each to all; what is received comes in rank order, without this rank's own."""
    order = [rank for rank in range(wire.size) if rank != wire.rank]
    message = mine.pack()
    if private is None:
        same = message(())
        sends = [(peer, same) for peer in wire.peers]
    else:
        sends = [(peer, message(private[peer])) for peer in wire.peers]
    return wire.post_small(sends, [(peer, CAP) for peer in order])


def _alike(said: Sequence[_Statement], mine: _Statement) -> bool:
    """Whether nobody erred and all fingerprints are this one."""
    value, number = _VALUE.encode(), said[0].number
    text = (mine if number else mine.numbered()).groups.rsplit(value, 2)[0]
    if not number:  # of several ranks, perhaps with several fingerprints
        return not said[0].error and said[0].groups.rsplit(value, 2)[0] == text
    known = text + value  # behind it who says so
    return all(not s.error and s.number == number and s.groups.startswith(known) for s in said)


def _combining(wire: Wire, mine: _Statement, combine: Combine) -> _Statement:
    """Recursive doubling over neighbouring blocks of ranks, so that left is always lower."""
    core = 1 << (wire.size.bit_length() - 1)
    paired = 2 * (wire.size - core)  # the first ranks, two by two, speak with one voice
    rank = wire.rank

    def swap(peer: int, *, send: bool = True, receive: bool = True) -> _Statement | None:
        pending = wire.post([(peer, mine.pack()(()))] * send, [(peer, CAP)] * receive)
        got = pending.wait()
        other = _Statement.unpack(got[0].clone()) if receive else None
        pending.release()
        return other

    if rank < paired and rank % 2:
        swap(rank - 1, receive=False)
        answer = swap(rank - 1, send=False)
        assert answer is not None
        return answer
    if rank < paired:
        mine = _combined(mine, swap(rank + 1, send=False), combine)
    voice = rank // 2 if rank < paired else rank - paired // 2
    distance = 1
    while distance < core:
        other = voice ^ distance
        peer = 2 * other if other < paired // 2 else other + paired // 2
        theirs = swap(peer)
        lower, upper = (mine, theirs) if voice < other else (theirs, mine)
        assert lower is not None
        mine = _combined(lower, upper, combine)
        distance *= 2
    if rank < paired:
        swap(rank + 1, receive=False)
    return mine


def _combined(lower: _Statement, upper: _Statement | None, combine: Combine) -> _Statement:
    assert upper is not None
    first = lower if lower.error else upper
    groups = _join([lower, upper])
    # bodies of an erring rank, or of different calls, need not be what `combine` expects
    calls = {group.split(_FIELD, 1)[0].split(_VALUE)[1] for group in groups.decode().split(_GROUP)}
    body = lower.body
    if not first.error and len(calls) == 1:
        body = combine(_tensor(lower.body), _tensor(upper.body)).numpy().data
    return _Statement(0, groups, first.error, first.error_rank, body, _NOTHING)


def _join(said: list[_Statement]) -> bytes:
    """Who said which fingerprint, with equal fingerprints brought together."""
    groups: dict[str, tuple[list[str], int]] = {}
    for statement in said:
        for group in statement.groups.decode().split(_GROUP):
            fields, ranks, count = group.rsplit(_VALUE, 2)
            named, total = groups.get(fields, ([], 0))
            groups[fields] = ((named + ranks.split(","))[:_NAMED], total + int(count))
    kept = list(groups.items())
    while len(kept) > 1 and sum(len(fields) + 64 for fields, _ in kept) > _TEXT:
        kept.pop()
    return _GROUP.join(
        f"{fields}{_VALUE}{','.join(ranks)}{_VALUE}{count}" for fields, (ranks, count) in kept
    ).encode()


def _conclude(wire: Wire, said: list[_Statement]) -> dict[str, str]:
    """The agreed fields; raises what every rank raises."""
    agreed = None if any(each.error for each in said) else _filled(said)
    if agreed is not None:
        return agreed
    error = min((s for s in said if s.error), key=lambda s: s.error_rank, default=None)
    groups = [group.rsplit(_VALUE, 2) for group in _join(said).decode().split(_GROUP)]
    who = [(_parse(fields), ranks.split(","), int(count)) for fields, ranks, count in groups]
    differing = [] if len(who) == 1 else _differences(who)
    if differing:  # someone may have made more calls than others: go on from the last of them
        numbers = [fields["call"].rsplit("(call ", 1)[1].split(" ")[0] for fields, _, _ in who]
        wire.sequence = max(map(int, numbers))
    if error is not None:
        raise WeftError(error.error.decode(errors="replace"))
    if differing:
        raise WeftError("; ".join(differing))
    return {
        name: next((f[name] for f, _, _ in who if f.get(name, _UNKNOWN) != _UNKNOWN), _UNKNOWN)
        for name in dict.fromkeys(name for fields, _, _ in who for name in fields)
    }


def _filled(said: list[_Statement]) -> dict[str, str] | None:
    """The agreed fields, where ranks differ at most in what some do not know; else None."""
    texts = {
        group.rsplit(_VALUE, 2)[0] for each in said for group in each.groups.decode().split(_GROUP)
    }
    agreed: dict[str, str] = {}
    for fields in map(_parse, texts):
        for name, value in fields.items():
            if agreed.get(name, _UNKNOWN) == _UNKNOWN:
                agreed[name] = value
            elif value not in (_UNKNOWN, agreed[name]):
                return None
    return agreed


def _parse(fields: str) -> dict[str, str]:
    return dict(f.split(_VALUE, 1) for f in fields.split(_FIELD))


def _differences(who: list[tuple[dict[str, str], list[str], int]]) -> list[str]:
    """A sentence for each field in which ranks differ, or only for the call if that does."""
    texts = []
    for name in dict.fromkeys(name for fields, _, _ in who for name in fields):
        holders: dict[str, tuple[list[str], int]] = {}
        for fields, ranks, count in who:
            value = fields.get(name, _UNKNOWN)
            if value != _UNKNOWN:
                named, total = holders.get(value, ([], 0))
                holders[value] = (named + ranks, total + count)
        if len(holders) > 1:
            values = ", ".join(
                f"{_ranks(ranks, count)} {'has' if count == 1 else 'have'} {value}"
                for value, (ranks, count) in sorted(
                    holders.items(), key=lambda item: min(map(int, item[1][0]))
                )
            )
            if name == "call":
                return [
                    f"the ranks are in different calls: {values}; make the same calls in the "
                    "same order on every rank"
                ]
            texts.append(f"the ranks differ in {name}: {values}; pass the same on every rank")
    return texts


def _ranks(ranks: list[str], count: int) -> str:
    named = sorted(map(int, ranks))[:_NAMED]
    more = f" and {count - len(named)} more" if count > len(named) else ""
    return f"{'rank' if count == 1 else 'ranks'} {', '.join(map(str, named))}{more}"
