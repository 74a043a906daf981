"""Moves tensors between ranks in rounds of bounded size, through host memory where need be.

The wire takes contiguous tensors on the CPU. Those go out from where they are, and come in where
they belong. Tensors on another device pass through page-locked buffers, one round of them at a
time: so staging never takes more than a round, however large the tensors are.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
from torch import Tensor

from ..tensors import has_elements, lacking
from ..wire.base import Wire, fresh, peers, plain

STAGED = 128 << 20
"""Bytes that a rank whose tensors are on another device sends and receives in one round."""

_CHANNEL = 3


def on_host(tensor: Tensor) -> bool:
    """Whether the wire can take a tensor from where it is."""
    return tensor.device.type == "cpu"


@functools.cache
def is_movable(dtype: torch.dtype) -> bool:
    """Whether torch can copy tensors of this dtype; quantised ones are more than their elements."""
    try:
        torch.empty(1, dtype=dtype).clone()
    except (NotImplementedError, RuntimeError):
        return False
    return True


def unsendable(name: str, tensor: object) -> str | None:
    """Why what a caller passed under that name is no tensor that can be sent, or None."""
    if not isinstance(tensor, Tensor):
        return f"{name} is a {type(tensor).__name__}: pass a tensor, empty if need be"
    if not has_elements(tensor):
        return f"{name} is {lacking(tensor)}: pass a strided tensor with data"
    if not is_movable(tensor.dtype):
        return f"{name} is {tensor.dtype}, which torch does not copy: view another dtype"
    return None


def wrong_bytes(name: str, count: object) -> str | None:
    """What is wrong with what a caller passed under that name, or None."""
    if isinstance(count, int) and not isinstance(count, bool) and count > 0:
        return None
    return f"{name} is {count!r}: pass a positive number of bytes"


def empty(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Memory for a result, of the dtype and on the device of `like`."""
    if on_host(like):
        return fresh(shape, like.dtype)
    return torch.empty(shape, dtype=like.dtype, device=like.device)


def host(tensor: Tensor) -> Tensor:
    """A tensor's values in plain memory of the host: the tensor itself where it is that."""
    if on_host(tensor):
        return plain(tensor)
    return _locked(tensor.numel(), tensor.dtype).view(tensor.shape).copy_(tensor)


def _locked(count: int, dtype: torch.dtype) -> Tensor:
    """Memory that an accelerator copies to and from quickest; torch keeps it for the next use."""
    return torch.empty(count, dtype=dtype, pin_memory=torch.accelerator.is_available())


def moved(
    wire: Wire, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor], rounds: int
) -> None:
    """Send tensors to peers and receive others; collective.

    Args:
        wire: among whom.
        outgoing: by peer, contiguous; what one rank sends another is as large as what that one
            receives. Empty tensors are not sent.
        incoming: by peer, contiguous, to be filled.
        rounds: how many, the same on every rank.
    """
    after = [peer for peer in peers(wire) if peer in outgoing]
    before = [peer for peer in reversed(peers(wire)) if peer in incoming]
    for number in range(rounds if after or before else 0):
        sends = [(peer, _piece(outgoing[peer], number, rounds)) for peer in after]
        places = [(peer, _piece(incoming[peer], number, rounds)) for peer in before]
        places = [(peer, place) for peer, place in places if place.numel()]
        recvs = [
            (peer, place if on_host(place) else _locked(place.numel(), place.dtype))
            for peer, place in places
        ]
        sends = [(peer, host(piece)) for peer, piece in sends if piece.numel()]
        pending = wire.post(sends, recvs, _CHANNEL)
        pending.wait()
        pending.release()
        for (_, place), (_, came) in zip(places, recvs, strict=True):
            if came is not place:
                place.copy_(came)


def _piece(tensor: Tensor, number: int, rounds: int) -> Tensor:
    """What of a tensor goes in one of so many rounds; both ends cut alike."""
    flat = tensor.view(-1)
    total = flat.numel()
    return flat[total * number // rounds : total * (number + 1) // rounds]
