"""An opening, in which all ranks learn of a call, and messages with it or after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from ..base.errors import WeftError
from ..base.memory import memory_of
from ..base.tensors import extent, share_addresses
from ..call.opening import is_direct
from ..call.terms import agreed
from ..comm.staging import most_to_all, most_to_each, moved, moved_to_all
from ..group.group import Group
from .sizes import summand, unequal
from .tensors import copied, flat_of, place_for, put

Parts = Sequence[Tensor | None]
"""A tensor, or nothing, for each rank."""


def open_call(group: Group, call: str, fields: Mapping[str, object], error: str | None) -> None:
    """The opening exchange, with which nothing goes along."""
    with agreed(group, call, fields, error):
        pass


def open_and_exchange(
    group: Group,
    call: str,
    fields: Mapping[str, object],
    gives: Parts,
    takes: Parts,
    *,
    alike: bool = False,
    counts: Sequence[int] = (),
) -> None:
    """Open a call, send `gives[p]` to each rank p, and receive `takes[p]` from it.

    What is small goes along with the opening.

    Args:
        group, call, fields: of the opening.
        gives, takes: as of `exchange`.
        alike: whether a rank that gives something gives the same to all.
        counts: the elements of `gives`, then of `takes`, for each rank, if both ends of a pair are
            to be compared; none: their fields have them.
    """
    outgoing, incoming = _ends(group, gives, takes)
    along = _along(group, outgoing, alike=alike)
    own: bytes | memoryview = b""
    private = None
    if alike:
        own = next(iter(along.values()), b"")
    elif is_direct(group):
        private = [[along[p]] if p in along else [] for p in range(group.size)]
    come = set[int]()
    total = summand(group, counts) if counts else 0
    with agreed(group, call, fields, None, summand=total, own=own, private=private) as said:
        if said.total:  # every rank knows the same
            raise WeftError(unequal(group, counts))
        told = said.own() if alike else said.opening.private
        for peer in incoming.keys() - {group.rank} if is_direct(group) else ():
            if told[peer]:
                group.decode(peer, "a tensor", fill, incoming[peer], told[peer])
                come.add(peer)
    rest = {p: flat for p, flat in outgoing.items() if p not in along}
    missing = {p: place for p, place in incoming.items() if p not in come}
    if alike:
        moved_to_all(group, rest, missing)
    else:
        moved(group, rest, missing)
    _keep_own(group, outgoing, incoming)
    _deliver(incoming, takes)


def _along(group: Group, outgoing: Mapping[int, Tensor], *, alike: bool) -> dict[int, memoryview]:
    """What is small enough to go along with the opening, by the rank that it is for."""
    if not is_direct(group):
        return {}
    most = [most_to_all(group)] * group.size if alike else most_to_each(group)
    small = {peer: flat for peer, flat in outgoing.items() if flat.nbytes <= most[peer]}
    return {peer: memory_of(flat) for peer, flat in small.items() if peer != group.rank}


def fill(place: Tensor, told: memoryview) -> None:
    """Copy what a rank has told. Raises ValueError if it is of another length."""
    memory_of(place)[:] = told


def exchange(group: Group, gives: Parts, takes: Parts) -> None:
    """Send `gives[p]` to each rank p, and receive `takes[p]` from it; nothing for empty tensors."""
    outgoing, incoming = _ends(group, gives, takes)
    moved(group, outgoing, incoming)
    _keep_own(group, outgoing, incoming)
    _deliver(incoming, takes)


def _ends(group: Group, gives: Parts, takes: Parts) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
    """What is to be sent, and where to receive, by rank: nothing is written before it was sent."""
    outgoing, incoming = _flats(gives), _places(takes)
    places = {peer: extent(place) for peer, place in incoming.items()}
    apart: dict[int, Tensor] = {}  # by the id of what is sent
    for flat in {id(each): each for each in outgoing.values()}.values():
        span = extent(flat)
        is_written = any(
            share_addresses(place, span)
            for peer, place in places.items()
            # what a rank gives itself may be in its place already
            if peer != group.rank or place != span
        )
        apart[id(flat)] = copied(flat) if is_written else flat
    return {peer: apart[id(flat)] for peer, flat in outgoing.items()}, incoming


def _flats(gives: Parts) -> dict[int, Tensor]:
    """What is to be sent, by rank: plain, and once where several get the same."""
    flats = {id(each): flat_of(each) for each in gives if each is not None and each.numel()}
    return {p: flats[id(each)] for p, each in enumerate(gives) if id(each) in flats}


def _places(takes: Parts) -> dict[int, Tensor]:
    """Where to receive, by rank."""
    return {p: place_for(each) for p, each in enumerate(takes) if each is not None and each.numel()}


def _keep_own(group: Group, outgoing: dict[int, Tensor], incoming: dict[int, Tensor]) -> None:
    """Give this rank what it gives itself."""
    if group.rank in incoming and group.rank in outgoing:
        memory_of(incoming[group.rank])[:] = memory_of(outgoing[group.rank])


def _deliver(incoming: Mapping[int, Tensor], takes: Parts) -> None:
    """Put what was received where a caller wants it."""
    for peer, place in incoming.items():
        wanted = takes[peer]
        assert wanted is not None  # else there is no place for it
        put(place, wanted)
