"""What layers ask of grids once, while code is compiled, which alone imports this file."""

from __future__ import annotations

import torch

from ..partition import MPIPartition


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # torch's has no types
def only_brings(P_x: MPIPartition, P_y: MPIPartition) -> bool:
    """Whether this worker is one of the input's grid, and none of the output's."""
    return P_x.active and not P_y.active
