"""How sorted index lists are written on the wire: plainly, or as their gaps in few bits.

A list says itself which it is. Gaps are written in a Golomb-Rice code that becomes a bitmap where
the list is dense (`weft.kernels.codec`): hardly more than the entropy, 4.8 bits for one index of
ten. Lossless. Writing and reading them takes a core some 3 ns an index, which a link of 8 Gbit/s
no longer repays: whether lists may be packed follows from the link (`Load.gaps`). Short lists are
written plainly in any case.

The idea is that of inverted files: Witten, Moffat and Bell, "Managing Gigabytes", section 3.3.
"""

from __future__ import annotations

import math
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
    """A sorted, unique list (int32 or int64, contiguous, on the CPU) as bytes."""
    count, plain = indices.numel(), indices.numel() * indices.element_size()
    lease = packed(indices, memory) if gaps else None
    if lease is not None:  # of so many indices it is always the shorter
        return lease
    lease = memory.lease(PREFIX + plain)
    _say(lease.tensor, count, plain, -1)
    typed(lease.tensor, (count,), indices.dtype, PREFIX).copy_(indices)
    return lease


def packed(indices: Tensor, memory: Pool, most: float = math.inf) -> Lease | None:
    """As `pack` in few bits, in `most` bytes at most; None where that cannot be, or does not pay.

    Whether indices are int32 or int64 makes no difference to the bytes.
    """
    count = indices.numel()
    if count < _WORTH or count > 8 * most:  # none takes less than a bit
        return None
    code = kernels.index_code(indices)
    if code is None or PREFIX + code.most > most:
        return None
    lease = memory.lease(PREFIX + code.most)
    size = kernels.encode(indices, code, lease.tensor[PREFIX:])
    lease.tensor = lease.tensor[: PREFIX + size]
    _say(lease.tensor, count, size, int(indices[0]))
    return lease


def _say(message: Tensor, count: int, size: int, first: int) -> None:
    message.numpy()[:PREFIX] = np.frombuffer(_PREFIX.pack(count, size, first), np.uint8)


def bytes_of(message: Tensor) -> int:
    """Bytes of a packed list, as its beginning says."""
    return PREFIX + int(_PREFIX.unpack_from(message.numpy().data)[1])


def unpack(message: Tensor, dtype: torch.dtype, last: int, room: Callable[[int], Tensor]) -> Tensor:
    """The list: a view of the message where it was written plainly.

    Args:
        message: what `pack` made, or longer.
        dtype: of the indices.
        last: no index is greater.
        room: gives memory of so many bytes, for a list that was packed.

    Raises:
        ValueError: the message is damaged: it is no such list.
    """
    count, size, first = _PREFIX.unpack_from(message.numpy().data)
    packed = message[PREFIX : PREFIX + size]
    # of so many bytes there are at most so many indices: no more memory is asked for
    if not 0 <= size == len(packed) or not 0 <= count <= 8 * size:
        raise ValueError(f"{count} indices in {size} bytes of a message of {len(message)}")
    if first < 0:
        if size != count * dtype.itemsize:
            raise ValueError(f"{count} indices of {dtype} in {size} bytes")
        return typed(message, (count,), dtype, PREFIX)
    indices = typed(room(count * dtype.itemsize), (count,), dtype)
    if not kernels.decode(packed, first, last, indices):
        raise ValueError(f"its code is not that of {count} sorted indices from {first} to {last}")
    return indices


def received(
    wire: Wire,
    peer: int,
    message: Tensor,
    dtype: torch.dtype,
    last: int,
    room: Callable[[int], Tensor],
) -> Tensor:
    """As `unpack`, of what a peer sent.

    Raises:
        WireError: the message is damaged; nobody can tell what else is.
    """
    try:
        return unpack(message, dtype, last, room)
    except ValueError as error:
        raise damaged(wire, peer, str(error)) from None


def damaged(wire: Wire, peer: int, why: str) -> WireError:
    """What to raise where a peer's index list is none; the wire is aborted."""
    text = f"the index list that rank {peer} sent cannot be read: {why}"
    wire.abort(text)
    return WireError(f"rank {wire.rank}: {text}", rank=wire.rank, culprit=peer)


def index_bytes(count: float, places: float, plain: int) -> float:
    """Bytes that an index of so many, spread over so many places, will probably take."""
    return min(plain, kernels.expected_bits(count, places) / 8) if count >= _WORTH else plain
