"""What groups written in Python have in common: the class, and what their methods are given.

C++ and torch.distributed's functions give lists and an options object; who calls a group's method
himself may give one tensor and a ReduceOp, as the overloads of `torch.distributed.ProcessGroup`
have it.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from .collectives import op_name

__all__ = ["PythonGroup", "listed", "nested", "op_of", "root_of"]

# To mypy it is Any: its stubs are those of the C++ class, whose overloads a method written in
# Python serves all at once, and whose constructor takes a store, which that of a Python group
# does not.
PythonGroup: Any = dist.ProcessGroup


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
