"""The statement: what a rank says to all others as it comes to a call, byte by byte.

    head       see `_HEAD`: how long each part is, whose it is, and of which call
    text       the fingerprint of one rank (`fingerprint.encoded`) or, of several, their cohorts
               (`fingerprint.written`)
    error      what a caller did wrong, in a sentence that names its rank; empty: nothing
    gap        zeros up to a multiple of 16 bytes from the start
    body       what the call says of its own: sizes, a sample, small payloads
    gap        as above
    private    what is said to the rank that reads this or, where several read the same message, to
               each of them (`privately`)

Statements of several ranks combine to one, of all of them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .fingerprint import Cohort, Fields, cohorts_in, encoded, fields_in, joined, written

BODY = 136 << 10
"""Bytes that a body may have, with what is said in private. Every rank receives at this cap,
whatever it is about to call."""

TEXT = 5120
"""Bytes that fingerprints and errors may have, each: room for four of the longest. The fingerprints
of a call that agree come in three forms at most, by the fields that ranks do not know: so there is
room for one that differs."""

# magic; bytes of: text, error, body, what is said in private; number of the call, of one rank;
# whose it is, of several whose error; whether it is of one rank; whether one of several is watched
_HEAD = struct.Struct("<4sIIIIQI??")
_MAGIC = b"weft"
_ALIGNED = 16  # bytes, to a multiple of which a body begins: enough for any dtype

CAP = _HEAD.size + 2 * TEXT + 2 * _ALIGNED + BODY
"""Bytes that a statement may have."""

_NOTHING = memoryview(b"")

Bytes = bytes | bytearray | memoryview

Combine = Callable[[memoryview, memoryview], Bytes]
"""Makes one body of two, of which the first is of lower ranks; raises any Exception if one is
invalid."""

Private = Sequence[Bytes]
"""Pieces of what is said to one rank."""


@dataclass(frozen=True, slots=True)
class Statement:
    """What one rank states, or some together.

    Attributes:
        cohorts: who states which fingerprint.
        error: of a caller, as it travels; empty: there is none.
        error_rank: whose error it is; without an error some rank of these.
        body: the call's own.
        private: what is said to one rank or, as it travels in a meeting, to each.
        watched: whether some of the ranks watch who has come.
    """

    cohorts: tuple[Cohort, ...]
    error: bytes
    error_rank: int
    body: memoryview
    private: memoryview = _NOTHING
    watched: bool = False

    def pack(self, private: Private = ()) -> bytearray:
        """The message to a rank, with what is said to it in private.

        Raises:
            RuntimeError: it is longer than a statement may be.
        """
        own = len(self.body)
        more = sum(map(len, private))
        if own + more > BODY:
            raise RuntimeError(f"a statement of {own + more} bytes")
        first = self.cohorts[0]
        is_of_one = len(self.cohorts) == first.total == 1
        text = encoded(first.fields) if is_of_one else written(self.cohorts)
        head = _HEAD.pack(
            _MAGIC,
            len(text),
            len(self.error),
            own,
            more,
            first.number,
            self.error_rank,
            is_of_one,
            self.watched,
        )
        gap = bytes(-(len(head) + len(text) + len(self.error)) % _ALIGNED)
        rest = bytes(-own % _ALIGNED)
        return bytearray().join([head, text, self.error, gap, self.body, rest, *private])

    @classmethod
    def unpack(cls, raw: memoryview, like: Fields) -> Statement:
        """The statement in a message. One with the fingerprint `like` is not parsed for it.

        Raises:
            ValueError, struct.error: there is none.
        """
        magic, text, error, body, private, number, rank, is_of_one, watched = _HEAD.unpack_from(raw)
        middle = _HEAD.size + text
        end = middle + error
        start = end + -end % _ALIGNED
        after = start + body + -body % _ALIGNED
        if magic != _MAGIC or after + private > len(raw):
            raise ValueError(f"{bytes(raw[: _HEAD.size]).hex()}, of {len(raw)} bytes")
        said = raw[_HEAD.size : middle]
        if not is_of_one:
            cohorts = cohorts_in(bytes(said))
        else:
            fields = like if said == encoded(like) else fields_in(bytes(said).decode())
            cohorts = (Cohort(fields, (rank,), 1, number),)
        return cls(
            cohorts,
            bytes(raw[middle:end]),
            rank,
            raw[start : start + body],
            raw[after : after + private],
            watched,
        )

    def without_body(self) -> Statement:
        """The same, of the call alone: nothing but whose it is."""
        return Statement(self.cohorts, b"", self.error_rank, _NOTHING)

    def with_upper(self, upper: Statement, combine: Combine) -> Statement:
        """This one and that of higher ranks, as one of all of these."""
        first = self if self.error else upper
        cohorts = joined([*self.cohorts, *upper.cohorts], TEXT)
        # bodies of an erring rank, or of different calls, need not be what `combine` expects
        body = self.body
        if not first.error and len({cohort.fields[0] for cohort in cohorts}) == 1:
            body = memoryview(combine(self.body, upper.body))
        watched = self.watched or upper.watched
        return Statement(cohorts, first.error, first.error_rank, body, watched=watched)


def privately(said: Sequence[Private]) -> Private:
    """What is said to each rank in private, as one text that all of them read: first the lengths.

    So it is said in a meeting, where all read one message.
    """
    lengths = [sum(map(len, each)) for each in said]
    parts: list[Bytes] = [struct.pack(f"<{len(lengths)}q", *lengths)]
    for each, length in zip([(), *said], [len(parts[0]), *lengths], strict=True):
        parts += [*each, bytes(-length % _ALIGNED)]
    return parts


def said_to(rank: int, ranks: int, said: memoryview) -> memoryview:
    """What `privately` put there for one rank, of so many. Raises ValueError, struct.error."""
    lengths = struct.unpack_from(f"<{ranks}q", said)
    start = sum(-(-length // _ALIGNED) * _ALIGNED for length in (8 * ranks, *lengths[:rank]))
    end = start + lengths[rank]
    if min(lengths) < 0 or end > len(said):
        raise ValueError(f"{len(said)} bytes for {lengths}")
    return said[start:end]
