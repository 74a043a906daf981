"""The face that all layers have: torch.nn.Module around a movement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from ..errors import WeftError
from ..plan import Plan
from .door import moved
from .movement import Movement, planned
from .partition import lengths_of

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

    def plan(self, shapes: Sequence[int] | Mapping[int, Sequence[int]]) -> Plan:
        """Who sends what to whom, among the ranks that this one has to do with; nothing is sent.

        Args:
            shapes: of the tensor that each of those ranks brings, by rank; or what `shape=` of the
                layer is, for a tensor that is cut evenly.

        Raises:
            WeftError: this rank has nothing to do with the layer, or the shapes do not fit.

        Example:
            >>> import weft
            >>> from weft.testing import run
            >>> def program(wire):
            ...     plan = weft.nn.HaloExchange(weft.Partition(3), 1).plan((9, 2))
            ...     return [(move.source, move.take.shape) for move in plan.moves]
            >>> run(3, program)[0][:2]
            [(0, (3, 2)), (1, (1, 2))]
        """
        movement, rank = self.movement, self.movement.partitions[0].rank
        ranks = movement.groups.get(rank)
        if ranks is None:
            raise WeftError(
                f"rank {rank}: {movement.name} does not concern this rank, which has no plan"
            )
        if not isinstance(shapes, Mapping):
            shapes = self._evenly(rank, lengths_of(movement.name, "shapes", shapes))
        givers = [each for each in ranks if each in movement.givers]
        if missing := [each for each in givers if each not in shapes]:
            raise WeftError(
                f"rank {rank}: the plan of {movement.name} needs the shapes of ranks {givers}, and "
                f"those of {missing} are not given"
            )
        found = {
            each: lengths_of(movement.name, f"shapes[{each}]", shapes[each]) for each in givers
        }
        return planned(movement, tuple(found.items()))

    def _evenly(self, rank: int, shape: Sequence[int]) -> Mapping[int, Sequence[int]]:
        """What each rank brings of a tensor that is cut evenly."""
        whole: dict[str, Any] = {"shape": shape}
        found = None
        if any(each.name == "shape" for each in fields(self.movement)):
            found = replace(self.movement, **whole).expected(rank)
        if found is None:
            raise WeftError(
                f"rank {rank}: {self.movement.name} does not tell what ranks have from the whole "
                "tensor's shape: pass the shapes by rank"
            )
        return found

    def extra_repr(self) -> str:
        settings = self.movement.settings()
        grids = " to ".join(each.brief for each in self.movement.partitions)
        return f"{grids}, {settings}" if settings else grids
