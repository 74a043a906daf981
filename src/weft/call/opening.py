"""The opening of every call: its one exchange, in which everybody learns what everybody was asked.

Nothing that changes what is communicated may be decided from one rank's data. So a call begins with
a *statement* that every rank makes to every rank (`statement`), and from the same statements every
rank draws the same conclusion. Step by step (`opened`):

1. The rank writes its statement: the fingerprint of the call (`fingerprint`), which all must have
   equal, the error that its caller made, if any, and a body of the call's own.
2. It notes that it has come to this call: from here on others that ask where it is are told so.
3. It tells its statement, and hears the others' (`Group.tell`): up to `DIRECT` ranks each tells all
   others, in one round, those of its host by one message, which all of these read (a *meeting*);
   more ranks combine theirs pairwise (`combining`). So long it waits: who dies, or does not come,
   is named by the group's verdict, and the group is lost.
4. What has come is checked before it is used. Bytes that are no statement end the group, with an
   error that names the rank that sent them. A statement among other ranks than these, such as that
   of a rank in a call of a subset, ends it with both calls in the error: no later message of either
   would find its own.
5. All ranks conclude alike: where some rank told an error, or fingerprints differ, all raise the
   same text, and the next call works. Else all go on.

Beside its statement a rank may tell each other rank something that is for that one alone, *in
private*, on which nothing may be decided but between those two.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from ..base.arguments import in_words
from ..base.errors import conclusion
from ..failure.verdict import crossed
from ..group.group import Group
from ..group.pending import Awaited, Telling
from .combining import DIRECT, combined
from .fingerprint import LONGEST, UNKNOWN, Cohort, agreed_fields, call_of, encoded, joined, stated
from .statement import CAP, TEXT, Bytes, Combine, Private, Statement, privately, said_to

T = TypeVar("T")


@dataclass(slots=True)
class Opening:
    """What all ranks know of each other, once a call is open.

    Attributes:
        number: of the call, on the rank that has made most.
        fields: the agreed fingerprint; a field that some ranks did not know has the others' value.
        private: what each rank said to this one alone, in rank order; of itself nothing.
    """

    number: int
    fields: dict[str, str]
    private: list[memoryview]
    _group: Group
    _heard: list[tuple[int, Statement]]  # who told it
    _own: memoryview  # this rank's body

    def read(self, decode: Callable[..., T], *given: Any, own: T | None = None) -> list[T]:
        """`decode(body, *given)` of each of the bodies, which are memoryviews.

        There is one for each rank where statements are direct, else the one combined body. `own`:
        what this rank's own says, which is not decoded then.

        Raises:
            WireError: a body could not be decoded.
        """
        found = []
        for peer, each in self._heard:
            if own is not None and each.body is self._own:
                found.append(own)
            else:
                found.append(self._group.decode(peer, "a statement", decode, each.body, *given))
        return found

    def field(self, name: str, decode: Callable[[str], T]) -> T:
        """The value of a field that some rank knows; others learn it from that one.

        Raises:
            WireError: it could not be decoded.
        """
        value = self.fields[name]
        told = (p for p, each in self._heard for g in each.cohorts if (name, value) in g.fields)
        return self._group.decode(next(told), f"the field {name!r}", decode, value)


def is_direct(group: Group) -> bool:
    """Whether every rank hears every rank's own statement."""
    return group.size <= DIRECT


def _first(lower: memoryview, upper: memoryview) -> memoryview:
    return lower


@contextmanager
def opened(
    group: Group,
    call: str,
    fields: Mapping[str, object],
    error: str | None,
    body: Bytes = b"",
    combine: Combine = _first,
    *,
    watch: Callable[[Awaited], object] | None = None,
    private: Sequence[Private] | None = None,
) -> Iterator[Opening]:
    """Open a call; collective. What is read of the others' statements is valid in this block.

    Args:
        group: among whom.
        call: name of the call; ranks in different calls are told so.
        fields: what must be equal on all ranks, by name; None says that this rank does not know.
        error: what this rank's caller did wrong, in a sentence without the rank.
        body: what the call says of its own, at most `BODY` bytes.
        combine: makes one body of two; the left one is of lower ranks. Only used, and only
            needed, where statements are not direct.
        watch: is given the wait for something of each rank, which knows who has not come. Where
            statements are not direct, that is for empty messages beside them.
        private: what to say to each rank, in rank order. With the body at most `BODY` bytes; so is
            what is said to all `near` ranks together, with 24 bytes more for each rank of the
            group. Only where statements are direct.

    Raises:
        WeftError: a rank stated an error, or fingerprints differ; the same text on every rank.
        WireError: as every wait does; also where a peer sent something else than a statement.
        RuntimeError: the body is larger than a statement may be.
    """
    mine = _statement(group, call, fields, error, memoryview(body), watched=watch is not None)
    is_first = group.worker.enter(group.global_ranks, group.members, mine.cohorts[0].fields)
    telling = None
    try:
        if group.size == 1:
            heard = [(0, mine)]
        elif is_direct(group):
            telling = _tell(group, mine, private, opens=is_first)
            if watch is not None:
                watch(telling)
            heard = _heard_from_each(group, mine, telling.wait())
        else:
            hear = functools.partial(_heard, group, mine)
            heard = [combined(group, mine, combine, hear, watch)]
        opening = _concluded(group, mine, heard)
        if private is not None:
            _read_private(opening, group)
        yield opening
    finally:
        if telling is not None:
            telling.release()


