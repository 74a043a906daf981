"""The collectives of torch.distributed over a wire: on CPU tensors of any dtype, uneven ones too.

Each opens with the exchange of `agree`: every rank learns what every rank was asked for, so wrong
or differing arguments raise the same error on all of them and the next call works. What is small
travels in that exchange; else messages go directly from rank to rank. Reductions add in rank order,
so every rank that gets a number gets the same bits.

Source of the schedules: reduce-scatter and broadcast in parts as in Rabenseifner, "Optimization of
Collective Reduction Operations", ICCS 2004, with direct exchanges.
"""

from __future__ import annotations

import contextlib
import hashlib
import struct
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from ..agree import agree, is_direct
from ..wire.base import Pending, Wire, as_bytes
from ..wire.dense import SCRATCH, checked, reduce_parts
from ..wire.memory import Lease, typed

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "gather",
    "op_name",
    "reduce",
    "reduce_scatter",
    "scatter",
]

EAGER = 1 << 13
"""Bytes of a tensor that travel in the opening exchange, where that is direct."""

_SAID = 200  # characters of sizes that are compared as they are; more of them by a digest
_NOTHING = torch.empty(0, dtype=torch.uint8)
_OPS = {
    "SUM": "sum",
    "AVG": "avg",
    "PRODUCT": "prod",
    "MIN": "min",
    "MAX": "max",
    "BAND": "band",
    "BOR": "bor",
    "BXOR": "bxor",
}


def op_name(op: object) -> str:
    """weft's name of a `ReduceOp`; of one that weft does not have, torch's.

    Example:
        >>> op_name(dist.ReduceOp.PRODUCT), op_name(dist.ReduceOp(dist.ReduceOp.MAX))
        ('prod', 'max')
    """
    for name, member in dist.ReduceOp.RedOpType.__members__.items():
        if op == member:  # an object of ReduceOp equals its member, but does not tell its name
            return _OPS.get(name, name)
    return str(op)


def barrier(wire: Wire) -> list[Tensor]:
    """Wait until all ranks have come here."""
    with _opened(wire, "barrier", {}, None):
        return []


def all_reduce(wire: Wire, tensors: list[Tensor], op: str) -> list[Tensor]:
    """Reduce each tensor over all ranks, in place."""
    fields = {"op": op, **_said(tensors)}
    error = _reason(tensors, op)
    eager = error is None and len(tensors) == 1 and _eager(wire, tensors[0].nbytes)
    payload = _flat(tensors[0]) if eager else None
    with _opened(wire, "all_reduce", fields, error, payload) as bodies:
        for tensor in tensors:
            flat = _flat(tensor)
            if eager:
                # copies, since a statement is aligned to 8 bytes only, and parts are overwritten
                parts = [typed(body, (flat.numel(),), flat.dtype).clone() for body in bodies]
                reduce_parts(parts, _sum(op), flat)
            else:
                pending = wire.dense_all_reduce(flat, _sum(op))
                pending.wait()
                pending.release()
            _mean(flat, op, wire.size)
            _put(flat, tensor)
    return tensors


def all_gather(wire: Wire, outs: list[Tensor], mine: Tensor) -> list[Tensor]:
    """Every rank's tensor to every rank; `outs` may differ in size, alike on every rank."""
    error = _reason([mine, *outs])
    if error is None and len(outs) != wire.size:
        error = f"{len(outs)} outputs were given for {wire.size} ranks: pass one for each"
    elif error is None and outs[wire.rank].numel() != mine.numel():
        error = (
            f"its tensor has {mine.numel()} elements, and output {wire.rank} has room for "
            f"{outs[wire.rank].numel()}: every rank passes outputs as large as the ranks' tensors"
        )
    largest = max((out.nbytes for out in outs), default=0)
    eager = error is None and _eager(wire, largest)
    payload = _flat(mine) if eager else None
    with _opened(wire, "all_gather", _said(outs), error, payload) as bodies:
        if eager:
            for out, body in zip(outs, bodies, strict=True):
                _put_bytes(body, out)
            return outs
        flat, places = _flat(mine), [_place(out) for out in outs]
        wire.post(
            [(peer, flat) for peer in wire.peers if flat.numel()],
            [(peer, places[peer]) for peer in wire.peers if places[peer].numel()],
        ).wait()
        places[wire.rank].copy_(flat)
        for place, out in zip(places, outs, strict=True):
            _put(place, out)
    return outs


def reduce_scatter(wire: Wire, out: Tensor, ins: list[Tensor], op: str) -> list[Tensor]:
    """Reduce the ranks' `ins[p]` on rank p; they may differ in size, alike on every rank."""
    error = _reason([out, *ins], op)
    if error is None and len(ins) != wire.size:
        error = f"{len(ins)} inputs were given for {wire.size} ranks: pass one for each"
    elif error is None and ins[wire.rank].numel() != out.numel():
        error = (
            f"its output has room for {out.numel()} elements, and input {wire.rank} has "
            f"{ins[wire.rank].numel()}: they must be as many"
        )
    with _opened(wire, "reduce_scatter", {"op": op, **_said(ins)}, error):
        _reduce_pieces(wire, out, [_flat(each) for each in ins], op)
    return [out]


