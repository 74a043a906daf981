"""What a habit does each time alike, as steps of machine code: boxes to messages, and to a result.

What `carry.assembled`, `carry.begun` and `carry.ended` do in torch operations, in their order, so
the bits are the same. Where there is no step for something, they do it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..grid import Box, Shape
from ..kernels.cpu_copy import LEAST
from ..kernels.cpu_talk import HERE, IN_X, IN_Y, Place, Program, Steps
from ..plan import Local, Plan
from .carry import BITS, blanks, widened

__all__ = ["Making", "model", "recipe", "written"]


def recipe(
    plan: Plan,
    rank: int,
    dtype: torch.dtype,
    payloads: Sequence[memoryview],
    told: Mapping[int, memoryview],
    heard: Mapping[int, memoryview],
    *,
    eager: bool,
) -> Program | None:
    """The steps of a rank; None if some of them cannot be done so.

    Args:
        plan: of the movement, or of its adjoint.
        rank: whose steps.
        dtype: of the tensors.
        payloads: where this rank's whole tensor is to be written.
        told: where the boxes for each rank that gets some are to be written, one behind the other.
        heard: where the tensor of each other rank lies, or what it told this rank.
        eager: whether all tensors are heard whole.
    """
    dtype = BITS.get(dtype, dtype)
    local = plan.local(rank)
    if local.adds and widened(dtype) != dtype:
        return None
    if model(local.result, dtype).nbytes >= LEAST:
        return None  # `carry` copies with stores that leave the cache out
    x = model(plan.have.shapes.get(rank), dtype)
    steps, fine = Steps(), True
    fine &= written(steps, payloads, x)
    for to, memory in told.items():
        for box, place in _split(memory, local.sends[to], dtype):
            fine &= steps.copy((HERE, place), (IN_X, x[box.slices]))
    steps.then()
    if local.result is None:
        steps.then()
        return steps.done() if fine else None
    puts = [put for _, _, put in local.sources] if eager else [put for _, put in local.own]
    into = Making(steps, local, dtype, puts[0] if puts else None)
    if eager:
        steps.then()
        for source, take, put in local.sources:
            of = x if source == rank else _typed(heard[source], plan.have.shapes[source], dtype)
            into.write(put, (IN_X if source == rank else HERE, of[take.slices]))
    else:
        for take, put in local.own:
            into.write(put, (IN_X, x[take.slices]))
        steps.then()
        for peer in sorted(local.recvs):
            for put, values in _split(heard[peer], local.recvs[peer], dtype):
                into.write(put, (HERE, values))
    return steps.done() if fine and into.fine else None


def written(steps: Steps, payloads: Sequence[memoryview], x: Tensor) -> bool:
    """Write a whole tensor into messages; False: there is no step for it."""
    return all(
        steps.copy((HERE, _typed(memory, x.shape, x.dtype)), (IN_X, x)) for memory in payloads
    )


class Making:
    """A result under construction, as `carry.Result`: y.

    Attributes:
        steps: where the next ones go.
        y: a model of it.
        fine: whether there was a step for everything.
    """

    def __init__(self, steps: Steps, local: Local, dtype: torch.dtype, first: Box | None) -> None:
        """Steps for what is blank, where `first` is the box that is written first."""
        self.steps, self._adds = steps, local.adds
        self.y = model(local.result, dtype)
        gaps, self._blank = blanks(local, first, self.y.nbytes)
        self.fine = all(steps.zero((IN_Y, self.y[gap.slices])) for gap in gaps)

    def write(self, put: Box, values: Place) -> None:
        """Steps that copy values there, or add them to what is there already."""
        do = self.steps.add if self.adds() else self.steps.copy
        self.fine &= do((IN_Y, self.y[put.slices]), values)

    def adds(self) -> bool:
        """Whether what is written next, whole or in pieces, is added to what is there already."""
        adds = self._adds and not self._blank
        self._blank = False
        return adds


def model(shape: Shape | None, dtype: torch.dtype) -> Tensor:
    """What a step is told of a tensor of that shape; None: there is none."""
    return torch.empty((0,) if shape is None else shape, dtype=dtype, device="meta")


def _typed(memory: memoryview, shape: Shape, dtype: torch.dtype, at: int = 0) -> Tensor:
    """Memory as a tensor, wherever it begins."""
    count = torch.Size(shape).numel()
    if not count:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=at).view(shape)


def _split(
    memory: memoryview, boxes: Sequence[Box], dtype: torch.dtype
) -> list[tuple[Box, Tensor]]:
    """As `carry.split`."""
    at, found = 0, []
    for box in boxes:
        found.append((box, _typed(memory, box.shape, dtype, at)))
        at += box.volume * dtype.itemsize
    return found
