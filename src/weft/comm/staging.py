"""Which tensors can be sent, which go along with an opening, and how the others move in rounds."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..base.arguments import as_integer
from ..base.devices import is_capturing
from ..base.tensors import has_elements, lacking, serves
from ..call.opening import is_direct
from ..call.terms import NO_LIMIT
from ..group.channels import ROUNDS
from ..group.group import Group

ALONG = 128 << 10
"""Bytes of a tensor that may go along with an opening, at most."""

_TOGETHER = 96 << 10  # bytes of all tensors of a rank, where each rank hears what is for all
_TO_OTHERS = 8 << 10  # bytes of a tensor that all need, some of them on other hosts

_IN_A_GRAPH = (
    "the stream records a CUDA graph, and ranks speak to each other on the host: call weft outside "
    "of the graph"
)

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


def unfollowed(name: str, tensor: Tensor) -> str | None:
    """What goes on around a call with this tensor, called `name`, that it would lose, or None."""
    if is_capturing(tensor.device):
        return _IN_A_GRAPH
    if forward_ad.unpack_dual(tensor).tangent is not None:  # type: ignore[no-untyped-call]  # torch's
        return f"{name} {_WITH_TANGENT}"
    return None


def number_of_bytes(given: object) -> int:
    """An argument as a number of bytes, at most `NO_LIMIT`; -1 if it is none."""
    return min(as_integer(given), NO_LIMIT)


def most_to_all(group: Group) -> int:
    """Bytes of a tensor of the host that each rank tells all others as a call opens, at most; -1:
    nothing is told so, not even empty tensors."""
    if not is_direct(group):
        return -1
    return ALONG if are_all_near(group) else _TO_OTHERS


def most_to_each(group: Group, limit: int = NO_LIMIT) -> list[int]:
    """For each rank the bytes of a tensor that it alone is told as a call opens, at most: with the
    statement, where statements are direct.

    The tensors of all others that are told so fit in a round of `limit` bytes, too.
    """
    most = ALONG if limit == NO_LIMIT else min(ALONG, limit // (2 * group.size))
    if not is_direct(group):
        return [most] * group.size
    of_near = min(most, _TOGETHER // max(1, len(group.near)))
    return [of_near if peer in group.near else most for peer in range(group.size)]


def are_all_near(group: Group) -> bool:
    """Whether all ranks read what a rank has for them in one memory; they all say the same."""
    return len(group.near) == group.size - 1


def moved(
    group: Group, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor], rounds: int = 1
) -> None:
    """Send tensors to peers and receive others; collective.

    Args:
        group: the group for the device of the tensors. If it is `lockstep`, all ranks take part in
            every round.
        outgoing: what to send, by peer; contiguous, and as large as the tensor that the peer
            receives into. Empty tensors are not sent.
        incoming: the tensors to receive into, by peer; contiguous.
        rounds: how many, the same on every rank.
    """
    after = [peer for peer in group.peers if peer in outgoing]
    before = [peer for peer in reversed(group.peers) if peer in incoming]
    takes_part = bool(after or before) or group.features.lockstep
    for number in range(rounds if takes_part else 0):
        # what goes to several peers stays one tensor, which a wire then copies once
        pieces = {id(each): _piece(each, number, rounds) for each in outgoing.values()}
        sends = [(peer, pieces[id(outgoing[peer])]) for peer in after]
        recvs = [(peer, _piece(incoming[peer], number, rounds)) for peer in before]
        group.post(
            [(peer, piece) for peer, piece in sends if piece.numel()],
            [(peer, place) for peer, place in recvs if place.numel()],
            ROUNDS,
        ).wait()


def _piece(tensor: Tensor, number: int, rounds: int) -> Tensor:
    """The part of a tensor that is sent in one of the rounds; both ends cut alike."""
    flat = tensor.view(-1)
    total = flat.numel()
    return flat[total * number // rounds : total * (number + 1) // rounds]
