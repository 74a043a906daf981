"""The opening of every call: its one exchange, in which everybody learns what everybody was asked.

Nothing that changes what is communicated may be decided from one rank's data. So a call begins with
a *statement* that every rank makes to every rank (`statement`), and from the same statements every
rank draws the same conclusion. Step by step (`opened`):

1. The rank writes its statement: the fingerprint of the call (`fingerprint`), which all must have
   equal, the error that its caller made, if any, the state of autograd (`mode`), a digest of what
   may differ, and a body of the call's own.
2. It notes that it has come to this call: from here on others that ask where it is are told so.
3. It tells its statement, and hears the others' (`Group.tell`): up to `DIRECT` ranks each tells all
   others, in one round, those of its host by one message, which all of these read (a *meeting*);
   more ranks pass on what they have heard, in log2 P rounds (`bundle`). So long it waits: who dies,
   or does not come, is named by the group's verdict, and the group is lost.
4. What has come is checked before it is used. Bytes that are no statement end the group, with an
   error that names the rank that sent them. A statement among other ranks than these, such as that
   of a rank in a call of a subset, ends it with both calls in the error: no later message of either
   would find its own.
5. All ranks conclude alike (`agreement`): where some rank told an error, fingerprints differ, or
   some ranks record gradients and others are under `torch.no_grad()`, all raise the same text, and
   the next call works. Else all go on.

Beside its statement a rank may tell each other rank something that is for that one alone, *in
private*, on which nothing may be decided but between those two. Of many ranks that takes a round
of its own, after the conclusion.

Sparse calls have fields and a body alone: who follows them may skip what is said of the mode, the
digest and what is private, which are for dense calls and layers, and `watch`, a barrier's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import numpy as np

from ..base.arguments import in_words
from ..base.memory import tensor_of
from ..group.channels import SMALL
from ..group.group import Group
from ..group.pending import Awaited, Telling
from .agreement import conclusion_of
from .bundle import statements_in, statements_of_all
from .fingerprint import Fields, encoded, fingerprint
from .mode import PLAIN, Mode
from .statement import (
    BODY,
    CAP,
    DIRECT,
    ERROR,
    LONGEST,
    Bytes,
    Private,
    Statement,
    private_part,
    private_parts,
)

T = TypeVar("T")

_TOO_LONG = "the arguments are too long to be told to the other ranks: pass shorter ones"


@dataclass(slots=True)
class Opening:
    """What all ranks know of each other, once a call is open.

    Attributes:
        number: of the call, on the rank that has made most.
        fields: the agreed fingerprint; a field that some ranks did not know has the others' value.
        records: whether some rank records gradients; then all take part in backward.
        equal: whether all digests are equal.
        private: what each rank said to this one alone, in rank order; of itself nothing.
    """

    number: int
    fields: dict[str, str]
    records: bool
    equal: bool
    private: list[memoryview]
    _group: Group
    _statements: list[Statement]

    def read(self, decode: Callable[..., T], *given: Any, own: T | None = None) -> list[T]:
        """`decode(body, *given)` of each rank's body, a memoryview, in rank order.

        `own`: what this rank's own says, which is not decoded then.

        Raises:
            WireError: a body could not be decoded.
        """
        group = self._group
        return [
            group.decode(rank, "a statement", decode, each.body, *given)
            if own is None or rank != group.rank
            else own
            for rank, each in enumerate(self._statements)
        ]

    def bodies(self, nbytes: int) -> list[memoryview]:
        """The body of each rank, in rank order.

        Raises:
            WireError: that of a rank is not of `nbytes`.
        """
        return self.read(_of_length, nbytes)

    def mask(self, nbytes: int) -> list[int]:
        """The bodies of all ranks, combined by bitwise "or"; raises as `bodies`."""
        masks = [np.frombuffer(each, np.uint8) for each in self.bodies(nbytes)]
        return cast(list[int], np.bitwise_or.reduce(masks).tolist())

    def field(self, name: str, decode: Callable[[str], T]) -> T:
        """The value of a field that some rank knows; others learn it from that one.

        Raises:
            WireError: it could not be decoded.
        """
        pair = name, self.fields[name]
        first = next(rank for rank, each in enumerate(self._statements) if pair in each.fields)
        return self._group.decode(first, f"the field {name!r}", decode, pair[1])


def opened(
    group: Group,
    call: str,
    fields: Mapping[str, object],
    body: Bytes = b"",
    *,
    error: str | None = None,
    mode: Mode = PLAIN,
    digest: int = 0,
    watch: Callable[[Awaited], object] | None = None,
    private: Sequence[Private] | None = None,
) -> Opening:
    """Open a call; collective.

    Args:
        group: among whom.
        call: name of the call; ranks in different calls are told so.
        fields: what must be equal on all ranks, by name; None says that this rank does not know.
        body: what the call says of its own, at most `BODY` bytes. All ranks hear all bodies: so
            what has more than `room` bytes goes better by an exchange of its own.
        error: what this rank's caller did wrong, in a sentence without the rank.
        mode: of a differentiable call.
        digest: an int64 to be compared with the others'.
        watch: is given the wait for something of each rank, which knows who has not come. Of many
            ranks that is for empty messages beside their statements.
        private: what to say to each rank, in rank order. With the body at most `BODY` bytes; so is
            what is said to all `near` ranks together, with 24 bytes more for each rank of the
            group.

    Raises:
        WeftError: a rank stated an error, or fingerprints or modes differ; the same text on every
            rank.
        WireError: as every wait does; also where a peer sent something else than a statement.
        RuntimeError: the body is larger than a statement may be.
    """
    stated, text = _stated(group, call, fields, error)
    mine = Statement(
        group.rank,
        group.worker.calls,
        stated,
        text,
        memoryview(body),
        watched=watch is not None,
        records=mode.records,
        enabled=mode.enabled,
        digest=digest,
    )
    is_first = group.worker.enter(group.global_ranks, group.members, stated)
    by_rank = {group.rank: mine}
    if 1 < group.size <= DIRECT:
        telling = _tell(group, mine, private, opens=is_first)
        if watch is not None:
            watch(telling)
        for peer, message in telling.wait().items():
            by_rank |= statements_in(group, mine, peer, message, [peer])
    elif group.size > DIRECT:
        by_rank = statements_of_all(group, mine, watch)
    statements = [by_rank[rank] for rank in range(group.size)]
    opening = _concluded(group, statements)
    if private is not None:
        opening.private = _heard_in_private(group, statements, private)
    return opening


def _stated(
    group: Group, call: str, fields: Mapping[str, object], error: str | None
) -> tuple[Fields, bytes]:
    """The fingerprint that this rank states, and its error; the arguments are those of `opened`."""
    text = b""
    if error is None:
        try:
            stated = fingerprint(call, group.members, fields)
        except Exception as trouble:  # a value is the caller's, and may have no text
            error = in_words(trouble)
        else:
            if len(encoded(stated)) > LONGEST:
                error = _TOO_LONG
    if error is not None:  # then nobody needs the fields
        stated = fingerprint(call, group.members, {})
        number = group.rank_in_errors(group.rank)
        text = f"rank {number}: {error}".encode(errors="backslashreplace")[:ERROR]
    return stated, text


def _tell(
    group: Group, mine: Statement, private: Sequence[Private] | None, *, opens: bool
) -> Telling:
    """Start telling all ranks this rank's statement, and each what is said to it in private."""
    if private is None:
        return group.tell(mine.pack(), CAP, opens=opens)
    near = group.near
    to_far = {peer: mine.pack(private[peer]) for peer in group.peers if peer not in near}
    to_near = [pieces if peer in near else () for peer, pieces in enumerate(private)]
    message = mine.pack(private_parts(to_near) if near else ())
    lengths = [sum(map(len, pieces)) for pieces in to_near]
    counted = {peer: len(message) - sum(lengths) + lengths[peer] for peer in near}
    return group.tell(message, CAP, to_far=to_far, counted=counted, opens=opens)


