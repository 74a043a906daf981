"""`all_to_all`: a tensor from each rank to each, of any sizes, which nobody needs to know before.

In the opening exchange every rank tells each other rank the shape of its tensor, and sends the
tensor along if it is small: one round. Larger tensors are sent from their own memory and received
in the result's, between all pairs of ranks at once. Tensors that the wire does not carry, small or
large, go by one verb, of all ranks.

The adjoint of sending tensors is sending their gradients back: the same collective again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..base.errors import check, entry
from ..base.memory import fresh
from ..base.tensors import Shape, as_bytes, plain, wrong_dims
from ..call.attempt import preparing
from ..call.mode import Mode
from ..call.opening import Opening, opened
from ..group import default
from ..verbs.carrier import carried_by, verbs_of
from ..verbs.interface import Verbs
from .differentiable import Linear, apply
from .staging import most_to_each, move, packed, unpacked, unsendable

_NAME = "all_to_all"


@entry
def all_to_all(inputs: Sequence[Tensor], group: object = None) -> list[Tensor]:
    """Send a tensor to each rank and receive one from each. Differentiable.

    Args:
        inputs: a tensor for each rank of the group, in rank order, also for this rank. They have
            one dtype, any, and one device; each may have another shape, also without elements.
        group: None (the default group), a Group, a ProcessGroup, or a 1-D DeviceMesh.

    Returns:
        The tensors that each rank sent to this one, in rank order, on the device of the inputs, in
        new memory. If an input of some rank requires a gradient, the results of all ranks do, and
        all must run backward; the gradient of an input comes back from the rank that received it.

    Raises:
        WeftError: some rank's arguments are wrong or differ from the others'; the same text on
            every rank, naming the rank. The next call works.
        WireError: a peer or a link failed; names the culprit. The group is lost.

    Example:
        >>> import torch, weft
        >>> from weft.testing import run
        >>> def program(group):
        ...     inputs = [torch.full((group.rank + to,), group.rank) for to in range(group.size)]
        ...     return [tensor.tolist() for tensor in weft.all_to_all(inputs)]
        >>> run(2, program)
        [[[], [1]], [[0], [1, 1]]]
    """
    group = default.resolve(group)
    with preparing(group, _NAME):
        check(_wrong(inputs, group.size))
        tensors = list(inputs)
    return apply(Scatter(group, _NAME), tensors)


def _wrong(inputs: object, size: int) -> str | None:
    """What is wrong with what a caller passed, or None."""
    if not isinstance(inputs, list | tuple):
        return f"inputs is a {type(inputs).__name__}: pass a list of {size} tensors"
    for to, tensor in enumerate(inputs):
        name = f"inputs[{to}]"
        if error := unsendable(name, tensor):
            return error
        if error := wrong_dims(tensor):
            return f"{name} {error}"
        for what in ("dtype", "device"):
            first, this = getattr(inputs[0], what), getattr(tensor, what)
            if this != first:
                return f"{name} has {what} {this}, inputs[0] has {first}: pass one {what}"
    if len(inputs) != size:
        return f"inputs has {len(inputs)} tensors for {size} ranks: pass one for each"
    return None


class Scatter(Linear):
    """The collective: a tensor to each rank. It is its own adjoint."""

    def adjoint(self, name: str) -> Scatter:
        return Scatter(self.group, name)

    def run(self, tensors: Sequence[Tensor], mode: Mode) -> tuple[list[Tensor], Opening]:
        group = self.group
        like = tensors[group.rank]
        with preparing(group, self.name):  # there may be no memory
            tensors = [*map(plain, tensors)]
            verbs = verbs_of(group, like.device)
            eager = most_to_each(group) if verbs is None else [-1] * group.size
            statements = [*map(packed, tensors, eager)]
        statements[group.rank] = bytearray()
        fields = {**self.fields, "dtype": like.dtype, "device": carried_by(verbs)}
        private = [[each] for each in statements]
        opening = opened(group, self.name, fields, mode=mode, private=private)
        shapes = [tuple(like.shape)] * group.size
        along = {group.rank: like}
        for peer in group.peers:
            said = opening.private[peer]
            shapes[peer], came = group.decode(peer, "a tensor", unpacked, said, like.dtype)
            if came is not None:
                along[peer] = came
        if verbs is not None:
            return _exchanged(verbs, tensors, shapes), opening
        results = [fresh(shape, like.dtype) for shape in shapes]
        for rank, came in along.items():
            results[rank].copy_(came)
        large = [peer for peer in group.peers if tensors[peer].nbytes > eager[peer]]
        move(
            group,
            {peer: tensors[peer] for peer in large},
            {peer: results[peer] for peer in group.peers if peer not in along},
        )
        return results, opening


def _exchanged(verbs: Verbs, tensors: Sequence[Tensor], shapes: Sequence[Shape]) -> list[Tensor]:
    """Send a tensor to each rank and receive one of each of these shapes, by one verb."""
    dtype = tensors[0].dtype
    mine = torch.cat([*map(as_bytes, tensors)])  # not everything is there for all dtypes
    comes = [math.prod(shape) * dtype.itemsize for shape in shapes]
    found = verbs.exchange(mine, [tensor.nbytes for tensor in tensors], comes).view(dtype)
    results = []
    start = 0
    for shape in shapes:
        # no view of another tensor, which autograd would not let a caller change
        part = found.new_empty(0)
        part.set_(found.untyped_storage(), start, shape)  # type: ignore[call-overload]  # as it is
        results.append(part)
        start += part.numel()
    return results
