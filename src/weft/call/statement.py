"""The statement: what a rank says to all others as it comes to a call, byte by byte.

head       see `_HEAD`: how long each part is, whose it is, and of which call
text       the fingerprint (`fingerprint.encoded`); in a message of several statements it may
           be left out where it is that of the statement before
error      what a caller did wrong, in a sentence that names its rank; empty: nothing
gap        zeros up to a multiple of 16 bytes from the start
body       what the call says of its own: sizes, a sample, small payloads
gap        as above
private    what is said to the rank that reads this or, where several read the same message, to
           each of them (`private_parts`)
gap        as above, if another statement follows
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from .fingerprint import Fields, encoded, fields_in

DIRECT = 16
"""Ranks: of so many, and fewer, each tells all others its own statement; more pass on bundles."""

BODY = 136 << 10
"""Bytes that a body may have, with what is said in private."""

_BODY_OF_MANY = 2 << 10  # bytes: of 1,024 ranks together no more than of 16 with the largest bodies

ERROR = 5120
"""Bytes that an error may have."""

LONGEST = 1152
"""Bytes that a fingerprint may have."""

# magic; bytes of: text, error, body, what is said in private; the rank; number of the call; whether
# the rank watches who has come, records gradients, and has them enabled; the digest
_HEAD = struct.Struct("<4sIIIIIQ???q")
_MAGIC = b"weft"
_ALIGNED = 16  # bytes, to a multiple of which a body begins: enough for any dtype

CAP = _HEAD.size + LONGEST + ERROR + 2 * _ALIGNED + BODY
"""Bytes that a statement may have; every rank receives at this cap, whatever it will call."""

_NOTHING = memoryview(b"")

Bytes = bytes | bytearray | memoryview

Private = Sequence[Bytes]
"""Pieces of what is said to one rank."""


def room(ranks: int) -> int:
    """Bytes that a body should have at most, where so many ranks state one: what is larger goes by
    an exchange of its own."""
    return BODY if ranks <= DIRECT else _BODY_OF_MANY


class Statement(NamedTuple):
    """What one rank states.

    Attributes:
        rank: that states it, as the group of the call numbers it.
        number: of the call, on that rank.
        fields: the fingerprint of the call.
        error: of a caller, as it travels; empty: there is none.
        body: the call's own.
        private: what is said to one rank or, as it travels in a meeting, to each.
        watched: whether the rank watches who has come.
        records, enabled: the state of autograd there, see `Mode`.
        digest: of something that may differ, to be compared.
    """

    rank: int
    number: int
    fields: Fields
    error: bytes
    body: memoryview
    private: memoryview = _NOTHING
    watched: bool = False
    records: bool = False
    enabled: bool = True
    digest: int = 0

    @property
    def members(self) -> str:
        """The ranks of the call, in words."""
        return self.fields[1][1]

    @property
    def place(self) -> str:
        """Where the rank is, as a clause."""
        return f"is in call {self.number} ({self.fields[0][1]}) of {self.members}"

    def pack(self, private: Private = (), *, repeats: bool = False) -> bytearray:
        """The message to a rank, with what is said to it in private.

        Args:
            private: that.
            repeats: whether the statement before it in a message has the same fingerprint.

        Raises:
            RuntimeError: it is longer than a statement may be.
        """
        rank, number, fields, error, body, _, *rest = self
        own = body.nbytes
        more = sum(map(len, private))
        if own + more > BODY:
            raise RuntimeError(f"a statement of {own + more} bytes")
        text = b"" if repeats else encoded(fields)
        head = _HEAD.pack(_MAGIC, len(text), len(error), own, more, rank, number, *rest)
        gap = bytes(-(_HEAD.size + len(text) + len(error)) % _ALIGNED)
        return bytearray().join([head, text, error, gap, body, bytes(-own % _ALIGNED), *private])


def unpack(raw: memoryview, like: Fields) -> dict[int, Statement]:
    """The statements in a message, by rank; the fingerprint `like` is not parsed.

    Raises:
        ValueError, struct.error: there is something else in it.
    """
    found: dict[int, Statement] = {}
    fields = like
    expected = encoded(like)
    length = raw.nbytes
    begin = 0
    while begin < length or not found:
        magic, text, error, body, private, rank, number, *rest = _HEAD.unpack_from(raw, begin)
        middle = begin + _HEAD.size + text
        end = middle + error
        start = end + -end % _ALIGNED
        after = start + body + -body % _ALIGNED
        if magic != _MAGIC or after + private > length:
            head = bytes(raw[begin : begin + _HEAD.size])
            raise ValueError(f"{head.hex()}, of {length - begin} bytes")
        spelled = raw[begin + _HEAD.size : middle]
        if text or not found:  # else those of the statement before
            fields = like if spelled == expected else fields_in(bytes(spelled).decode())
        found[rank] = Statement(
            rank,
            number,
            fields,
            bytes(raw[middle:end]),
            raw[start : start + body],
            raw[after : after + private],
            *rest,
        )
        begin = after + private + -private % _ALIGNED
    return found


def private_parts(of_ranks: Sequence[Private]) -> Private:
    """What is said to each rank in private, as one text that all of them read: first the lengths.

    So it is said in a meeting, where all read one message.
    """
    lengths = [sum(map(len, pieces)) for pieces in of_ranks]
    parts: list[Bytes] = [struct.pack(f"<{len(lengths)}q", *lengths)]
    for pieces, length in zip([(), *of_ranks], [len(parts[0]), *lengths], strict=True):
        parts += [*pieces, bytes(-length % _ALIGNED)]
    return parts


def private_part(rank: int, ranks: int, parts: memoryview) -> memoryview:
    """What `private_parts` put there for one rank, of so many. Raises ValueError, struct.error."""
    lengths = struct.unpack_from(f"<{ranks}q", parts)
    start = sum(-(-length // _ALIGNED) * _ALIGNED for length in (8 * ranks, *lengths[:rank]))
    end = start + lengths[rank]
    if min(lengths) < 0 or end > len(parts):
        raise ValueError(f"{len(parts)} bytes for {lengths}")
    return parts[start:end]
