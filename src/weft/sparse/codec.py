"""How sorted index lists are written on the wire: plainly, or as their gaps in few bits.

A list says itself which it is. Gaps are written in a Golomb-Rice code that becomes a bitmap where
the list is dense (`weft.kernels.codec`): hardly more than the entropy, 4.8 bits for one index of
ten. Lossless. Writing and reading them takes a core some 3 ns an index, which a link of 8 Gbit/s
no longer repays: whether lists may be packed follows from the link (`Sizes.gaps`). Short lists are
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
from ..base.memory import Pool, typed
from ..wire.interface import Lease

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
        first = -1
        size = count * indices.element_size()
        lease = memory.lease(PREFIX + size)
        typed(lease.tensor, (count,), indices.dtype, PREFIX).copy_(indices)
    else:
        first = int(indices[0])
        lease = memory.lease(PREFIX + code.most)
        size = kernels.encode(indices, code, lease.tensor[PREFIX:])
        lease.tensor = lease.tensor[: PREFIX + size]
    lease.tensor.numpy()[:PREFIX] = np.frombuffer(_PREFIX.pack(count, size, first), np.uint8)
    return lease


def unpack(message: Tensor, dtype: torch.dtype, last: int, room: Callable[[int], Tensor]) -> Tensor:
    """The list that a peer sent: a view of the message where it was written plainly.

    Args:
        message: what `pack` made, or longer.
        dtype: of the indices.
        last: no index is above it.
        room: gives memory of so many bytes, for a list that was packed.

    Raises:
        ValueError: the message is damaged: it is no such list.
    """
    count, size, first = _PREFIX.unpack_from(message.numpy().data)
    # of so many bytes there are at most so many indices: no more memory is asked for
    if not 0 <= size <= message.numel() - PREFIX or not 0 <= count <= 8 * size:
        raise ValueError(f"{count} indices in {size} bytes of a message of {message.numel()}")
    if first < 0:
        if size != count * dtype.itemsize:
            raise ValueError(f"{count} indices of {dtype} in {size} bytes")
        indices = typed(message, (count,), dtype, PREFIX)
        fine = kernels.ascends(indices, last)
    else:
        indices = typed(room(count * dtype.itemsize), (count,), dtype)
        packed = message[PREFIX : PREFIX + size]
        fine = kernels.decode(packed, first, last, indices)
    if not fine:
        raise ValueError(f"they are not {count} sorted, distinct indices from 0 to {last}")
    return indices
