"""How sorted index lists are written on the wire: plainly, or as the gaps between neighbours.

Gaps of a list are small where the list is dense, so a byte or two holds each of them; the list
says itself how wide they are. Lossless. Writing gaps costs two passes over the list and reading
them one, which a link of some Gbit/s no longer repays: whether to do so follows from the link
(`Load.gaps`).

The idea is that of inverted files: Witten, Moffat and Bell, "Managing Gigabytes", section 3.3.
"""

from __future__ import annotations

import math
import struct

import numpy as np
import torch
from torch import Tensor

from ..wire.memory import Lease, Pool, typed

__all__ = ["PREFIX", "bytes_of", "index_bytes", "pack", "unpack"]

_PREFIX = struct.Struct("<qqq")  # indices; bytes of each; the first one, or -1 where all are plain
PREFIX = _PREFIX.size
"""Bytes before the indices."""

_GAPS = (np.uint8, np.uint16, np.uint32)


def pack(indices: Tensor, memory: Pool, *, gaps: bool) -> Lease:
    """A sorted, unique list (int32 or int64, contiguous, on the CPU) as bytes."""
    count, width = indices.numel(), indices.element_size()
    found = indices.numpy()
    steps = np.diff(found) if gaps and count > 1 else None
    if steps is not None:
        widest = int(steps.max())
        kind = next((np.dtype(k) for k in _GAPS if widest <= np.iinfo(k).max), None)
        if kind is None or kind.itemsize >= width:
            steps = None
        else:
            width = kind.itemsize
    size = count if steps is None else count - 1
    lease = memory.lease(PREFIX + size * width)
    raw = lease.tensor.numpy()
    first = -1 if steps is None else int(found[0])
    raw[:PREFIX] = np.frombuffer(_PREFIX.pack(count, width, first), np.uint8)
    if steps is None:
        typed(lease.tensor, (count,), indices.dtype, PREFIX).copy_(indices)
    else:
        raw[PREFIX:].view(f"u{width}")[:] = steps
    return lease


def bytes_of(message: Tensor) -> int:
    """Bytes of a packed list, as its beginning says."""
    count, width, first = _PREFIX.unpack_from(message.numpy().data)
    return PREFIX + int(count if first < 0 else count - 1) * int(width)


def unpack(message: Tensor, dtype: torch.dtype) -> Tensor:
    """The list; a view of the message where it was written plainly."""
    count, width, first = _PREFIX.unpack_from(message.numpy().data)
    if first < 0:
        return typed(message, (count,), dtype, PREFIX)
    indices = torch.empty(count, dtype=dtype)
    into = indices.numpy()
    into[0] = first
    into[1:] = message.numpy()[PREFIX : PREFIX + (count - 1) * width].view(f"u{width}")
    np.cumsum(into, out=into)
    return indices


def index_bytes(count: float, places: float, plain: int) -> int:
    """Bytes that an index of so many, spread over so many places, will probably take as a gap."""
    if count < 2:
        return plain
    widest = places / count * math.log(count)  # of exponentially distributed gaps
    return min(plain, next((width for width in (1, 2, 4) if widest < 256**width), 8))
