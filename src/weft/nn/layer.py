"""The face that all layers have: torch.nn.Module around a movement."""

from __future__ import annotations

import torch
from torch import Tensor

from .door import moved
from .movement import Movement

__all__ = ["Layer"]


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # torch's has no types
def _number(movement: Movement) -> int:
    from .compiled import number

    return number(movement)


class Layer(torch.nn.Module):
    """A data movement as a module, without parameters.

    `layer(x)` is collective among the ranks that it concerns; others pass a tensor without
    elements, get one, and wait for nobody. The result is always new memory. Its `state_dict` is
    empty, it can be pickled, and tensors on any device are taken, moved by way of the CPU, and
    given back where they were.

    Attributes:
        movement: what moves where.
    """

    def __init__(self, movement: Movement) -> None:
        super().__init__()
        self.movement = movement

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            from .compiled import compiled

            return compiled(_number(self.movement), x)
        return moved(self.movement, x)

    def extra_repr(self) -> str:
        settings = self.movement.settings()
        grids = " to ".join(each.brief for each in self.movement.partitions)
        return f"{grids}, {settings}" if settings else grids
