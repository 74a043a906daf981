"""Which tensors can be sent, which go along with an opening, and how the wire moves the others."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..base.memory import memory_of
from ..base.tensors import Shape, has_elements, lacking, plain, serves, wrong_dims
from ..call.attempt import preparing
from ..call.mode import Mode
from ..call.opening import Opening, opened
from ..call.statement import room
from ..group.channels import TENSORS
from ..group.group import Group
from ..verbs.carrier import carried_by, verbs_of
from ..verbs.interface import Verbs

ALONG = 128 << 10
"""Bytes of a tensor that may go along with an opening, at most."""

_ALIGNED = 16  # bytes: a shape is padded to a multiple, so that any dtype may follow
_TOGETHER = 96 << 10  # bytes of all tensors of a rank, where each rank hears what is for all
_TO_OTHERS = 8 << 10  # bytes of a tensor that all need, some of them on other hosts

_WITH_TANGENT = (
    "has a tangent of forward-mode differentiation, which would be lost: pass "
    "torch.autograd.forward_ad.unpack_dual(x).primal, and the tangent by a call of its own"
)


def unsendable(name: str, tensor: object) -> str | None:
    """Why an argument, called `name`, is no tensor that can be sent, or None."""
    if not isinstance(tensor, Tensor):
        return f"{name} is a {type(tensor).__name__}: pass a tensor, empty if need be"
    if not has_elements(tensor):
        return f"{name} is {lacking(tensor)}: pass a strided tensor with data"
    if not serves(torch.clone, tensor.dtype):  # quantised ones are more than their elements
        return f"{name} is {tensor.dtype}, which torch does not copy: view another dtype"
    return unfollowed(name, tensor)


def unsendable_rows(name: str, tensor: object) -> str | None:
    """Why an argument, called `name`, is no tensor whose rows can be sent, or None."""
    if error := unsendable(name, tensor):
        return error
    assert isinstance(tensor, Tensor)  # else it was not sendable
    if tensor.dim() == 0:
        return f"{name} has no dimension, and so no rows: pass a tensor of at least one"
    error = wrong_dims(tensor)
    return error and f"{name} {error}"


def unfollowed(name: str, tensor: Tensor) -> str | None:
    """What goes on around a call with this tensor, called `name`, that it would lose, or None."""
    if forward_ad.unpack_dual(tensor).tangent is not None:  # type: ignore[no-untyped-call]  # torch's
        return f"{name} {_WITH_TANGENT}"
    return None


def most_to_all(group: Group) -> int:
    """Bytes of a tensor of the host that each rank tells all others as a call opens, at most."""
    # near ones read what a rank has for them in one memory; all ranks say the same of this
    are_all_near = len(group.near) == group.size - 1
    return min(ALONG if are_all_near else _TO_OTHERS, room(group.size))


def opened_with(
    group: Group,
    call: str,
    fields: Mapping[str, object],
    own: Tensor,
    longest: int,
    mode: Mode,
) -> tuple[Opening, Verbs | None, bool]:
    """Open a call, with the tensors of all ranks in it if they are small; collective.

    Args:
        group, call, fields, mode: of the opening.
        own: this rank's tensor, contiguous.
        longest: the bytes of the largest tensor of a rank, which all ranks know.

    Returns:
        The opening; the verbs by which the tensors go, or None; and whether they went along.
    """
    with preparing(group, call):  # there may be no memory
        verbs = verbs_of(group, own.device)
        goes_along = verbs is None and longest <= most_to_all(group)
        along = bytearray(memory_of(own) if goes_along else b"")
    fields = {**fields, "device": carried_by(verbs)}
    return opened(group, call, fields, along, mode=mode), verbs, goes_along


def most_to_each(group: Group) -> list[int]:
    """For each rank the bytes of a tensor that it alone is told as a call opens, at most."""
    of_near = min(ALONG, _TOGETHER // max(1, len(group.near)))
    return [of_near if peer in group.near else ALONG for peer in range(group.size)]


def packed(tensor: Tensor, most: int) -> bytearray:
    """A tensor's shape, with its elements if they have so many bytes at most."""
    along = tensor.nbytes <= most
    shape = struct.pack(f"<BB6x{tensor.dim()}q", along, tensor.dim(), *tensor.shape)
    payload = memory_of(plain(tensor)) if along else b""
    return bytearray().join([shape, bytes(-len(shape) % _ALIGNED), payload])


def unpacked(raw: memoryview, dtype: torch.dtype) -> tuple[Shape, Tensor | None]:
    """Read what `packed` made: a shape, and the tensor, in that memory, if it came along.

    Raises:
        ValueError, struct.error: the bytes are invalid.
    """
    along, dims = struct.unpack_from("<?B", raw)
    shape = struct.unpack_from(f"<{dims}q", raw, 8)
    end = 8 + 8 * dims
    payload = raw[end + -end % _ALIGNED :]
    count = math.prod(shape)
    if min(shape, default=0) < 0 or (along and count * dtype.itemsize > len(payload)):
        raise ValueError(f"shape {shape} in {len(raw)} bytes")
    if not along:
        return shape, None
    if not count:
        return shape, torch.empty(shape, dtype=dtype, device="cpu")
    return shape, torch.frombuffer(payload, dtype=dtype, count=count).view(shape)


def move(group: Group, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor]) -> None:
    """Send tensors to peers and receive others; collective.

    Args:
        group: the ranks that take part; its wire carries the tensors.
        outgoing: what to send, by peer; contiguous, and as large as the tensor that the peer
            receives into. Empty tensors are not sent.
        incoming: the tensors to receive into, by peer; contiguous.
    """
    sends = [(p, outgoing[p]) for p in group.peers if p in outgoing and outgoing[p].numel()]
    recvs = [
        (p, incoming[p]) for p in reversed(group.peers) if p in incoming and incoming[p].numel()
    ]
    if outgoing or incoming:
        group.post(sends, recvs, TENSORS).wait()
