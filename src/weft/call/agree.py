"""The opening exchange of every call: everybody learns what everybody was asked to do.

Nothing that changes what is communicated may be decided from one rank's data, so each call opens
with a *statement* that every rank makes to every rank: a fingerprint (fields that must be equal on
all ranks), the error its caller made, if any, and a body of the call's own (sizes, samples, small
payloads). From the same statements every rank draws the same conclusion: either all go on, or all
raise the same text, and the next call works. Beside it a rank may tell each other rank something in
private, on which nothing may be decided but between those two.

Up to `DIRECT` ranks send their statements directly to each other: one round. Above that,
statements are combined pairwise, in log2 P rounds of recursive doubling (if P is no power of two,
those of the next lower one and two more), the lower ranks always on the left, so that all ranks end
with the same bytes.

Every statement says among which ranks it is, in their order. Where two ranks are in calls of
different groups, such as one in a call of all and the other in one of a subset, their statements
meet, and no later message of either call would find its own. So this ends the group, with an error
that has both calls.

What arrives is checked before it is used: bytes that are no statement end the group with an error
that names the rank that sent them.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..base.arguments import in_words, printable
from ..base.errors import WeftError, WireError
from ..base.memory import tensor_of
from ..failure.verdict import NAMED, crossed, differing
from ..group.channels import SMALL
from ..group.group import Group, check_members
from ..group.pending import Awaited, Pending
from .telling import Telling, tell

T = TypeVar("T")

DIRECT = 16
"""Up to this many ranks exchange statements directly."""

BODY = 136 << 10
"""Bytes that a body may have, with what is said in private. Every rank receives at this cap,
whatever it is about to call."""

_FINGERPRINT = 1152  # bytes that a rank's may have
# bytes that fingerprints and errors may have, each: room for four of the longest. The fingerprints
# of a call that agree come in three forms at most, by the fields that ranks do not know: so there
# is room for one that differs.
_TEXT = 5120
# magic; bytes of: text, error, body, what is said in private; number of the call; whose it is, or
# its error; whether it is of one rank, whether it is watched
_HEAD = struct.Struct("<4sIIIIQI??")
_MAGIC = b"weft"
_ALIGNED = 16  # bytes, to a multiple of which a body begins: enough for any dtype
CAP = _HEAD.size + 2 * _TEXT + 2 * _ALIGNED + BODY
"""Bytes that a statement may have."""

_FIELD, _VALUE, _COHORT = "\x1d", "\x1e", "\x1f"
_CALL, _MEMBERS = "call", "ranks"  # the names of the first two fields
_UNKNOWN = "?"  # a field with this value agrees with every other
_SPELLED = 1 << 10  # fingerprints that are kept as they travel: training makes the same calls

_NOTHING = memoryview(b"")

Combine = Callable[[Tensor, Tensor], Tensor]

Private = Sequence[bytes | memoryview]
"""Pieces of what is said to one rank."""


@dataclass(slots=True)
class Agreement:
    """The result of an opening exchange.

    Attributes:
        number: of the call, among those that the ranks of the group agreed on.
        fields: the agreed fingerprint; a field that some ranks did not know has the others' value.
        private: what each rank said to this one alone, in rank order, its own not
            included; valid until `release()`.
        release: gives back the memory of the bodies. Twice is fine.
    """

    number: int
    fields: dict[str, str]
    private: list[memoryview]
    _group: Group
    _heard: list[tuple[int, _Statement]]
    _own: memoryview  # this rank's body
    release: Callable[[], None]

    def read(self, decode: Callable[..., T], *given: Any, own: T | None = None) -> list[T]:
        """`decode(body, *given)` of each of the bodies, which are memoryviews.

        There is one for each rank where statements are direct, else the one combined body; they
        are valid until `release()`. `own`: what this rank's own says, which is not decoded then.

        Raises:
            WireError: as `decoded`.
        """
        found = []
        for peer, each in self._heard:
            if own is not None and each.body is self._own:
                found.append(own)
            else:
                found.append(self._group.decode(peer, "a statement", decode, each.body, *given))
        return found

    def check_whose(self, whose: Sequence[Collection[int]]) -> None:
        """Check that each rank stated what is its own, where statements are direct.

        Args:
            whose: for each rank the ranks, by their numbers in errors, of which its body is.

        Raises:
            WireError: a rank stated another's.
        """
        for rank, said in enumerate(whose):
            name = self._group.rank_in_errors(rank)
            if not set(said) <= {name}:
                text = f"rank {name} sent a statement that is not its own"
                raise self._group.fail(rank, text)

    def field(self, name: str, decode: Callable[[str], T]) -> T:
        """The value of a field, which some rank may have learned from others only.

        Raises:
            WeftError: no rank knows the value.
            WireError: as `decoded`.
        """
        value = self.fields[name]
        if value == _UNKNOWN:
            raise WeftError(f"no rank says what the {name} is")
        told = (p for p, each in self._heard for g in each.cohorts if (name, value) in g.fields)
        return self._group.decode(next(told), f"the field {name!r}", decode, value)


_Fields = tuple[tuple[str, str], ...]
"""A fingerprint: name and value of each field; the call and its ranks (`Group.members`) first."""


class _Cohort(NamedTuple):
    """Ranks that state the same fingerprint; the first few are named, all are counted. It is the
    call of that number on the rank that has made most."""

    fields: _Fields
    ranks: tuple[int, ...]
    total: int
    number: int

    @property
    def members(self) -> str:
        """The ranks of the call, in words."""
        return self.fields[1][1]

    @property
    def place(self) -> str:
        """Where these ranks are, as a clause."""
        return f"is in call {self.number} ({self.fields[0][1]}) of {self.members}"

    def spelled(self) -> str:
        """As it travels."""
        ranks = ",".join(map(str, self.ranks[:NAMED]))
        return _FIELD.join([_spelled(self.fields), ranks, str(self.total), str(self.number)])


def _stated(fields: Mapping[str, object]) -> _Fields:
    """Fields as they travel."""
    values = (_UNKNOWN if value is None else printable(str(value)) for value in fields.values())
    return tuple(zip(fields, values, strict=True))


@functools.lru_cache(_SPELLED)
def _spelled(fields: _Fields) -> str:
    return _FIELD.join(f"{name}{_VALUE}{value}" for name, value in fields)


@functools.lru_cache(_SPELLED)
def _encoded(fields: _Fields) -> bytes:
    return _spelled(fields).encode()


@functools.lru_cache(_SPELLED)
def _fields_in(text: str) -> _Fields:
    """What `_spelled` made that of; raises ValueError if it was not."""
    fields = tuple((name, value) for name, value in (s.split(_VALUE) for s in text.split(_FIELD)))
    names = [name for name, _ in fields[:2]]
    if names != [_CALL, _MEMBERS]:
        raise ValueError(f"it states {names}")
    return fields


def _cohorts_in(raw: bytes) -> tuple[_Cohort, ...]:
    """What `_written` made that of; raises ValueError if it was not."""
    cohorts = []
    for text in raw.decode().split(_COHORT):
        fields, ranks, count, number = text.rsplit(_FIELD, 3)
        if int(number) < 0:
            raise ValueError(f"it is of call {number}")
        named = tuple(map(int, ranks.split(",")))
        cohorts.append(_Cohort(_fields_in(fields), named, int(count), int(number)))
    return tuple(cohorts)


def _written(cohorts: Sequence[_Cohort]) -> bytes:
    return _COHORT.join(cohort.spelled() for cohort in cohorts).encode()


@dataclass(frozen=True, slots=True)
class _Statement:
    cohorts: tuple[_Cohort, ...]
    error: bytes
    error_rank: int
    body: memoryview
    private: memoryview = _NOTHING
    watched: bool = False  # some of the ranks watch who has come

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
        text = _encoded(first.fields) if is_of_one else _written(self.cohorts)
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
        parts = [head, text, self.error, gap, self.body, rest, *private]
        return bytearray().join(parts)

    @classmethod
    def unpack(cls, raw: memoryview, like: _Fields) -> _Statement:
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
            cohorts = _cohorts_in(bytes(said))
        else:
            fields = like if said == _encoded(like) else _fields_in(bytes(said).decode())
            cohorts = (_Cohort(fields, (rank,), 1, number),)
        return cls(
            cohorts,
            bytes(raw[middle:end]),
            rank,
            raw[start : start + body],
            raw[after : after + private],
            watched,
        )

    def check_ranks(self, among: Collection[int]) -> None:
        """Check that it is a statement of some of these ranks.

        Raises:
            ValueError: it is not.
        """
        if self.error_rank not in among:
            raise ValueError(f"it has an error of rank {self.error_rank}")
        for ranks, total in ((cohort.ranks, cohort.total) for cohort in self.cohorts):
            known = ranks == among or set(ranks) <= set(among)
            if not known or not len(ranks) <= total <= len(among):
                raise ValueError(f"it is of {total} ranks, {ranks}")


def is_direct(group: Group) -> bool:
    """Whether every rank hears every rank's own statement."""
    return group.size <= DIRECT


