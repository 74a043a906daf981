"""The base class of all layers: a torch.nn.Module around a spec."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..base.errors import WeftError
from .autograd import applied
from .partition import lengths_of
from .plan import Plan
from .spec import Spec, planned


class Layer(torch.nn.Module):
    """A movement of data as a module, without parameters.

    `layer(x)` is collective among the ranks that take part. Other ranks pass a tensor without
    elements, get one, and wait for nobody. The result is a new tensor on the device of the input,
    in the memory format `channels_last` or `channels_last_3d` if the input is in that. The inputs
    of the ranks that take part must be on the same kind of device, also those without elements. The
    `state_dict` is empty. The layer can be pickled, unless its partition is of a `weft.Group`.

    Attributes:
        spec: what moves where.

    Raises:
        WeftError: from a call, forward or backward: some rank's tensor or layer is wrong, or does
            not fit the others'; the same text on every rank that takes part. The next call works.
        WireError: a peer or a link failed; names the culprit. The group is lost.
    """

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.spec = spec

    def forward(self, x: Tensor) -> Tensor:
        return applied(self.spec, x)

    def plan(self, shapes: Mapping[int, Sequence[int]]) -> Plan:
        """Who sends what to whom, among the ranks that take part; it sends nothing.

        Args:
            shapes: the shape of the tensor that each of these ranks passes, by rank.

        Raises:
            WeftError: this rank does not take part, or the shapes do not fit.

        Example:
            >>> import weft
            >>> from weft.testing import run
            >>> def program(group):
            ...     grid = weft.Partition(3)
            ...     shapes = {rank: box.shape for rank, box in grid.boxes((9, 2)).items()}
            ...     plan = weft.nn.HaloExchange(grid, 1).plan(shapes)
            ...     return [(move.source, move.take.shape) for move in plan.moves]
            >>> run(3, program)[0][:2]
            [(0, (3, 2)), (1, (1, 2))]
        """
        spec = self.spec
        rank = spec.partitions[0].rank
        ranks = spec.groups.get(rank)
        if ranks is None:
            raise WeftError(
                f"rank {rank}: {spec.name} does not concern this rank, which has no plan"
            )
        if not isinstance(shapes, Mapping):
            raise WeftError(f"{spec.name}: shapes is {shapes!r}: pass a shape for each rank")
        sources = [each for each in ranks if each in spec.sources]
        if missing := [each for each in sources if each not in shapes]:
            raise WeftError(
                f"rank {rank}: the plan of {spec.name} needs the shapes of ranks {sources}, and "
                f"those of {missing} are not given"
            )
        found = {each: lengths_of(spec.name, f"shapes[{each}]", shapes[each]) for each in sources}
        return planned(spec, tuple(found.items()))

    def extra_repr(self) -> str:
        settings = self.spec.settings()
        grids = " to ".join(each.brief for each in self.spec.partitions)
        return f"{grids}, {settings}" if settings else grids