def _concluded(group: Group, statements: list[Statement]) -> Opening:
    """The conclusion from all ranks' statements; raises what every rank raises."""
    _, numbers, fields, errors, *_, records, enabled, digests = zip(*statements, strict=True)
    # a rank that calls of some of the ranks left out goes on from the others' number
    group.worker.calls = number = max(numbers)
    is_recorded = True in records
    are_in_one_mode = not (is_recorded and False in enabled)
    if {*fields} == {fields[0]} and {*errors} == {b""} and are_in_one_mode:
        known = dict(fields[0])
    else:
        names = map(group.rank_in_errors, range(group.size))
        known = conclusion_of(dict(zip(names, statements, strict=True)))
    are_equal = {*digests} == {digests[0]}
    return Opening(number, known, is_recorded, are_equal, [], group, statements)


def _of_length(body: memoryview, nbytes: int) -> memoryview:
    """A body as it is. Raises ValueError if it is not of so many bytes."""
    if len(body) != nbytes:
        raise ValueError(f"{len(body)} bytes for {nbytes}")
    return body


def _heard_in_private(
    group: Group, statements: Sequence[Statement], private: Sequence[Private]
) -> list[memoryview]:
    """What each rank said to this one alone: with its statement; of many ranks apart from it."""
    if group.size > DIRECT:
        sends = [(peer, tensor_of(bytearray().join(private[peer]))) for peer in group.peers]
        pending = group.post(sends, [(peer, BODY) for peer in group.peers], SMALL)
        heard = [memoryview(b"")] * group.size
        for peer, message in zip(group.peers, pending.wait(), strict=True):
            heard[peer] = memoryview(bytearray(message.numpy()))
        pending.release()
        return heard
    heard = [each.private for each in statements]
    for peer in group.near:
        what = "a statement"
        heard[peer] = group.decode(peer, what, private_part, group.rank, group.size, heard[peer])
    return heard
