"""How sorted index lists are written on the wire: plainly, or as their gaps in few bits.

A list says itself which it is. Gaps are written in a Golomb-Rice code that becomes a bitmap where
the list is dense (`weft.kernels.codec`): hardly more than the entropy, 4.8 bits for one index of
ten. Lossless. Writing and reading them takes a core some 3 ns an index, which a link of 8 Gbit/s
no longer repays: whether lists may be packed follows from the link (`Load.gaps`). Short lists are
written plainly in any case.

The idea is that of inverted files: Witten, Moffat and Bell, "Managing Gigabytes", section 3.3.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from .. import kernels
from ..errors import WireError
from ..wire.base import Lease, Pool, Wire, typed

_PREFIX = struct.Struct("<qqq")  # indices; bytes after this; the first one, or -1 where plain
PREFIX = _PREFIX.size
"""Bytes before the indices."""

_WORTH = 1024  # indices: packing fewer takes 25 µs, as sending them does at 1 Gbit/s


def pack(indices: Tensor, memory: Pool, *, gaps: bool) -> Lease:
    """A sorted, unique list (int32 or int64, contiguous, on the CPU) as bytes.

    With `gaps` in few bits, where that can be and pays; then int32 and int64 give the same bytes.
    """
    count = indices.numel()
    code = kernels.index_code(indices) if gaps and count >= _WORTH else None
    if code is None:
        size, first = count * indices.element_size(), -1
        lease = memory.lease(PREFIX + size)
        typed(lease.tensor, (count,), indices.dtype, PREFIX).copy_(indices)
    else:
        lease, first = memory.lease(PREFIX + code.most), int(indices[0])
        size = kernels.encode(indices, code, lease.tensor[PREFIX:])
        lease.tensor = lease.tensor[: PREFIX + size]
    lease.tensor.numpy()[:PREFIX] = np.frombuffer(_PREFIX.pack(count, size, first), np.uint8)
    return lease


def bytes_of(message: Tensor) -> int:
    """Bytes of a packed list, as its beginning says."""
    return PREFIX + int(_PREFIX.unpack_from(message.numpy().data)[1])


def unpack(
    wire: Wire,
    peer: int,
    message: Tensor,
    dtype: torch.dtype,
    last: int,
    room: Callable[[int], Tensor],
) -> Tensor:
    """The list that a peer sent: a view of the message where it was written plainly.

    Args:
        wire, peer: where it came from.
        message: what `pack` made, or longer.
        dtype: of the indices.
        last: no index is greater.
        room: gives memory of so many bytes, for a list that was packed.

    Raises:
        WireError: the message is damaged: it is no such list; nobody can tell what else is.
    """
    count, size, first = _PREFIX.unpack_from(message.numpy().data)
    packed = message[PREFIX : PREFIX + size]
    # of so many bytes there are at most so many indices: no more memory is asked for
    if not 0 <= size == len(packed) or not 0 <= count <= 8 * size:
        text = f"{count} indices in {size} bytes of a message of {len(message)}"
        raise damaged(wire, peer, text)
    if first < 0:
        if size != count * dtype.itemsize:
            raise damaged(wire, peer, f"{count} indices of {dtype} in {size} bytes")
        return typed(message, (count,), dtype, PREFIX)
    indices = typed(room(count * dtype.itemsize), (count,), dtype)
    if not kernels.decode(packed, first, last, indices):
        text = f"its code is not that of {count} sorted indices from {first} to {last}"
        raise damaged(wire, peer, text)
    return indices


def damaged(wire: Wire, peer: int, why: str) -> WireError:
    """What to raise where a peer's index list is none; the wire is aborted."""
    text = f"the index list that rank {peer} sent cannot be read: {why}"
    wire.abort(text)
    return WireError(f"rank {wire.rank}: {text}", rank=wire.rank, culprit=peer)


def index_bytes(count: float, places: float, plain: int) -> float:
    """Bytes that an index of so many, spread over so many places, will probably take."""
    return min(plain, kernels.expected_bits(count, places) / 8) if count >= _WORTH else plain
