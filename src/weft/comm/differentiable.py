"""Linear collectives as autograd sees them: the backward of one is its adjoint, another of them.

Whether a call is recorded is decided by all ranks together: where one rank's tensors require a
gradient, the results of all ranks do, so that backward runs everywhere. A rank whose own tensors
require none would otherwise leave the others waiting.

The adjoint states which call it is the backward of. Ranks whose graphs run in different orders are
told so, instead of mixing up gradients of the same size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from .opening import Mode

__all__ = ["Linear", "applied"]


class Linear(Protocol):
    """A collective that is linear in its tensors."""

    def run(self, tensors: Sequence[Tensor], mode: Mode) -> tuple[list[Tensor], bool]:
        """Do it, without autograd; the results, and whether some rank records gradients."""

    def adjoint(self) -> Linear:
        """Takes the gradients of the results, gives those of the tensors; asked for after `run`."""


def applied(collective: Linear, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The results of a collective, differentiable any number of times."""
    mode = Mode.of(tensors)
    if not (mode.enabled and all(t.is_floating_point() or t.is_complex() for t in tensors)):
        return collective.run(tensors, mode)[0]
    # makes autograd record the call where no tensor of this rank would
    anchor = torch.empty(0, requires_grad=True)
    return list(cast(tuple[Tensor, ...], _Applied.apply(collective, mode, anchor, *tensors)))  # type: ignore[no-untyped-call]  # torch's


class _Applied(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, collective: Linear, mode: Mode, anchor: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        results, recorded = collective.run(tensors, mode)
        ctx.collective = collective
        if not recorded:
            ctx.mark_non_differentiable(*results)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, None, *applied(ctx.collective.adjoint(), gradients))
