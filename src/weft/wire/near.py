"""Dense all-reduce among ranks that can read each other's memory: only addresses are sent.

Each rank reads what the others contribute to one part of the tensor, combines it, and reads the
other parts where their ranks have made them: two small messages a peer beside that which told the
addresses, however large the tensor is. Of a smaller one each rank reads all, and combines it
itself: one. As anywhere, contributions combine in rank order.

Source: reduce-scatter and all-gather, as in `dense`; the reading, `loans`.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

from torch import Tensor

from .arithmetic import Reduce, cut, grain
from .base import Wire
from .loans import TICKET, Loans
from .memory import typed

__all__ = ["PLACES", "all_reduce", "places_in", "places_of", "told"]

PLACES = 2 * TICKET
"""Bytes that say where a rank's contribution is, and where its result is going to be."""

_WHOLE = 3 << 19  # bytes of others' contributions up to which each rank rather reads them all
_SCRATCH = 3 << 20  # bytes of them that a rank collects at once

_PLACES = struct.Struct("<2Q")
_TOLD = struct.Struct("<2Q?7x")  # and whether all peers can read there


def places_of(given: Tensor, flat: Tensor) -> bytes:
    """What a rank says of its contribution and of its result."""
    return _PLACES.pack(given.data_ptr(), flat.data_ptr())


def places_in(said: bytes | memoryview) -> tuple[int, int]:
    """Where the contribution of the rank that said this is, and its result."""
    given, flat = _PLACES.unpack_from(said)
    return given, flat


def told(wire: Wire, given: Tensor, flat: Tensor) -> dict[int, tuple[int, int]] | None:
    """Tell all peers where this rank's memory is; where theirs is, by rank.

    None, on every rank, if some rank's memory cannot be read by all; then nobody asks again.
    """
    able = all(map(wire.lends, wire.peers))
    mine = _TOLD.pack(given.data_ptr(), flat.data_ptr(), able)
    heard = list(map(_TOLD.unpack, wire.all_gather_bytes(mine)))
    wire.together = wire.near = all(each[2] for each in heard)
    return {rank: each[:2] for rank, each in enumerate(heard)} if wire.near else None


def all_reduce(
    wire: Wire, flat: Tensor, combine: Reduce, given: Tensor, places: Mapping[int, tuple[int, int]]
) -> None:
    """Reduce `given` over all ranks into `flat`, which may be the same memory.

    Args:
        wire: among whom.
        flat: 1-D, contiguous, CPU, of at least one element.
        combine: as `arithmetic` gives it, for this dtype.
        given: this rank's contribution, of the same size; else left as it is.
        places: what the peers told, by rank.
    """
    if given.nbytes * (wire.size - 1) <= _WHOLE:
        _whole(wire, flat, combine, given, places)
    else:
        _parts(wire, flat, combine, given, places)


def _whole(
    wire: Wire, flat: Tensor, combine: Reduce, given: Tensor, places: Mapping[int, tuple[int, int]]
) -> None:
    loans, peers = Loans(wire), wire.peers
    with wire.lease(len(peers) * given.nbytes) as memory:
        slots = typed(memory, (len(peers), len(given)), given.dtype)
        terms = dict(zip(peers, slots, strict=True)) | {wire.rank: given}
        for peer in peers:
            loans.ticket(peer, given)
            loans.take(peer, _ticket(places[peer][0]), terms[peer])

        def add() -> None:
            combine([terms[rank] for rank in range(wire.size)], flat)

        if given.data_ptr() == flat.data_ptr():  # which others read until all has been read
            loans.settle()
            add()
        else:
            loans.settle(add)


def _parts(
    wire: Wire, flat: Tensor, combine: Reduce, given: Tensor, places: Mapping[int, tuple[int, int]]
) -> None:
    peers, size, part = wire.peers, flat.element_size(), cut(flat, wire.size)

    def piece(of: Tensor, rank: int) -> Tensor:
        return of[rank * part : (rank + 1) * part]

    sums, own = Loans(wire), piece(flat, wire.rank)
    for peer in peers:
        sums.ticket(peer, own)
    aligned = grain(flat)
    step = max(aligned, _SCRATCH // len(peers) // size // aligned * aligned)
    with wire.lease(len(peers) * min(step, part) * size) as memory:
        for start in range(0, part, step):
            terms = Loans(wire)
            into = own[start : start + step]
            slots = typed(memory, (len(peers), len(into)), flat.dtype)
            parts = dict(zip(peers, slots, strict=True))
            parts[wire.rank] = piece(given, wire.rank)[start : start + step]
            for peer in peers:
                terms.ticket(peer, piece(given, peer)[start : start + step])
                at = places[peer][0] + (wire.rank * part + start) * size
                terms.take(peer, _ticket(at), parts[peer])

            def add(into: Tensor = into, parts: dict[int, Tensor] = parts) -> None:
                if len(into):
                    combine([parts[rank] for rank in range(wire.size)], into)

            terms.settle(add, opens=start + step >= part)
    for peer in peers:
        sums.take(peer, _ticket(places[peer][1] + peer * part * size), piece(flat, peer))
    sums.settle()


def _ticket(address: int) -> bytes:
    return address.to_bytes(TICKET, "little")