def reduce(wire: Wire, tensor: Tensor, root: int, op: str) -> list[Tensor]:
    """Reduce a tensor on one rank, in place there; the others' stay as they are."""
    fields = {"root": root, "op": op, **_said([tensor])}
    with _opened(wire, "reduce", fields, _reason([tensor], op)):
        flat, none = _flat(tensor), tensor.new_empty(0)
        pieces = [flat if rank == root else none for rank in range(wire.size)]
        _reduce_pieces(wire, tensor if wire.rank == root else none, pieces, op)
    return [tensor]


def broadcast(wire: Wire, tensor: Tensor, root: int) -> list[Tensor]:
    """One rank's tensor to all, in place."""
    fields = {"root": root, **_said([tensor])}
    error = _reason([tensor])
    eager = error is None and _eager(wire, tensor.nbytes)
    payload = _flat(tensor) if eager and wire.rank == root else None
    with _opened(wire, "broadcast", fields, error, payload) as bodies:
        if eager:
            if wire.rank != root:
                _put_bytes(bodies[root], tensor)
            return [tensor]
        flat = _place(tensor, filled=wire.rank == root)
        _scatter_and_share(wire, flat, root)
        _put(flat, tensor)
    return [tensor]


def _scatter_and_share(wire: Wire, flat: Tensor, root: int) -> None:
    """A part from the root to each rank, which sends it to all others: nobody sends it all twice."""
    rank, others = wire.rank, [peer for peer in wire.peers if peer != root]
    bounds = [len(flat) * part // wire.size for part in range(wire.size + 1)]
    parts = [flat[low:high] for low, high in pairwise(bounds)]
    if rank == root:
        sends = [(peer, parts[peer]) for peer in others if len(parts[peer])]
        sends += [(peer, parts[root]) for peer in others if len(parts[root])]
        wire.post(sends).wait()
        return
    rests = [wire.post((), [(root, parts[rank])])] if len(parts[rank]) else []
    rests += [
        wire.post((), [(owner, parts[owner])])
        for owner in (*others, root)
        if len(parts[owner])
    ]
    if len(parts[rank]):
        rests.pop(0).wait()
        rests.append(wire.post([(peer, parts[rank]) for peer in others]))
    for rest in rests:
        rest.wait()


def gather(wire: Wire, outs: list[Tensor], mine: Tensor, root: int) -> list[Tensor]:
    """Every rank's tensor to one rank; `outs` is empty on the others."""
    error = _reason([mine, *outs])
    here = wire.rank == root
    if error is None and here and any(out.numel() != mine.numel() for out in outs):
        error = f"an output has another size than the tensor of {mine.numel()} elements"
    if error is None and len(outs) != (wire.size if here else 0):
        error = f"{len(outs)} outputs were given for {wire.size} ranks, gathered on rank {root}"
    with _opened(wire, "gather", {"root": root, **_said([mine])}, error):
        flat = _flat(mine)
        if not here:
            wire.post([(root, flat)]).wait()
            return outs
        places = [_place(out) for out in outs]
        wire.post((), [(peer, places[peer]) for peer in wire.peers]).wait()
        places[root].copy_(flat)
        for place, out in zip(places, outs, strict=True):
            _put(place, out)
    return outs


def scatter(wire: Wire, out: Tensor, ins: list[Tensor], root: int) -> list[Tensor]:
    """A tensor from one rank to each; `ins` is empty on the others."""
    error = _reason([out, *ins])
    here = wire.rank == root
    if error is None and here and any(each.numel() != out.numel() for each in ins):
        error = f"an input has another size than the output of {out.numel()} elements"
    if error is None and len(ins) != (wire.size if here else 0):
        error = f"{len(ins)} inputs were given for {wire.size} ranks, scattered from rank {root}"
    with _opened(wire, "scatter", {"root": root, **_said([out])}, error):
        if here:
            wire.post([(peer, _flat(ins[peer])) for peer in wire.peers]).wait()
            _put(_flat(ins[root]), out)
        else:
            place = _place(out)
            wire.post((), [(root, place)]).wait()
            _put(place, out)
    return [out]


def all_to_all(wire: Wire, outs: list[Tensor], ins: list[Tensor]) -> list[Tensor]:
    """`ins[p]` of every rank to rank p, which puts it into `outs` at the sender's place.

    Sizes may be any. Among up to 16 ranks each checks that all outputs are as large as what is
    going to arrive in them.
    """
    error = _reason([*ins, *outs])
    if error is None and not len(ins) == len(outs) == wire.size:
        error = (
            f"{len(ins)} inputs and {len(outs)} outputs were given for {wire.size} ranks: pass "
            "one of each for each rank"
        )
    dtypes = {str(tensor.dtype) for tensor in (*ins, *outs)}
    counts = [tensor.numel() for tensor in (*ins, *outs)]
    shown = torch.tensor(counts, dtype=torch.int64) if is_direct(wire) and error is None else None
    fields = {"dtype": ", ".join(sorted(dtypes))}
    with _opened(wire, "all_to_all", fields, error, shown) as bodies:
        wrong = _unequal(wire.size, bodies) if is_direct(wire) else None
    if wrong is not None:  # known to all: nobody sends anything
        from ..errors import WeftError

        raise WeftError(wrong)
    places = [_place(out) for out in outs]
    wire.post(
        [(peer, _flat(ins[peer])) for peer in wire.peers if ins[peer].numel()],
        [(peer, places[peer]) for peer in wire.peers if places[peer].numel()],
    ).wait()
    places[wire.rank].copy_(_flat(ins[wire.rank]))
    for place, out in zip(places, outs, strict=True):
        _put(place, out)
    return outs
