"""Clipping of the parameters that a trainer names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

import weft


def clip(
    parameters: Iterable[Tensor], modules: Iterable[nn.Module], max_norm: float, norm_type: Any = 2
) -> Tensor:
    """Clip gradients as `weft.clip_grad_norm_` does.

    Args:
        parameters: what the trainer clips.
        modules: one of them is clipped in place of its parameters, if they are all of its: a module
            says which of them are shards.
        max_norm, norm_type: as for `weft.clip_grad_norm_`.
    """
    given = list(parameters)
    for module in modules:
        if {*given} == {*module.parameters()}:
            return weft.clip_grad_norm_(module, max_norm, norm_type)
    return weft.clip_grad_norm_(given, max_norm, norm_type)
