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
import functools
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..agree import agree, is_direct
from ..errors import WeftError
from ..wire import dense
from ..wire.base import Pending, Wire, as_bytes, flattened, is_plain, plain
from ..wire.memory import Lease, typed

__all__ = [
    "all_gather",
    "all_gather_single",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "gather",
    "op_name",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
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
    for name, member in _members():
        if op == member:  # an object of ReduceOp equals its member, but does not tell its name
            return _OPS.get(name, name)
    return str(op)


@functools.cache
def _members() -> tuple[tuple[str, Any], ...]:
    """torch's reductions by name, which torch puts together anew for whoever asks."""
    return tuple(dist.ReduceOp.RedOpType.__members__.items())


def barrier(wire: Wire) -> list[Tensor]:
    """Wait until all ranks have come here."""
    with _opened(wire, "barrier", {}, None):
        return []


def all_reduce(wire: Wire, tensors: list[Tensor], op: str) -> list[Tensor]:
    """Reduce each tensor over all ranks, in place."""
    fields = {"op": op, **_said(tensors)}
    error = _reason(tensors, op)
    eager = error is None and len(tensors) == 1 and _eager(wire, tensors[0].nbytes)
    flats = [_flat(tensor) for tensor in tensors] if error is None else []
    payload = flats[0] if eager else None
    with _opened(wire, "all_reduce", fields, error, payload) as bodies:
        for flat, tensor in zip(flats, tensors, strict=True):
            if eager:
                # copies, since a statement is aligned to 8 bytes only
                parts = [typed(body, (flat.numel(),), flat.dtype).clone() for body in bodies]
                dense.reduce(parts, _sum(op), flat)
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
    """A part from the root to each rank, which passes it on to all others; the root, its own."""
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
        wire.post((), [(owner, parts[owner])]) for owner in (*others, root) if len(parts[owner])
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
    if wrong is not None:  # known to all, so that nobody sends anything
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


def all_gather_single(wire: Wire, out: Tensor, mine: Tensor) -> list[Tensor]:
    """Every rank's tensor to every rank, one after the other in one tensor."""
    place = _place(out)
    if place.numel() != wire.size * mine.numel():
        outs = [place[:0]] * wire.size  # which `all_gather` complains of, on every rank
    else:
        outs = list(place.view(wire.size, -1))
    all_gather(wire, outs, mine)
    _put(place, out)
    return [out]


def reduce_scatter_single(wire: Wire, out: Tensor, mine: Tensor, op: str) -> list[Tensor]:
    """Reduce each equal part of the ranks' tensors on one rank."""
    flat = _flat(mine)
    pieces = [flat[:0]] * wire.size
    if flat.numel() == wire.size * out.numel():
        pieces = list(flat.view(wire.size, -1))
    return reduce_scatter(wire, out, pieces, op)


def all_to_all_single(
    wire: Wire, out: Tensor, mine: Tensor, out_sizes: list[int], in_sizes: list[int]
) -> list[Tensor]:
    """Parts of one tensor, cut along its first dimension, to each rank; no sizes are equal ones."""
    place = out.detach() if is_plain(out) else torch.empty_like(out).contiguous()
    outs = _split(place, out_sizes, wire.size)
    all_to_all(wire, outs, _split(mine.detach(), in_sizes, wire.size))
    if place.data_ptr() != out.data_ptr():
        out.detach().copy_(place)
    return [out]


def _split(tensor: Tensor, sizes: list[int], ranks: int) -> list[Tensor]:
    """The parts of a tensor; none where the sizes are not its own, which `all_to_all` refuses."""
    rows = tensor.shape[0] if tensor.dim() else 0
    if not sizes:
        return list(tensor.chunk(ranks)) if rows % ranks == 0 and rows else [tensor[:0]] * ranks
    return list(torch.split(tensor, sizes)) if sum(sizes) == rows else []


@contextlib.contextmanager
def _opened(
    wire: Wire,
    call: str,
    fields: Mapping[str, object],
    error: str | None,
    payload: Tensor | None = None,
) -> Iterator[list[Tensor]]:
    """The opening exchange; what each rank's payload was, as bytes.

    Payloads can be told apart only where statements are direct: else there is none.
    """
    body = _NOTHING if payload is None else as_bytes(payload)
    with torch.profiler.record_function(f"weft::{call}"):
        agreement = agree(wire, call, fields, error, body, lambda left, right: left)
        try:
            yield agreement.bodies
        finally:
            agreement.release()


def _reduce_pieces(wire: Wire, out: Tensor, pieces: list[Tensor], op: str) -> None:
    """Reduce every rank's `pieces[p]` on rank p, into its `out`, chunk by chunk.

    While one chunk is added up the next is on its way.
    """
    own, flat = pieces[wire.rank], _place(out)
    step = max(1, dense.SCRATCH // wire.size // max(1, own.element_size()))
    longest = max(map(len, pieces))

    def exchange(start: int) -> tuple[Pending, Lease, list[Tensor]] | None:
        if start >= longest:
            return None
        mine = own[start : start + step]
        lease = wire.lease(wire.size * mine.nbytes)
        slots = list(typed(lease.tensor, (wire.size, len(mine)), own.dtype))
        slots[wire.rank].copy_(mine)  # a copy, since adding overwrites the lowest rank's
        pending = wire.post(
            [
                (peer, chunk)
                for peer in wire.peers
                if len(chunk := pieces[peer][start : start + step])
            ],
            [(peer, slots[peer]) for peer in wire.peers if len(mine)],
        )
        return pending, lease, slots

    under_way, start = exchange(0), 0
    while under_way is not None:
        pending, lease, slots = under_way
        ahead = exchange(start + step)
        pending.wait()
        if len(slots[0]):
            dense.reduce(slots, _sum(op), flat[start : start + step])
        lease.release()
        under_way, start = ahead, start + step
    _mean(flat, op, wire.size)
    _put(flat, out)


def _unequal(size: int, bodies: list[Tensor]) -> str | None:
    """Where an output is not as large as what arrives in it; alike on every rank."""
    counts = [typed(body, (2, size), torch.int64).tolist() for body in bodies]
    for source, (sends, _) in enumerate(counts):
        for target, (_, takes) in enumerate(counts):
            if sends[target] != takes[source]:
                return (
                    f"rank {source} has {sends[target]} elements for rank {target}, which has room "
                    f"for {takes[source]} from it: split sizes must match"
                )
    return None


def _reason(tensors: Sequence[Tensor], op: str | None = None) -> str | None:
    """What is wrong with a call's tensors, in a sentence, or None."""
    first = tensors[0]
    for tensor in tensors:
        if tensor.layout != torch.strided:
            return f"a tensor has layout {tensor.layout}: only all_reduce takes sparse tensors"
        if tensor.device.type != "cpu":
            return f"a tensor is on {tensor.device}: this backend moves CPU tensors, so copy it"
        if tensor.dtype != first.dtype:
            return f"tensors of {first.dtype} and of {tensor.dtype} were given: pass one dtype"
    if op == "avg" and first.dtype == torch.bool:
        return "op avg does not apply to torch.bool"
    return None if op is None else dense.refuses(_sum(op), first.dtype)


def _said(tensors: Sequence[Tensor]) -> dict[str, object]:
    """The dtype and the sizes of tensors, as a fingerprint."""
    text = ", ".join(str(tensor.numel()) for tensor in tensors)
    if len(text) > _SAID:
        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        text = f"{text[:20]} ... ({len(tensors)} sizes, digest {digest})"
    return {"dtype": tensors[0].dtype if tensors else None, "sizes": text}


def _eager(wire: Wire, nbytes: int) -> bool:
    return nbytes <= EAGER and is_direct(wire)


def _sum(op: str) -> str:
    """An average is a sum that is divided at the end."""
    return "sum" if op == "avg" else op


def _mean(flat: Tensor, op: str, size: int) -> None:
    if op == "avg":
        whole = not (flat.is_floating_point() or flat.is_complex())
        flat.div_(size, rounding_mode="trunc" if whole else None)


def _flat(tensor: Tensor) -> Tensor:
    """The elements in their order, 1-D: the tensor's own memory if it is plain."""
    return flattened(plain(tensor.detach()))


def _place(tensor: Tensor, *, filled: bool = False) -> Tensor:
    """Where to receive a tensor: its own memory if it is plain; `_put` does the rest."""
    if is_plain(tensor) or filled:
        return _flat(tensor)
    return torch.empty(tensor.numel(), dtype=tensor.dtype)


def _put(flat: Tensor, tensor: Tensor) -> None:
    if flat.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(flat.view(tensor.shape))


def _put_bytes(body: Tensor, tensor: Tensor) -> None:
    """What came as bytes; copied as bytes if possible, since they need not be aligned."""
    place = _place(tensor)
    if place.numel():
        as_bytes(place).copy_(body)
    _put(place, tensor)
