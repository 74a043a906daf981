"""What the methods of groups written in Python are given.

C++ and torch.distributed's functions give lists and an options object; who calls a group's method
himself may give one tensor and a ReduceOp, as the overloads of `torch.distributed.ProcessGroup`
have it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .collectives import op_name

__all__ = ["listed", "nested", "op_of", "root_of"]


def listed(tensors: Any) -> list[Tensor]:
    """One tensor or a list of them, as a list."""
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def nested(tensors: Any) -> list[list[Tensor]]:
    """A list of tensors or a list of such lists, as the latter."""
    if not tensors or isinstance(tensors[0], Tensor):
        return [list(tensors)]
    return [list(each) for each in tensors]


def op_of(options: Any) -> str:
    """weft's name of the reduction; a sum if nothing is said."""
    return "sum" if options is None else op_name(getattr(options, "reduceOp", options))


def root_of(options: Any) -> int:
    """The rank that a rooted collective starts or ends at."""
    root: int = options if isinstance(options, int) else options.rootRank
    return root
