"""`sparse_all_gather`: every rank gets the rows of all, one rank's after another's.

For rows that must not be combined, or not yet: samples, queues of indices, gradients that are
clipped one rank at a time.
Nothing is sorted and nothing combined, so rows may be of any dtype; where the caller gave a
`wire_dtype` they are rounded to it, the rank's own too, so that all ranks have the same bits. The
opening exchange says how many rows each rank has, or carries them; so every length is known, and
rows are received where they belong. They go round the ring of ranks in chunks: one stream into each
host and one out of it.

Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms" (JPDC 2009), section 3.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from ..._torch import uncompiled, without_transforms
from ...agree import BODY, agree, is_direct
from ...errors import WeftError
from ...kernels.ops import OPS
from ...rows import Rows
from ...wire import default
from ...wire.base import Wire, as_bytes, typed
from ..call import Call, row_bytes, shape_in
from ..choice import ALONE, EAGER, with_link
from ..cost import Load
from ..header import NO_LIMIT, Header
from ..record import recording, started
from ..request import Request
from ..run import handed_out, settle, too_small
from ..stream import LISTS, VALUES, Ring

_NAME = "sparse_all_gather"


@uncompiled
@without_transforms
def sparse_all_gather(
    rows: Any,
    group: Any = None,
    async_op: bool = False,
    *,
    return_counts: bool = False,
    wire_dtype: torch.dtype | None = None,
    out: Any = None,
) -> Any:
    """Concatenate the rows of all ranks in rank order; every rank gets all of them.

    Args:
        rows: a sparse COO tensor, `(indices, values)`, or `weft.Rows`; the result has the same form
            and device. Indices are int32 or int64; values `[k, *row_shape]` of any dtype. Ranks may
            have different numbers of rows, or none.
        group: None (the default group), a Wire, a ProcessGroup, or a 1-D DeviceMesh.
        async_op: return at once, with a `Work` whose `wait()` gives the result. The input must not
            change before.
        return_counts: also return how many rows are of each rank.
        wire_dtype: None, or `torch.bfloat16` or `torch.float16`, in which floating-point values are
            then sent: rounded once, to nearest even, on every rank alike, also the one
            whose they are (docs/wire-dtype.md).
        out: memory for the result, as for `weft.sparse_all_reduce`: None, `(indices, values)` with
            room for it, or a function that allocates them.

    Returns:
        The rows of rank 0 as they were given, then those of rank 1, and so on: not sorted, and
        duplicates stay (a COO tensor is not coalesced). With `return_counts` a pair of that and
        of an int64 tensor `[size]`.

    Raises:
        WeftError: some rank's arguments are wrong or differ from the others', or its `out` is too
            small; the same text on every rank, naming the rank. The next call works.
        WireError: a peer or a link failed; names the culprit. The group is lost.

    Example:
        >>> import torch, weft
        >>> from weft.testing import run
        >>> def program(wire):
        ...     rows = torch.tensor([7, wire.rank]), torch.ones(2)
        ...     (indices, _), counts = weft.sparse_all_gather(rows, return_counts=True)
        ...     return indices.tolist(), counts.tolist()
        >>> run(2, program)[0]
        ([7, 0, 7, 1], [2, 2])
    """
    wire = default.resolve(group)
    request = Request.to_move(rows, out, wire_dtype)

    def job() -> Any:
        result, counts = gather_now(wire, request, _NAME)
        return (result, torch.tensor(counts)) if return_counts else result

    return started(wire, _NAME, job, async_op)


def gather_now(wire: Wire, request: Request, name: str) -> tuple[Any, list[int]]:
    """One call whose turn on the wire it is: the result in the form asked for; rows of each."""
    with recording(wire, name) as note:
        all_ = collected(wire, request, name)
    total = all_.load.total
    note(all_.algorithm, rows=len(request.rows), total=total, union=total, bound=all_.bound)
    result = request.restore(all_.rows)
    if isinstance(result, torch.Tensor):
        result._coalesced_(False)  # duplicates stay
    return result, all_.counts


_SAID = struct.Struct("<qqq2?6x")  # rows, largest index, room in out; rows are here, out may fail


@dataclass(frozen=True, slots=True)
class Collected:
    """All ranks' rows in rank order.

    Attributes:
        algorithm: "eager", "ring" or "alone".
        rows: of rank 0, then of rank 1, and so on; each as it was given.
        counts: how many of each.
        load: the sizes of the call.
    """

    algorithm: str
    rows: Rows
    counts: list[int]
    load: Load

    @property
    def bound(self) -> float:
        """Bytes that the average rank must receive, an index counted as 4."""
        load = self.load
        return (load.ranks - 1) / load.ranks * load.total * (load.row + 4)


def collected(
    wire: Wire,
    request: Request,
    name: str,
    chunk: Callable[[Load], int] = lambda load: load.chunk,
) -> Collected:
    """Every rank's rows on every rank; collective.

    Args:
        wire: among whom.
        request: this rank's rows, and the fingerprint.
        name: of the call.
        chunk: bytes of the chunks that go round the ring.
    """
    rows = request.rows
    size = _SAID.size + _aligned(rows.indices.numel() * rows.indices.element_size())
    size += len(rows) * row_bytes(rows.row_shape, request.dtype)
    eager = is_direct(wire) and wire.size > 1 and size <= BODY and request.error is None
    body = _said(request, size if eager else _SAID.size, eager)
    agreement = agree(
        wire, name, request.fields, request.error, body, lambda a, b: torch.cat([a, b])
    )
    try:
        said = [
            _SAID.unpack_from(body.numpy().data, start)
            for body in agreement.bodies
            for start in range(0, body.numel() if not is_direct(wire) else 1, _SAID.size)
        ]
        request.agreed = agreement.fields
        call, counts = _call(wire, request, said)
        offsets = [0, *accumulate(counts)]
        if offsets[-1] > call.header.capacity:
            text = too_small(call.header.capacity, offsets[-1])
            raise WeftError(f"rank {call.header.tightest}: {text}")
        result = call.result(offsets[-1])
        part = [slice(low, high) for low, high in pairwise(offsets)]
        if all(here for *_, here, _ in said) and wire.size > 1:
            algorithm = EAGER
            for body, place in zip(agreement.bodies, part, strict=True):
                count = place.stop - place.start
                start = _SAID.size
                for into in (result.indices[place], result.values[place]):
                    size = into.numel() * into.element_size()
                    as_bytes(into).copy_(body[start : start + size])  # aligned for bytes alone
                    start += _aligned(count * call.index.itemsize)
        else:
            algorithm = ALONE if wire.size == 1 else "ring"
            if wire.size > 1:
                call.load = with_link(wire, call.load)
                call.load = call.load.but(chunk=chunk(call.load))
            _round(rows, call, result, part)
    finally:
        agreement.release()
    settle(wire, name, call)
    whole = handed_out(call.widened(result), call)
    return Collected(algorithm, whole, counts, call.load)


def _aligned(size: int) -> int:
    return -(-size // 16) * 16


def _said(request: Request, size: int, eager: bool) -> Tensor:
    """The body of a statement: how many rows there are, and the rows themselves where few."""
    rows, limit = request.rows, request.capacity
    body = torch.zeros(size, dtype=torch.uint8)
    raw = bytearray(_SAID.size)
    _SAID.pack_into(
        raw,
        0,
        len(rows),
        request.highest,
        NO_LIMIT if limit is None else limit,
        eager,
        request.fallible,
    )
    body[: _SAID.size] = torch.frombuffer(raw, dtype=torch.uint8)
    if eager:
        count = rows.indices.numel()
        typed(body, (count,), rows.indices.dtype, _SAID.size).copy_(rows.indices)
        start = _SAID.size + _aligned(count * rows.indices.element_size())
        typed(body, tuple(rows.values.shape), request.dtype, start).copy_(rows.values)
    return body


def _call(wire: Wire, request: Request, said: list[tuple[int, ...]]) -> tuple[Call, list[int]]:
    """What all ranks together said; also what this rank alone did not know."""
    fields = request.agreed
    index, own = (getattr(torch, fields[f"{of} dtype"].split(".")[1]) for of in _DTYPES)
    dtype = request.travelling(own)
    shape = fields["row shape"]
    height = fields["height"]
    counts, highest, limits, _, fallible = zip(*said, strict=True)
    call = Call(
        wire,
        OPS["sum"],
        row_shape=tuple(request.rows.row_shape) if shape == "?" else shape_in(shape),
        index=index,
        dtype=dtype,
        wide=None if dtype == own else own,
        height=int(height) if height.isdigit() else None,
        out=request.out,
        given=request.rows,
    )
    nothing = torch.empty(0, dtype=torch.int64).numpy()
    call.header = Header(
        sum(counts),
        max(counts),
        min(counts),
        max(highest),
        min(limits),
        limits.index(min(limits)),
        False,
        any(fallible),
        nothing,
        nothing,
        nothing,
    )
    row = row_bytes(call.row_shape, dtype)
    call.load = Load(
        ranks=wire.size,
        total=sum(counts),
        most=max(counts),
        fewest=min(counts),
        union=sum(counts),
        height=call.height,
        row=row,
        partial=row,
        index=4 if max(highest) < 2**31 else 8,
        places=max(highest) + 1,
    )
    return call, list(counts)


_DTYPES = ("index", "value")


def _round(rows: Rows, call: Call, result: Rows, part: list[slice]) -> None:
    """All rows round the ring, first the indices, then the values."""
    wire, mine = call.wire, part[call.wire.rank]
    narrow = call.wire_index != call.index
    with wire.lease(len(result) * call.load.index * narrow) as memory:
        indices = result.indices
        if narrow:
            indices = typed(memory, tuple(indices.shape), call.wire_index)
        if len(rows):  # a rank without any may not know the row shape
            indices[mine] = rows.indices
            result.values[mine] = rows.values
        index_ring = Ring(call, [indices[each] for each in part], LISTS)
        value_ring = Ring(call, [result.values[each] for each in part], VALUES)
        index_ring.send(indices[mine])
        value_ring.send(result.values[mine])
        index_ring.finish()
        value_ring.finish()
        if narrow:
            result.indices.copy_(indices)