def _statement(
    group: Group,
    call: str,
    fields: Mapping[str, object],
    error: str | None,
    body: memoryview,
    *,
    watched: bool,
) -> Statement:
    """What this rank states; the arguments are those of `opened`."""
    number = group.rank_in_errors(group.rank)
    fingerprint = call_of(call, group.members)
    if error is None:  # else nobody needs the fields
        try:
            fingerprint += stated(fields)
        except Exception as trouble:  # a value is the caller's, and may have no text
            error = in_words(trouble)
        if len(encoded(fingerprint)) > LONGEST:
            fingerprint = fingerprint[:2]
            error = "the arguments are too long to be told to the other ranks: pass shorter ones"
    said = b""
    if error is not None:
        said = f"rank {number}: {error}".encode(errors="backslashreplace")[:TEXT]
    cohort = Cohort(fingerprint, (number,), 1, group.worker.calls)
    return Statement((cohort,), said, number, body, watched=watched)


def _tell(
    group: Group, mine: Statement, private: Sequence[Private] | None, *, opens: bool
) -> Telling:
    """Start telling all ranks this rank's statement, and each what is said to it in private."""
    if private is None:
        return group.tell(mine.pack(), CAP, opens=opens)
    near = group.near
    to_far = {peer: mine.pack(private[peer]) for peer in group.peers if peer not in near}
    to_near = [said if peer in near else () for peer, said in enumerate(private)]
    message = mine.pack(privately(to_near) if near else ())
    lengths = [sum(map(len, said)) for said in to_near]
    counted = {peer: len(message) - sum(lengths) + lengths[peer] for peer in near}
    return group.tell(message, CAP, to_far=to_far, counted=counted, opens=opens)


def _read_private(opening: Opening, group: Group) -> None:
    """Of what peers of this host said to each rank keep what they said to this one."""
    for peer in group.near:
        said = opening.private[peer]
        what = "a statement"
        opening.private[peer] = group.decode(peer, what, said_to, group.rank, group.size, said)


def _heard_from_each(
    group: Group, mine: Statement, told: Sequence[memoryview]
) -> list[tuple[int, Statement]]:
    """What each rank stated, of what each told."""
    heard = []
    for peer, message in enumerate(told):
        said = mine
        if peer != group.rank:
            said = _heard(group, mine, peer, message)
        heard.append((peer, said))
    return heard


def _heard(group: Group, mine: Statement, peer: int, message: memoryview) -> Statement:
    """What a peer stated, in the call in which this rank is, too."""
    own = mine.cohorts[0].fields
    statement = group.decode(peer, "a statement", Statement.unpack, message, own)
    for cohort in statement.cohorts:
        if cohort.fields is not own and cohort.members != group.members:
            calls = {
                group.rank_in_errors(group.rank): mine.cohorts[0].place,
                group.rank_in_errors(peer): cohort.place,
            }
            raise group.session.fail(None, crossed(calls))
    return statement


def _concluded(group: Group, mine: Statement, heard: list[tuple[int, Statement]]) -> Opening:
    """The conclusion from statements and who told them; raises what every rank raises."""
    said = [statement for _, statement in heard]
    fields = said[0].cohorts[0].fields
    are_alike = True
    number = 0
    for each in said:
        are_alike = are_alike and not each.error
        for cohort in each.cohorts:
            are_alike = are_alike and cohort.fields == fields
            number = max(number, cohort.number)
    # a rank that calls of some of the ranks left out goes on from the others' number
    group.worker.calls = number
    known = dict(fields) if are_alike else _known(mine, said)
    private = [each.private for each in said]
    return Opening(number, known, private, group, heard, mine.body)


def _known(mine: Statement, said: Sequence[Statement]) -> dict[str, str]:
    """The agreed fields; raises what every rank raises."""
    error = min((each for each in said if each.error), key=lambda s: s.error_rank, default=None)
    if error is not None:
        raise conclusion(error.error.decode(errors="replace"))
    known = agreed_fields(joined((cohort for each in said for cohort in each.cohorts), TEXT))
    for name, _ in mine.cohorts[0].fields:  # also those that no other rank states
        known.setdefault(name, UNKNOWN)
    return known