def opening_rounds(ranks: int) -> int:
    """How many messages so many ranks wait for, one after the other, to open a call.

    Example:
        >>> [opening_rounds(ranks) for ranks in (1, 2, 16, 17, 64)]
        [0, 1, 1, 6, 6]
    """
    if ranks <= DIRECT:
        return min(1, ranks - 1)
    doublings = ranks.bit_length() - 1
    return doublings if ranks == 1 << doublings else doublings + 2  # see `_combining`


def opening_peers(rank: int, ranks: int) -> list[int]:
    """To which others a rank sends its statement, to open a call of so many ranks.

    Example:
        >>> opening_peers(0, 4)
        [1, 2, 3]
        >>> opening_peers(0, 24)  # it speaks for rank 1, too
        [1, 2, 4, 8, 16]
    """
    if ranks <= DIRECT:
        return [other for other in range(ranks) if other != rank]
    partner, others = _partners(rank, ranks)
    return others if partner is None else [partner, *others]


def _partners(rank: int, ranks: int) -> tuple[int | None, list[int]]:
    """With whom a rank swaps statements in recursive doubling.

    The number of those that do it is a power of two. So the first ranks do it in pairs, in each of
    which the lower one speaks for both.

    Returns:
        The other one of a pair, if there is one; and with whom it swaps, in this order: nobody if
        another one speaks for it.
    """
    core = 1 << (ranks.bit_length() - 1)
    paired = 2 * (ranks - core)
    if rank < paired and rank % 2:
        return rank - 1, []
    partner = rank + 1 if rank < paired else None
    voice = rank // 2 if rank < paired else rank - paired // 2
    others = []
    for power in range(core.bit_length() - 1):
        other = voice ^ 1 << power
        others.append(2 * other if other < paired // 2 else other + paired // 2)
    return partner, others


def agree(
    group: Group,
    call: str,
    fields: Mapping[str, object],
    error: str | None,
    body: Tensor | bytearray,
    combine: Combine,
    *,
    watch: Callable[[Awaited], object] | None = None,
    private: Sequence[Private] | None = None,
) -> Agreement:
    """Exchange statements; collective.

    Args:
        group: among whom.
        call: name of the call; ranks in different calls are told so.
        fields: what must be equal on all ranks, by name; None says that this rank does not know.
        error: what this rank's caller did wrong, in a sentence without the rank.
        body: uint8, 1-D, at most `BODY` bytes.
        combine: makes one body of two; the left one is of lower ranks. Only used, and only
            needed, where statements are not direct.
        watch: is told what is waited for: something of each rank. Where statements are not
            direct, it is an empty one beside them, which tells who has come.
        private: what to say to each rank, in rank order. With the body at most `BODY` bytes; that
            to all `near` ranks together, too. Only where statements are direct.

    Raises:
        WeftError: a rank stated an error, or fingerprints differ; the same text on every rank.
        WireError: as every wait does; also where a peer sent something else than a statement.
        RuntimeError: the body is larger than a statement may be.
    """
    name = group.rank_in_errors(group.rank)
    known: _Fields = ((_CALL, printable(call)), (_MEMBERS, group.members))
    if error is None:  # else nobody needs the fields
        try:
            known += _stated(fields)
        except Exception as trouble:  # a value is the caller's, and may have no text
            error = in_words(trouble)
        if len(_encoded(known)) > _FINGERPRINT:
            known = known[:2]
            error = "the arguments are too long to be told to the other ranks: pass shorter ones"
    mine = _Statement(
        (_Cohort(known, (name,), 1, group.worker.calls),),
        b"" if error is None else f"rank {name}: {error}".encode(errors="backslashreplace")[:_TEXT],
        name,
        body.numpy().data if isinstance(body, Tensor) else memoryview(body),
        watched=watch is not None,
    )
    is_first = group.worker.enter(group.global_ranks, group.members, known)
    if group.size == 1:
        return _agreed(group, mine, [(0, mine)])
    if not is_direct(group):
        agreement = _agreed(group, mine, [_combined_and_watched(group, mine, combine, watch)])
        for field, _ in known:  # whose names the last that came may not have
            agreement.fields.setdefault(field, _UNKNOWN)
        return agreement
    telling = _tell(group, mine, private, opens=is_first)
    if watch is not None:
        watch(telling)
    said = [
        mine
        if peer == group.rank
        else _heard(group, mine, peer, message, (group.rank_in_errors(peer),))
        for peer, message in enumerate(telling.wait())
    ]
    agreement = _agreed(group, mine, [*enumerate(said)], telling.release)
    if private is not None:
        for peer in group.near:
            agreement.private[peer] = group.decode(
                peer, "a statement", _said_to, group.rank, group.size, said[peer].private
            )
    return agreement


def confess(
    group: Group, call: str, trouble: BaseException | None, lacking: str | None = None
) -> None:
    """Tell each other what went wrong on this rank, if anything did; collective.

    Args:
        group: the ranks that take part.
        call: name of the call.
        trouble: what was raised here.
        lacking: what else is wrong here.

    Raises:
        WeftError: something went wrong on some rank; the same text on every rank.
    """
    if isinstance(trouble, WeftError):
        name = group.rank_in_errors(group.rank)
        lacking = str(trouble).removeprefix(f"rank {name}: ")  # which is said for all
    elif trouble is not None:
        lacking = in_words(trouble)
    nothing = torch.empty(0, dtype=torch.uint8)
    try:
        agree(group, call, {}, lacking, nothing, lambda lower, upper: lower).release()
    except WeftError as error:
        raise error from trouble


@contextmanager
def preparing(group: Group, call: str) -> Iterator[None]:
    """Tell all ranks what is raised in this block, which makes a call of a caller's arguments.

    These may raise anything wherever they are looked at. If this rank alone raised it, the others
    would wait for it in the call.

    Raises:
        WeftError: as `confess`.
    """
    try:
        yield
    except WireError:
        raise
    except Exception as error:
        group.worker.call(call, functools.partial(confess, group, call, error))  # raises


def _tell(
    group: Group, mine: _Statement, private: Sequence[Private] | None, *, opens: bool
) -> Telling:
    """Start telling all ranks this rank's statement, and each what is said to it in private."""
    if private is None:
        return tell(group, mine.pack(), CAP, opens=opens)
    far = [peer for peer in group.peers if peer not in group.near]
    to_far = {peer: mine.pack(private[peer]) for peer in far}
    to_near = [said if peer in group.near else () for peer, said in enumerate(private)]
    message = mine.pack(_in_one(to_near))
    return tell(group, message, CAP, to_far=to_far, opens=opens)


def _in_one(private: Sequence[Private]) -> Private:
    """What is said to each rank as what is said to all: the lengths, and then the texts."""
    lengths = [sum(map(len, said)) for said in private]
    parts: list[bytes | memoryview] = [struct.pack(f"<{len(lengths)}q", *lengths)]
    for said, length in zip([(), *private], [len(parts[0]), *lengths], strict=True):
        parts += [*said, bytes(-length % _ALIGNED)]
    return parts


def _said_to(rank: int, size: int, said: memoryview) -> memoryview:
    """What `_in_one` put there for one rank, of so many. Raises ValueError, struct.error."""
    lengths = struct.unpack_from(f"<{size}q", said)
    start = sum(-(-length // _ALIGNED) * _ALIGNED for length in (8 * size, *lengths[:rank]))
    end = start + lengths[rank]
    if min(lengths) < 0 or end > len(said):
        raise ValueError(f"{len(said)} bytes for {lengths}")
    return said[start:end]


def _heard(
    group: Group, mine: _Statement, peer: int, message: memoryview, among: Collection[int]
) -> _Statement:
    """What a peer stated for some of these ranks, in the call in which this rank is, too."""
    own = mine.cohorts[0].fields
    statement = group.decode(peer, "a statement", _Statement.unpack, message, own)
    first = statement.cohorts[0]
    if first.fields is own and first.ranks == among:  # it says the same, and is the peer's alone
        return statement
    for cohort in statement.cohorts:
        if cohort.fields is not own and cohort.members != group.members:
            group.decode(peer, "a statement", check_members, cohort.members, group.session.size)
            calls = {
                group.rank_in_errors(group.rank): mine.cohorts[0].place,
                group.rank_in_errors(peer): cohort.place,
            }
            raise group.session.fail(None, crossed(calls))
    group.decode(peer, "a statement", statement.check_ranks, among)
    return statement


def _agreed(
    group: Group,
    mine: _Statement,
    heard: list[tuple[int, _Statement]],
    release: Callable[[], None] = lambda: None,
) -> Agreement:
    """The conclusion from statements and who sent them; raises what every rank raises."""
    said = [statement for _, statement in heard]
    fields = said[0].cohorts[0].fields
    differ = False
    number = 0
    for each in said:
        differ |= each.error != b""
        for cohort in each.cohorts:
            differ = differ or cohort.fields != fields
            number = max(number, cohort.number)
    # a rank that calls of some of the ranks left out goes on from the others' number
    group.worker.calls = number
    try:
        agreed = _conclude(said) if differ else dict(fields)
    except WeftError:
        release()
        raise
    private = [each.private for each in said]
    return Agreement(number, agreed, private, group, heard, mine.body, release)


def _combined_and_watched(
    group: Group,
    mine: _Statement,
    combine: Combine,
    watch: Callable[[Awaited], object] | None,
) -> tuple[int, _Statement]:
    """As `_combining`; if any rank watches who comes, every rank sends every rank an empty message.

    A rank that watches does so first, and the others once they have heard of it: also those that
    are in another call, so that none of these messages is left over.
    """
    notices = None
    if watch is not None:
        notices = _notices(group)
        watch(notices)
    peer, said = _combining(group, mine, combine)
    if said.watched:
        notices = notices or _notices(group)
        notices.wait()
        notices.release()
    return peer, said


def _notices(group: Group) -> Pending:
    """Start to tell every rank that this one has come, and to hear it of every rank."""
    nothing = torch.empty(0, dtype=torch.uint8)
    sends = [(peer, nothing) for peer in group.peers]
    return group.post(sends, [(peer, 0) for peer in sorted(group.peers)], SMALL)


def _combining(group: Group, mine: _Statement, combine: Combine) -> tuple[int, _Statement]:
    """Recursive doubling over neighbouring blocks of ranks, so that left is always lower.

    Returns:
        What all stated, and who sent the last of it.
    """
    rank = group.rank
    partner, others = _partners(rank, group.size)
    among = frozenset(map(group.rank_in_errors, range(group.size)))

    def swap(peer: int) -> _Statement:
        telling = tell(group, mine.pack(), CAP, to=[peer])
        said = telling.wait()[peer > rank]
        other = _heard(group, mine, peer, memoryview(bytearray(said)), among)
        telling.release()
        return other

    def united(peer: int, lower: _Statement, upper: _Statement) -> _Statement:
        return group.decode(peer, "a statement", _combined, lower, upper, combine)

    if partner is not None and partner < rank:  # which speaks for this rank
        swap(partner)
        return partner, swap(partner)
    if partner is not None:
        mine = united(partner, mine, swap(partner))
    for peer in others:
        theirs = swap(peer)
        lower, upper = (mine, theirs) if rank < peer else (theirs, mine)
        mine = united(peer, lower, upper)
    if partner is not None:
        swap(partner)
    return others[-1], mine


def _combined(lower: _Statement, upper: _Statement, combine: Combine) -> _Statement:
    first = lower if lower.error else upper
    cohorts = _join([lower, upper])
    # bodies of an erring rank, or of different calls, need not be what `combine` expects
    body = lower.body
    if not first.error and len({cohort.fields[0] for cohort in cohorts}) == 1:
        body = combine(tensor_of(lower.body), tensor_of(upper.body)).numpy().data
    watched = lower.watched or upper.watched
    return _Statement(cohorts, first.error, first.error_rank, body, watched=watched)


def _join(said: Sequence[_Statement]) -> tuple[_Cohort, ...]:
    """Who said which fingerprint, with equal fingerprints brought together."""
    found: dict[_Fields, _Cohort] = {}
    for cohort in (cohort for statement in said for cohort in statement.cohorts):
        found[cohort.fields] = _united(found.get(cohort.fields), cohort)
    kept = tuple(found.values())
    while len(kept) > 1 and len(_written(kept)) > _TEXT:
        kept = kept[:-1]
    return kept


def _united(some: _Cohort | None, more: _Cohort) -> _Cohort:
    """Two cohorts as one, with the fields of the second."""
    if some is None:
        return more
    ranks, number = some.ranks + more.ranks, max(some.number, more.number)
    return _Cohort(more.fields, ranks, some.total + more.total, number)


def _conclude(said: Sequence[_Statement]) -> dict[str, str]:
    """The agreed fields; raises what every rank raises."""
    cohorts = _join(said)
    differing = _differences(cohorts)
    error = min((each for each in said if each.error), key=lambda s: s.error_rank, default=None)
    if error is not None:
        raise WeftError(error.error.decode(errors="replace"))
    if differing:
        raise WeftError("; ".join(differing))
    agreed: dict[str, str] = {}
    for name, value in (pair for cohort in cohorts for pair in cohort.fields):
        if agreed.get(name, _UNKNOWN) == _UNKNOWN:
            agreed[name] = value
    return agreed


def _differences(cohorts: Sequence[_Cohort]) -> list[str]:
    """A sentence for each field in which ranks differ, up to one that others follow from."""
    holders: dict[str, dict[str, _Cohort]] = {}  # by field and value, those that state it
    for cohort in cohorts:
        for name, value in cohort.fields:
            if value != _UNKNOWN:
                held = holders.setdefault(name, {})
                held[value] = _united(held.get(value), cohort)
    texts = []
    for name, values in holders.items():
        if len(values) > 1:
            ordered = sorted(values.items(), key=lambda item: min(item[1].ranks))
            how, then = f"the ranks differ in {name}", "pass the same on every rank"
            if name == _CALL:
                how = "the ranks are in different calls"
                then = "make the same calls in the same order on every rank"
                if any("backward of call" in call for call in values):
                    then += ", and add 0 * output.sum() to the loss of a rank that uses no output"
                ordered = [(f"{call} (call {cohort.number})", cohort) for call, cohort in ordered]
            said = [(value, cohort.ranks, cohort.total) for value, cohort in ordered]
            texts.append(differing(how, said, then))
            if name in (_CALL, "tensors"):  # from which other fields follow
                break
    return texts
